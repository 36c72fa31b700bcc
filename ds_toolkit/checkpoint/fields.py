"""Values out of an unpickled structure, each proven to be of the kind that its key promises.

Files may be damaged or made by anybody, so that anything can stand anywhere. None counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ds_toolkit.checkpoint.reductions import TensorRecord
from ds_toolkit.checkpoint.shards import Shard
from ds_toolkit.errors import ToolkitError

# Of the dimensions of a tensor, and of all other counts: what no computer holds.
_ABSURD = 2**62

Shapes = Mapping[str, tuple[int, ...]]
Kind = TypeVar("Kind")


def unexpected(shard: Shard, why: str) -> ToolkitError:
    """A file does not hold what it should."""
    return ToolkitError("a checkpoint file does not hold what its name says", where=shard.path, why=why)


def not_together(shard: Shard, why: str, what: str = "the files of a checkpoint") -> ToolkitError:
    """A file contradicts the others of its tag."""
    return ToolkitError(
        f"{what} do not belong together",
        where=shard.path,
        why=why,
        fix="take another tag: these files are of different saves",
    )


class Fields:
    """A mapping of a file, read key by key.

    Every method raises a ToolkitError, with file and key, where the value is of another kind.
    """

    def __init__(self, shard: Shard, value: Any, key: str = "the file") -> None:
        if not isinstance(value, dict):
            raise unexpected(shard, f"{key} is no mapping")
        self.shard = shard
        self.value: Mapping[Any, Any] = value

    def __contains__(self, key: str) -> bool:
        return key in self.value

    def get(self, key: str) -> Any:
        """Whatever stands there; None if nothing does."""
        return self.value.get(key)

    def mapping(self, key: str) -> Fields:
        """A mapping; an absent one is empty."""
        value = self.get(key)
        return Fields(self.shard, {} if value is None else value, key)

    def items(self, key: str) -> list[Any]:
        """A list or tuple; an absent one is empty."""
        value = self.get(key)
        if value is not None and not isinstance(value, list | tuple):
            raise unexpected(self.shard, f"{key} is no list")
        return list(value or ())

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number, zero or more."""
        value = self.get(key)
        return self._number(key, default if value is None else value)

    def numbers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers, or one that stands alone; an absent one is empty."""
        value = self.get(key)
        values = [value] if isinstance(value, int) else self.items(key)
        return tuple(self._number(key, item) for item in values)

    def rows_of_numbers(self, key: str) -> tuple[tuple[int, ...], ...]:
        """A list of lists of whole numbers."""
        return tuple(Fields(self.shard, {key: row}).numbers(key) for row in self.items(key))

    def strings(self, key: str) -> tuple[str, ...]:
        """A list (or set) of strings."""
        value = self.get(key)
        values = sorted(value, key=str) if isinstance(value, set | frozenset) else self.items(key)
        return tuple(self._of(str, key, "a name", item) for item in values)

    def aliases(self, key: str) -> dict[str, str]:
        """Names that stand for names."""
        pairs = self.mapping(key).value
        return {self._of(str, key, "a name", a): self._of(str, key, "a name", b) for a, b in pairs.items()}

    def shapes(self, key: str) -> Shapes:
        """Shapes of tensors by their names."""
        return self._shapes(key, self.mapping(key).value)

    def rows_of_shapes(self, key: str) -> tuple[Shapes, ...]:
        """A list of mappings from names to shapes; a mapping alone, as older versions write it, is one."""
        value = self.get(key)
        rows = [value] if isinstance(value, dict) else self.items(key)
        return tuple(self._shapes(key, Fields(self.shard, row, key).value) for row in rows)

    def tensors(self, key: str) -> dict[str, TensorRecord]:
        """Tensors by their names."""
        return {
            self._of(str, key, "a name", name): self._of(TensorRecord, key, "a tensor", tensor)
            for name, tensor in self.mapping(key).value.items()
        }

    def _shapes(self, key: str, value: Mapping[Any, Any]) -> Shapes:
        shapes = {}
        for name, shape in value.items():
            sizes = self._of(tuple, key, "a shape", shape)
            if not all(_is_count(size) for size in sizes):
                raise unexpected(self.shard, f"{key} holds the shape {shape!r}")
            shapes[self._of(str, key, "a name", name)] = sizes
        return shapes

    def _number(self, key: str, value: Any) -> int:
        if not _is_count(value):
            raise unexpected(self.shard, f"{key} is no number")
        return int(value)

    def _of(self, kind: type[Kind], key: str, noun: str, value: Any) -> Kind:
        if not isinstance(value, kind):
            raise unexpected(self.shard, f"{key} holds what is not {noun}")
        return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _ABSURD
