"""The shape of a model from the `config.json` of a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.job import Model
from ds_toolkit.units import format_count

# Blocks with a gated feed-forward part and no positional embedding; others count like them, with a note.
_LLAMA_LIKE = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3"})
_LARGEST_CONFIG_BYTES = 10_000_000


def read_hf_model(path: Path) -> Model:
    """The model that a Hugging Face `config.json` describes, or one in the folder that is named.

    Raises:
        ToolkitError: it cannot be read, is not JSON, or lacks a size.
    """
    file = path / "config.json" if path.is_dir() else path
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
    return hf_model(data, str(file))


def hf_model(data: Mapping[str, object], where: str) -> Model:
    """The model that such a configuration describes, with the size of each parameter in the module's order.

    Counted from the published layer shapes: Llama (arXiv 2302.13971) and its relatives, GPT-2, GPT-NeoX.
    """
    # Multimodal models keep their language part in a section of its own.
    text = data.get("text_config")
    shape = _Shape(text if isinstance(text, Mapping) else data, where)
    kind = str(shape.data.get("model_type", "unknown"))
    count = {"gpt2": _gpt2, "gpt_neox": _gpt_neox}.get(kind, _llama)
    sizes = tuple(count(shape))
    note = "" if kind in _LLAMA_LIKE or count is not _llama else ", counted as Llama's layers would be"
    hidden, layers = shape.hidden_size, shape.num_layers
    rationale = (
        f"{where}: {kind}, {layers} blocks of width {hidden}, {format_count(sum(sizes))} parameters{note}"
    )
    return Model(sum(sizes), layers, hidden, shape["vocab_size"], rationale, sizes)


class _Shape:
    """Sizes by name; families spell some of them differently."""

    def __init__(self, data: Mapping[str, object], where: str) -> None:
        self.data = data
        self.where = where

    def __getitem__(self, name: str) -> int:
        return self.first(name)

    def first(self, *names: str, default: int | None = None) -> int:
        """The first of these that is given, as a whole number above zero."""
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ToolkitError(
                    f"`{name}` is {value!r}", where=self.where, fix="it must be a whole number"
                )
            return value
        if default is None:
            raise ToolkitError(
                f"the model's configuration has no `{names[0]}`",
                where=self.where,
                fix="give the number of parameters instead, such as --model 7B",
            )
        return default

    @property
    def hidden_size(self) -> int:
        return self.first("hidden_size", "n_embd", "d_model")

    @property
    def num_layers(self) -> int:
        return self.first("num_hidden_layers", "n_layer", "num_layers")

    def flag(self, name: str, *, default: bool) -> bool:
        return bool(self.data.get(name, default))


def _llama(shape: _Shape) -> Iterator[int]:
    hidden, kind = shape.hidden_size, shape.data.get("model_type")
    heads = shape.first("num_attention_heads", "n_head")
    head = shape.first("head_dim", default=hidden // heads)
    queries, values = heads * head, shape.first("num_key_value_heads", default=heads) * head
    feed_forward = shape.first("intermediate_size", "n_inner", default=4 * hidden)
    experts = shape.first("num_local_experts", default=0) if "num_local_experts" in shape.data else 0
    has_bias = shape.flag("attention_bias", default=kind == "qwen2")
    yield shape["vocab_size"] * hidden
    for _ in range(shape.num_layers):
        for width in (queries, values, values):
            yield hidden * width
            if has_bias:
                yield width
        yield queries * hidden
        if has_bias and kind != "qwen2":
            yield hidden
        if kind == "qwen3":
            yield from (head, head)
        if experts:
            # One tensor for gate and up of all experts, one for down.
            yield from (
                experts * hidden,
                experts * 2 * hidden * feed_forward,
                experts * hidden * feed_forward,
            )
        else:
            yield from (hidden * feed_forward,) * 3
        yield from (hidden, hidden)
    yield hidden
    if not shape.flag("tie_word_embeddings", default=False):
        yield shape["vocab_size"] * hidden


def _gpt2(shape: _Shape) -> Iterator[int]:
    hidden = shape.hidden_size
    yield from (shape["vocab_size"] * hidden, shape.first("n_positions", default=1024) * hidden)
    feed_forward = shape.first("n_inner", default=4 * hidden)
    for _ in range(shape.num_layers):
        yield from (hidden, hidden, 3 * hidden**2, 3 * hidden, hidden**2, hidden, hidden, hidden)
        yield from (hidden * feed_forward, feed_forward, feed_forward * hidden, hidden)
    yield from (hidden, hidden)


def _gpt_neox(shape: _Shape) -> Iterator[int]:
    hidden, feed_forward = shape.hidden_size, shape["intermediate_size"]
    yield shape["vocab_size"] * hidden
    for _ in range(shape.num_layers):
        yield from (hidden, hidden, hidden, hidden)
        yield from (3 * hidden**2, 3 * hidden, hidden**2, hidden)
        yield from (hidden * feed_forward, feed_forward, feed_forward * hidden, hidden)
    yield from (hidden, hidden)
    if not shape.flag("tie_word_embeddings", default=False):
        yield shape["vocab_size"] * hidden
