"""The modules of a Hugging Face model as transformers builds them: the sizes of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.hf_families import GATED, Gated, Mixture
from ds_toolkit.plan.hf_shape import COUNT_INSTEAD, Shape
from ds_toolkit.plan.job import Experts

# The parameters of what ZeRO-3 gathers at a time: the embedding, a block, the end.
Module = tuple[int, ...]
# Keys of mixtures of experts: one that the family is not known to have would make the count wrong.
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_intermediate_size")


@dataclass(frozen=True)
class Layers:
    """A model's modules in their order, and its experts, if it has any."""

    modules: tuple[Module, ...]
    experts: Experts | None = None


@dataclass(frozen=True)
class _Routing:
    """The experts of one model: how many, how many a token passes, their widths, and the blocks with them."""

    num_experts: int
    per_token: int
    width: int
    shared_width: int
    blocks: frozenset[int]


def layers_of(shape: Shape) -> Layers:
    """The layers of such a model.

    Raises:
        UncountedError: they are not known here.
        ToolkitError: a size is missing, or none.
    """
    kind = shape.data.get("model_type")
    if not isinstance(kind, str):
        raise ToolkitError(
            "the model's configuration has no `model_type`", where=shape.where, fix=COUNT_INSTEAD
        )
    family = GATED.get(kind)
    if family is None and kind not in _OTHERS:
        raise shape.uncounted(
            f"models of the type `{kind}` cannot be counted",
            f"their layers are not known here; those of {', '.join(sorted(EXACT_MODEL_TYPES))} are",
        )
    _refuse_another_head(shape, kind)
    handled = (*family.mixture.count_keys, family.mixture.width_key) if family and family.mixture else ()
    for key in _EXPERT_KEYS:
        if key not in handled and shape.data.get(key) not in (None, 0):
            raise shape.uncounted(
                f"`{key}` in a model of the type `{kind}` is not counted",
                "the family has no such experts, so its layers are others than those known here",
            )
    return Layers(tuple(_OTHERS[kind](shape))) if family is None else _gated(shape, family)


def _refuse_another_head(shape: Shape, kind: str) -> None:
    # A classifier, an embedder or somebody's own class has other parameters than the language model.
    named = shape.data.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else None
    stem = kind.removesuffix("_text").replace("_", "")
    if architecture and architecture.lower() not in (f"{stem}forcausallm", f"{stem}lmheadmodel"):
        raise shape.uncounted(
            f"`{architecture}` cannot be counted",
            f"of models of the type `{kind}` the layers of the language model alone are known here",
        )


def _gated(shape: Shape, family: Gated) -> Layers:
    hidden, vocabulary = shape.hidden_size, shape["vocab_size"]
    routing = None if family.mixture is None else _routing(shape, family.mixture)
    attention = tuple((_latent_attention if family.latent else _attention)(shape, family))
    norms = family.norms
    if shape.data["model_type"] == "stablelm":
        if shape.flag("qk_layernorm", default=False):
            raise shape.uncounted("`qk_layernorm` is not counted", "its parameters are not known here")
        # Both parts of a block read the same normalized input.
        norms -= shape.flag("use_parallel_residual", default=False)
    norm = (hidden,) * family.norm_tensors
    sparse_blocks = frozenset[int]() if routing is None else routing.blocks
    dense: Module = ()
    if len(sparse_blocks) < shape.num_layers:
        dense = (*attention, *_feed_forward(shape, family, shape["intermediate_size"]), *norm * norms)
    sparse: Module = ()
    if routing is not None and family.mixture is not None:
        sparse = (*attention, *_experts(shape, family, family.mixture, routing), *norm * norms)
    blocks = [sparse if block in sparse_blocks else dense for block in range(shape.num_layers)]
    tied = shape.flag("tie_word_embeddings", default=family.tied)
    modules = ((vocabulary * hidden,), *blocks, norm, () if tied else (vocabulary * hidden,))
    if routing is None or not sparse_blocks:
        return Layers(modules)
    biased = family.mixture is not None and family.mixture.biased
    one_expert = sum(_expert(hidden, routing.width, biased=biased))
    idle = len(sparse_blocks) * (routing.num_experts - routing.per_token) * one_expert
    active_width = routing.per_token * routing.width + routing.shared_width
    return Layers(modules, Experts(sum(map(sum, modules)) - idle, routing.per_token, active_width))


def _attention(shape: Shape, family: Gated) -> Iterator[int]:
    hidden, heads = shape.hidden_size, shape["num_attention_heads"]
    head = shape.unless_null("head_dim", family.head) or hidden // heads
    queries = heads * head
    values = (shape.unless_null("num_key_value_heads", family.key_value_heads) or heads) * head
    qkv_key, output_key = family.bias_keys
    if family.sinks:
        yield heads
    for width in (queries + 2 * values,) if family.fused_qkv else (queries, values, values):
        yield hidden * width
        if family.qkv_bias or (qkv_key and shape.flag(qkv_key, default=family.bias)):
            yield width
    yield queries * hidden
    if output_key and shape.flag(output_key, default=family.bias):
        yield hidden
    if not family.query_norm_key or shape.flag(family.query_norm_key, default=False):
        yield from {"": (), "head": (head, head), "whole": (queries, values)}[family.query_norm]


