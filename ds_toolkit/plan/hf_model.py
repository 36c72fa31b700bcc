"""The shape of a model from the `config.json` of a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.job import Model
from ds_toolkit.units import format_count

_LARGEST_CONFIG_BYTES = 10_000_000
# Beyond what anyone trains; a file that says more is broken, and would only be counted for a long time.
_MOST_LAYERS = 2_000
_LARGEST_SIZE = 10_000_000
_LAYER_COUNTS = frozenset({"num_hidden_layers", "n_layer", "num_layers"})
# Keys of mixtures of experts: one that the family is not known to have would make the count wrong.
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_intermediate_size")
_COUNT_INSTEAD = "give the number of parameters instead, such as --model 30B"


@dataclass(frozen=True)
class _Gated:
    """How the blocks of a family with a gated feed-forward part differ from Llama's.

    The defaults are those of the family's configuration class in transformers, which a file may leave out;
    the tests hold them, and the counts, against transformers itself.

    Attributes:
        norms: normalizations with a weight in each block.
        norm_tensors: parameters of each: a weight, or a weight and a bias; 0 where they have none.
        qkv_bias: whether queries, keys and values have biases whatever the file says.
        bias_keys: the flags that give a bias to queries, keys and values, and to the output as well.
        mlp_bias: whether the flag of that name is heeded.
        tied: whether the output shares the embedding by default.
        head: width of a head by default; None for the model's width over the heads.
        key_value_heads: by default; None for as many as there are heads.
        query_norm: whether queries and keys are normalized, head by head.
        fused: whether queries, keys and values are one tensor, and gate and up another.
        experts: by default; 0 for a family without.
    """

    norms: int = 2
    norm_tensors: int = 1
    qkv_bias: bool = False
    bias_keys: tuple[str, str] | None = None
    mlp_bias: bool = False
    tied: bool = False
    head: int | None = None
    key_value_heads: int | None = None
    query_norm: bool = False
    fused: bool = False
    experts: int = 0


_BIAS = ("attention_bias", "attention_bias")
_GATED: dict[str, _Gated] = {
    "llama": _Gated(bias_keys=_BIAS, mlp_bias=True),
    "mistral": _Gated(key_value_heads=8),
    "mixtral": _Gated(key_value_heads=8, experts=8),
    "qwen2": _Gated(qkv_bias=True, key_value_heads=32),
    "qwen3": _Gated(bias_keys=_BIAS, key_value_heads=32, head=128, query_norm=True),
    "gemma": _Gated(bias_keys=_BIAS, tied=True, head=256, key_value_heads=16),
    "gemma2": _Gated(bias_keys=_BIAS, tied=True, head=256, key_value_heads=4, norms=4),
    "phi3": _Gated(fused=True),
    "olmo": _Gated(bias_keys=_BIAS, norm_tensors=0),
    "stablelm": _Gated(bias_keys=("use_qkv_bias", ""), norm_tensors=2, key_value_heads=32),
}


def read_hf_model(path: Path) -> Model:
    """The model that a Hugging Face `config.json` describes, or one in the folder that is named.

    Raises:
        ToolkitError: it cannot be read, is not JSON, lacks a size, or is of a family that is not counted.
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

    Counted from the layers as transformers builds them; other families are refused, since a count that is
    wrong by tens of percent, or tenfold for experts, looks like a right one.
    """
    kind = str(data.get("model_type"))
    shape = _Shape(data, where)
    count = _COUNTERS.get(kind)
    if count is None:
        names = ", ".join(sorted(_COUNTERS))
        raise ToolkitError(
            f"models of the type `{kind}` cannot be counted",
            where=where,
            why=f"their layers are not known here; those of {names} are",
            fix=_COUNT_INSTEAD,
        )
    handled = "num_local_experts" if kind in _GATED and _GATED[kind].experts else None
    unexpected = [key for key in _EXPERT_KEYS if key != handled and data.get(key) not in (None, 0)]
    if unexpected:
        raise ToolkitError(
            f"`{unexpected[0]}` in a model of the type `{kind}` is not counted",
            where=where,
            why="the family has no such experts, so its layers are others than those known here",
            fix=_COUNT_INSTEAD,
        )
    sizes = tuple(count(shape))
    hidden, layers = shape.hidden_size, shape.num_layers
    rationale = f"{where}: {kind}, {layers} blocks of width {hidden}, {format_count(sum(sizes))} parameters"
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
            most = _MOST_LAYERS if name in _LAYER_COUNTS else _LARGEST_SIZE
            if value > most:
                raise ToolkitError(
                    f"`{name}` is {value}",
                    where=self.where,
                    why=f"more than {most} is no model",
                    fix=_COUNT_INSTEAD,
                )
            return value
        if default is None:
            raise ToolkitError(
                f"the model's configuration has no `{names[0]}`", where=self.where, fix=_COUNT_INSTEAD
            )
        return default

    @property
    def hidden_size(self) -> int:
        return self.first("hidden_size", "n_embd", "n_embed", "d_model")

    @property
    def num_layers(self) -> int:
        return self.first("num_hidden_layers", "n_layer", "num_layers")

    def flag(self, name: str, *, default: bool) -> bool:
        return bool(self.data.get(name, default))


def _gated(shape: _Shape) -> Iterator[int]:
    family = _GATED[str(shape.data["model_type"])]
    hidden, heads = shape.hidden_size, shape["num_attention_heads"]
    head = shape.first(
        "head_dim", default=hidden // heads if "head_dim" in shape.data else family.head or hidden // heads
    )
    # Where the file says null, there are as many as heads; where it says nothing, the family's default.
    few = None if "num_key_value_heads" in shape.data else family.key_value_heads
    queries, values = heads * head, shape.first("num_key_value_heads", default=few or heads) * head
    feed_forward = shape["intermediate_size"]
    experts = shape.first("num_local_experts", default=family.experts) if family.experts else 0
    qkv_key, output_key = family.bias_keys or ("", "")
    qkv_bias = family.qkv_bias or shape.flag(qkv_key, default=False)
    mlp_bias = family.mlp_bias and shape.flag("mlp_bias", default=False)
    norms = family.norms
    if shape.data["model_type"] == "stablelm":
        if shape.flag("qk_layernorm", default=False):
            raise ToolkitError("`qk_layernorm` is not counted", where=shape.where, fix=_COUNT_INSTEAD)
        # Both parts of a block read the same normalized input.
        norms -= shape.flag("use_parallel_residual", default=False)
    norm = (hidden,) * family.norm_tensors
    yield shape["vocab_size"] * hidden
    for _ in range(shape.num_layers):
        for width in (queries + 2 * values,) if family.fused else (queries, values, values):
            yield hidden * width
            if qkv_bias:
                yield width
        yield queries * hidden
        if shape.flag(output_key, default=False):
            yield hidden
        if family.query_norm:
            yield from (head, head)
        if experts:
            # One tensor for gate and up of all experts, one for down.
            yield from (
                experts * hidden,
                experts * 2 * hidden * feed_forward,
                experts * hidden * feed_forward,
            )
        else:
            for width in (2 * feed_forward,) if family.fused else (feed_forward, feed_forward):
                yield hidden * width
                if mlp_bias:
                    yield width
            yield feed_forward * hidden
            if mlp_bias:
                yield hidden
        yield from norm * norms
    yield from norm
    if not shape.flag("tie_word_embeddings", default=family.tied):
        yield shape["vocab_size"] * hidden


def _gpt2(shape: _Shape) -> Iterator[int]:
    hidden = shape.hidden_size
    if shape.flag("add_cross_attention", default=False):
        raise ToolkitError("`add_cross_attention` is not counted", where=shape.where, fix=_COUNT_INSTEAD)
    yield from (shape["vocab_size"] * hidden, shape.first("n_positions", default=1024) * hidden)
    feed_forward = shape.first("n_inner", default=4 * hidden)
    for _ in range(shape.num_layers):
        yield from (hidden, hidden, 3 * hidden**2, 3 * hidden, hidden**2, hidden, hidden, hidden)
        yield from (hidden * feed_forward, feed_forward, feed_forward * hidden, hidden)
    yield from (hidden, hidden)
    if not shape.flag("tie_word_embeddings", default=True):
        yield shape["vocab_size"] * hidden


def _gpt_neox(shape: _Shape) -> Iterator[int]:
    hidden, feed_forward = shape.hidden_size, shape["intermediate_size"]
    has_bias = shape.flag("attention_bias", default=True)
    yield shape["vocab_size"] * hidden
    for _ in range(shape.num_layers):
        yield from (hidden, hidden, hidden, hidden)
        yield from (3 * hidden**2, 3 * hidden, hidden**2, hidden) if has_bias else (3 * hidden**2, hidden**2)
        yield from (hidden * feed_forward, feed_forward, feed_forward * hidden, hidden)
    yield from (hidden, hidden)
    if not shape.flag("tie_word_embeddings", default=False):
        yield shape["vocab_size"] * hidden


def _bloom(shape: _Shape) -> Iterator[int]:
    hidden = shape.hidden_size
    # The embedding has a normalization of its own.
    yield from (shape["vocab_size"] * hidden, hidden, hidden)
    for _ in range(shape.num_layers):
        yield from (hidden, hidden, 3 * hidden**2, 3 * hidden, hidden**2, hidden, hidden, hidden)
        yield from (4 * hidden**2, 4 * hidden, 4 * hidden**2, hidden)
    yield from (hidden, hidden)
    if not shape.flag("tie_word_embeddings", default=True):
        yield shape["vocab_size"] * hidden


_COUNTERS: dict[str, Callable[[_Shape], Iterator[int]]] = {
    **dict.fromkeys(_GATED, _gated),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "bloom": _bloom,
}
# The families that are counted to the element, by the `model_type` of transformers.
EXACT_MODEL_TYPES = frozenset(_COUNTERS)
