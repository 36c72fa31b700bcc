"""How the blocks of Hugging Face families differ: a table."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Mixture:
    """The experts of a family.

    Attributes:
        num_experts: by default.
        per_token: how many of them get each token, by default.
        count_keys: what the file may call their number; it is told by the first that is there.
        width_key: what it calls the width of one.
        width: by default; None where the file must say it.
        shared_key: what gives the experts that all tokens share: their width, or their number of experts'
            widths where it begins with `n_`; empty for a family without.
        shared: by default.
        shared_gate: whether those have a gate of one row.
        dense_key: what the file calls the number of blocks at the start that have no experts, or the list of
            them (`mlp_only_layers`, with `decoder_sparse_step`); empty for a family with experts in all.
        dense: by default.
        biased: whether the router and each expert's matrices have biases.
    """

    num_experts: int
    per_token: int
    count_keys: tuple[str, ...] = ("num_local_experts",)
    width_key: str = "intermediate_size"
    width: int | None = None
    shared_key: str = ""
    shared: int = 0
    shared_gate: bool = False
    dense_key: str = ""
    dense: int = 0
    biased: bool = False


@dataclass(frozen=True)
class Gated:
    """How the blocks of a family differ from Llama's.

    The defaults are those of the family's configuration class in transformers, which a file may leave out;
    the tests hold them, and the counts, against transformers itself.

    Attributes:
        norms: normalizations with a weight in each block.
        norm_tensors: parameters of each: a weight, or a weight and a bias; 0 where they have none.
        bias_keys: the flags that give a bias to queries, keys and values, and to the output as well.
        bias: what those flags are by default.
        qkv_bias: whether queries, keys and values have biases whatever the file says.
        mlp_bias_key: the flag that gives biases to the feed-forward part; by default as the others.
        tied: whether the output shares the embedding by default.
        head: width of a head by default; None for the model's width over the heads.
        key_value_heads: by default; None for as many as there are heads.
        query_norm: whether queries and keys are normalized: by `head`, or as a `whole`.
        query_norm_key: the flag that turns it on; empty where it always is.
        fused_qkv: whether queries, keys and values are one tensor.
        fused_gate: whether gate and up are one tensor.
        gated: whether there is a gate.
        latent: whether attention is DeepSeek's, through two narrow matrices.
        sinks: whether attention has a number a head to lean on.
        mixture: the experts; None for a family without.
    """

    norms: int = 2
    norm_tensors: int = 1
    bias_keys: tuple[str, str] = ("", "")
    bias: bool = False
    qkv_bias: bool = False
    mlp_bias_key: str = ""
    tied: bool = False
    head: int | None = None
    key_value_heads: int | None = None
    query_norm: str = ""
    query_norm_key: str = ""
    fused_qkv: bool = False
    fused_gate: bool = False
    gated: bool = True
    latent: bool = False
    sinks: bool = False
    mixture: Mixture | None = None


_BIAS = ("attention_bias", "attention_bias")
_QKV_BIAS = ("attention_bias", "")
_GLM = Gated(bias_keys=_QKV_BIAS, bias=True, key_value_heads=2, head=128, fused_gate=True)
# Of Qwen, and of DeepSeek and those after it; their files spell the number of experts in two ways.
_QWEN = Mixture(
    128, 8, ("num_experts", "num_local_experts"), "moe_intermediate_size", 768, dense_key="mlp_only_layers"
)
_DEEPSEEK = Mixture(
    num_experts=256,
    per_token=8,
    count_keys=("n_routed_experts", "num_local_experts"),
    width_key="moe_intermediate_size",
    width=2048,
    shared_key="n_shared_experts",
    shared=1,
    dense_key="first_k_dense_replace",
    dense=3,
)
GATED: dict[str, Gated] = {
    "llama": Gated(bias_keys=_BIAS, mlp_bias_key="mlp_bias"),
    "mistral": Gated(key_value_heads=8),
    "ministral3": Gated(key_value_heads=8, head=128),
    "mixtral": Gated(key_value_heads=8, mixture=Mixture(8, 2)),
    "qwen2": Gated(qkv_bias=True, key_value_heads=32),
    "qwen2_moe": Gated(
        bias_keys=("qkv_bias", ""),
        bias=True,
        key_value_heads=16,
        mixture=replace(
            _QWEN,
            num_experts=60,
            per_token=4,
            width=1408,
            shared_key="shared_expert_intermediate_size",
            shared=5632,
            shared_gate=True,
        ),
    ),
    "qwen3": Gated(bias_keys=_BIAS, key_value_heads=32, head=128, query_norm="head"),
    "qwen3_moe": Gated(bias_keys=_BIAS, key_value_heads=4, query_norm="head", mixture=_QWEN),
    "gemma": Gated(bias_keys=_BIAS, tied=True, head=256, key_value_heads=16),
    "gemma2": Gated(bias_keys=_BIAS, tied=True, head=256, key_value_heads=4, norms=4),
    "gemma3_text": Gated(bias_keys=_BIAS, tied=True, head=256, key_value_heads=4, norms=4, query_norm="head"),
    "phi3": Gated(fused_qkv=True, fused_gate=True),
    "olmo": Gated(bias_keys=_BIAS, norm_tensors=0),
    "olmo2": Gated(bias_keys=_BIAS, query_norm="whole"),
    "olmo3": Gated(bias_keys=_BIAS, query_norm="whole"),
    "olmoe": Gated(
        bias_keys=_BIAS, query_norm="whole", mixture=Mixture(64, 8, ("num_experts", "num_local_experts"))
    ),
    "stablelm": Gated(bias_keys=("use_qkv_bias", ""), norm_tensors=2, key_value_heads=32),
    "smollm3": Gated(bias_keys=_BIAS, mlp_bias_key="mlp_bias", tied=True, key_value_heads=4),
    "starcoder2": Gated(
        bias_keys=("use_bias", "use_bias"),
        bias=True,
        mlp_bias_key="use_bias",
        norm_tensors=2,
        tied=True,
        key_value_heads=2,
        gated=False,
    ),
    "granite": Gated(bias_keys=_BIAS, mlp_bias_key="mlp_bias"),
    "granitemoe": Gated(bias_keys=_BIAS, mixture=Mixture(8, 2)),
    "cohere": Gated(bias_keys=_BIAS, norms=1, tied=True, query_norm="whole", query_norm_key="use_qk_norm"),
    "cohere2": Gated(bias_keys=_BIAS, norms=1, tied=True),
    "glm": _GLM,
    "glm4": replace(_GLM, norms=4),
    "glm4_moe": Gated(
        bias_keys=_QKV_BIAS,
        key_value_heads=8,
        query_norm="head",
        query_norm_key="use_qk_norm",
        mixture=replace(_DEEPSEEK, num_experts=128, width=1408, dense=1),
    ),
    "deepseek_v3": Gated(latent=True, mixture=_DEEPSEEK),
    "gpt_oss": Gated(
        bias_keys=_BIAS,
        bias=True,
        head=64,
        key_value_heads=8,
        sinks=True,
        mixture=Mixture(128, 4, ("num_local_experts", "num_experts"), biased=True),
    ),
}