def _latent_attention(shape: Shape, family: Gated) -> Iterator[int]:
    """DeepSeek-V3's (arXiv 2412.19437, 2.1.1): queries, and keys with values, through a narrow layer."""
    hidden, heads = shape.hidden_size, shape["num_attention_heads"]
    rotary = shape.first("qk_rope_head_dim", default=64)
    plain = shape.first("qk_nope_head_dim", default=128)
    value = shape.first("v_head_dim", default=128)
    narrow_values = shape.first("kv_lora_rank", default=512)
    narrow_queries = shape.unless_null("q_lora_rank", 1536)
    biased = shape.flag("attention_bias", default=family.bias)
    queries = heads * (plain + rotary)
    if narrow_queries is None:
        yield hidden * queries
    else:
        yield hidden * narrow_queries
        yield from (narrow_queries,) * (1 + biased)
        yield narrow_queries * queries
    yield hidden * (narrow_values + rotary)
    if biased:
        yield narrow_values + rotary
    yield from (narrow_values, narrow_values * heads * (plain + value), heads * value * hidden)
    if biased:
        yield hidden


def _feed_forward(shape: Shape, family: Gated, width: int) -> Iterator[int]:
    hidden = shape.hidden_size
    biased = bool(family.mlp_bias_key) and shape.flag(family.mlp_bias_key, default=family.bias)
    ups = (2 * width,) if family.fused_gate else (width, width) if family.gated else (width,)
    for up in ups:
        yield hidden * up
        if biased:
            yield up
    yield width * hidden
    if biased:
        yield hidden


def _routing(shape: Shape, mixture: Mixture) -> _Routing:
    width = shape.first(mixture.width_key, default=mixture.width)
    shared_width = 0
    if mixture.shared_key:
        shared = shape.first(mixture.shared_key, default=mixture.shared)
        shared_width = shared * width if mixture.shared_key.startswith("n_") else shared
    num_experts = shape.first(*mixture.count_keys, default=mixture.num_experts)
    return _Routing(
        num_experts,
        min(num_experts, shape.first("num_experts_per_tok", default=mixture.per_token)),
        width,
        shared_width,
        frozenset(_blocks_with_experts(shape, mixture)),
    )


def _blocks_with_experts(shape: Shape, mixture: Mixture) -> Iterator[int]:
    if mixture.dense_key != "mlp_only_layers":
        first = shape.first(mixture.dense_key, default=mixture.dense, least=0) if mixture.dense_key else 0
        yield from range(first, shape.num_layers)
        return
    dense = shape.data.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise shape.uncounted("`mlp_only_layers` is not counted", "it is no list of blocks")
    step = shape.first("decoder_sparse_step", default=1)
    yield from (block for block in range(shape.num_layers) if block not in dense and (block + 1) % step == 0)


def _expert(hidden: int, width: int, *, biased: bool) -> tuple[int, ...]:
    """Gate and up in one matrix, and down; each with its bias where there is one."""
    return (2 * width * hidden, *(2 * width,) * biased, width * hidden, *(hidden,) * biased)


def _experts(shape: Shape, family: Gated, mixture: Mixture, routing: _Routing) -> Iterator[int]:
    hidden, biased = shape.hidden_size, mixture.biased
    yield from (routing.num_experts * hidden, *(routing.num_experts,) * biased)
    # One tensor holds the same matrix of all experts.
    yield from (routing.num_experts * size for size in _expert(hidden, routing.width, biased=biased))
    if routing.shared_width:
        yield from _feed_forward(shape, family, routing.shared_width)
    if mixture.shared_gate:
        yield hidden


def _gpt2(shape: Shape) -> Iterator[Module]:
    hidden = shape.hidden_size
    if shape.flag("add_cross_attention", default=False):
        raise shape.uncounted("`add_cross_attention` is not counted", "its layers are not known here")
    yield (shape["vocab_size"] * hidden,)
    yield (shape.first("n_positions", default=1024) * hidden,)
    width = shape.first("n_inner", default=4 * hidden)
    attention = (hidden, hidden, 3 * hidden**2, 3 * hidden, hidden**2, hidden, hidden, hidden)
    yield from [(*attention, hidden * width, width, width * hidden, hidden)] * shape.num_layers
    yield (hidden, hidden)
    if not shape.flag("tie_word_embeddings", default=True):
        yield (shape["vocab_size"] * hidden,)


def _gpt_neox(shape: Shape) -> Iterator[Module]:
    hidden, width = shape.hidden_size, shape["intermediate_size"]
    has_bias = shape.flag("attention_bias", default=True)
    attention = (3 * hidden**2, 3 * hidden, hidden**2, hidden) if has_bias else (3 * hidden**2, hidden**2)
    feed_forward = (hidden * width, width, width * hidden, hidden)
    yield (shape["vocab_size"] * hidden,)
    yield from [((hidden,) * 4 + attention + feed_forward)] * shape.num_layers
    yield (hidden, hidden)
    if not shape.flag("tie_word_embeddings", default=False):
        yield (shape["vocab_size"] * hidden,)


def _bloom(shape: Shape) -> Iterator[Module]:
    hidden = shape.hidden_size
    # The embedding has a normalization of its own.
    yield from ((shape["vocab_size"] * hidden,), (hidden, hidden))
    attention = (hidden, hidden, 3 * hidden**2, 3 * hidden, hidden**2, hidden, hidden, hidden)
    yield from [(*attention, 4 * hidden**2, 4 * hidden, 4 * hidden**2, hidden)] * shape.num_layers
    yield (hidden, hidden)
    if not shape.flag("tie_word_embeddings", default=True):
        yield (shape["vocab_size"] * hidden,)


_OTHERS: dict[str, Callable[[Shape], Iterator[Module]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "bloom": _bloom,
}
# The families that are counted to the element, by the `model_type` of transformers.
EXACT_MODEL_TYPES = frozenset(GATED) | frozenset(_OTHERS)
