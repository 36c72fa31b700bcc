"""The sizes that a Hugging Face `config.json` gives, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping

from ds_toolkit.errors import ToolkitError

COUNT_INSTEAD = "give the number of parameters instead, such as --model 30B"
# Beyond what anyone trains; a file that says more is broken, and would only be counted for a long time.
_MOST_LAYERS = 2_000
_LARGEST_SIZE = 10_000_000
_LAYER_COUNTS = frozenset({"num_hidden_layers", "n_layer", "num_layers"})


class UncountedError(ToolkitError):
    """No formula here counts this model; transformers, which can build it, may."""


class Shape:
    """Sizes by name; families spell some of them differently."""

    def __init__(self, data: Mapping[str, object], where: str) -> None:
        self.data = data
        self.where = where

    def __getitem__(self, name: str) -> int:
        return self.first(name)

    def first(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of these that is given, as a whole number of `least` or more.

        Raises:
            ToolkitError: it is no such number, or none is given and there is no default.
        """
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ToolkitError(
                    f"`{name}` is {value!r}",
                    where=self.where,
                    fix=f"it must be a whole number of {least} or more",
                )
            most = _MOST_LAYERS if name in _LAYER_COUNTS else _LARGEST_SIZE
            if value > most:
                raise ToolkitError(
                    f"`{name}` is {value}",
                    where=self.where,
                    why=f"more than {most} is no model",
                    fix=COUNT_INSTEAD,
                )
            return value
        if default is None:
            raise ToolkitError(
                f"the model's configuration has no `{names[0]}`", where=self.where, fix=COUNT_INSTEAD
            )
        return default

    def unless_null(self, name: str, default: int | None) -> int | None:
        """The size where one is given, the default where the file says nothing, None where it says null."""
        if name in self.data and self.data[name] is None:
            return None
        return default if name not in self.data else self[name]

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.first("hidden_size", "n_embd", "n_embed", "d_model")

    @property
    def num_layers(self) -> int:
        """Transformer blocks."""
        return self.first("num_hidden_layers", "n_layer", "num_layers")

    def flag(self, name: str, *, default: bool) -> bool:
        """Whether it is set."""
        return bool(self.data.get(name, default))

    def uncounted(self, what: str, why: str) -> UncountedError:
        """The error to raise where the file describes layers that are not known here."""
        return UncountedError(what, where=self.where, why=why, fix=COUNT_INSTEAD)
