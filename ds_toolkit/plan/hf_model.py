"""The shape of a model from the `config.json` of a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.hf_layers import layers_of
from ds_toolkit.plan.hf_shape import Shape
from ds_toolkit.plan.job import Experts, Model
from ds_toolkit.units import format_count

_LARGEST_CONFIG_BYTES = 10_000_000


def hf_config_file(path: Path) -> Path:
    """The file itself, or `config.json` in the folder that is named."""
    return path / "config.json" if path.is_dir() else path


def read_hf_config(path: Path) -> dict[str, object]:
    """What a model's `config.json` says; a folder stands for the one in it.

    Raises:
        ToolkitError: it cannot be read, is not JSON, or is no object.
    """
    file = hf_config_file(path)
    try:
        if file.stat().st_size > _LARGEST_CONFIG_BYTES:
            raise ToolkitError("the file is too large for a model's configuration", where=file)
        data = json.loads(file.read_bytes())
    except OSError as error:
        raise ToolkitError(
            "the model's configuration cannot be read", where=file, why=error.strerror
        ) from error
    except ValueError as error:
        raise ToolkitError("the model's configuration is not JSON", where=file, why=str(error)) from error
    except RecursionError as error:
        raise ToolkitError("the model's configuration is nested too deeply", where=file) from error
    if not isinstance(data, dict):
        raise ToolkitError("the model's configuration is not an object", where=file)
    return data


def hf_model(data: Mapping[str, object], where: str) -> Model:
    """The model that such a configuration describes, with the size of each parameter in the module's order.

    Counted by formula from the layers as transformers builds them.

    Raises:
        UncountedError: its layers are not known here; a count that is wrong by tens of percent, or tenfold
            for experts, would look like a right one.
        ToolkitError: it lacks a size.
    """
    shape = Shape(data, where)
    layers = layers_of(shape)
    sizes = tuple(size for module in layers.modules for size in module)
    kind, hidden, num_layers = data["model_type"], shape.hidden_size, shape.num_layers
    return Model(
        sum(sizes),
        num_layers,
        hidden,
        shape["vocab_size"],
        f"{where}: {kind}, {counted_words(num_layers, hidden, sum(sizes), 'by formula', layers.experts)}",
        sizes,
        max(map(sum, layers.modules)),
        layers.experts,
    )


def counted_words(num_layers: int, hidden: int, total: int, how: str, experts: Experts | None) -> str:
    """The size of a model in words, and how it was counted."""
    words = f"{num_layers} blocks of width {hidden}, {format_count(total)} parameters, counted {how}"
    if experts is not None:
        words += (
            f"; {format_count(experts.num_active_parameters)} of them work on a token: compute goes by these,"
            " memory and communication by all, since ZeRO knows no experts"
        )
    return words
