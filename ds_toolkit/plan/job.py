"""What is to be trained, on what: the nouns that the planner's formulas take."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ds_toolkit.errors import ToolkitError
from ds_toolkit.units import format_count

# Beyond any model, memory or cluster, and far below where floats end.
_LARGEST = 10**18


class Precision(str, Enum):
    """Number format of weights, gradients and activations; master weights and moments are fp32 always."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def num_bytes(self) -> int:
        """Bytes of one number."""
        return 4 if self is Precision.FP32 else 2


@dataclass(frozen=True)
class Experts:
    """How a token passes a mixture of experts.

    Attributes:
        num_active_parameters: of the whole model, those that one token passes.
        experts_per_token: how many experts of a block get each token.
        active_width: of the feed-forward part that a token passes in a block: its experts' widths and those
            of the experts that all tokens share.
    """

    num_active_parameters: int
    experts_per_token: int
    active_width: int


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer, as far as memory is concerned.

    Attributes:
        num_parameters: all of them; trained with an optimizer that keeps two moments.
        num_layers: transformer blocks.
        hidden_size: width of the residual stream.
        vocabulary_size: rows of the embedding.
        rationale: where the shape comes from, in words for the person who asked.
        tensor_sizes: elements of each parameter in the order of the module, where they are known; empty if
            not. With them padding and the parameters that ZeRO keeps whole are counted to the element.
        largest_block: parameters of the largest block or embedding, where it is known; 0 for 12 h^2.
        experts: how tokens pass them; None for a model without, or where it is not known.
    """

    num_parameters: int
    num_layers: int
    hidden_size: int
    vocabulary_size: int
    rationale: str = "the shape was given"
    tensor_sizes: tuple[int, ...] = ()
    largest_block: int = 0
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for name in ("num_parameters", "num_layers", "hidden_size", "vocabulary_size"):
            _at_least_one(getattr(self, name), name.replace("num_", "number of ").replace("_", " "))
        if self.tensor_sizes and sum(self.tensor_sizes) != self.num_parameters:
            raise ToolkitError(
                f"{len(self.tensor_sizes)} tensors hold {sum(self.tensor_sizes)} parameters,"
                f" not {self.num_parameters}"
            )

    @property
    def largest_layer_parameters(self) -> int:
        """Parameters of the largest thing that ZeRO-3 gathers: a block (12 h^2) or the embedding (V h).

        A block of experts is gathered with all of them, whichever the tokens take.
        """
        block = self.largest_block or 12 * self.hidden_size**2
        return min(self.num_parameters, max(block, self.vocabulary_size * self.hidden_size))

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token passes: all of them in a model without experts."""
        return self.experts.num_active_parameters if self.experts else self.num_parameters

    @classmethod
    def from_count(cls, num_parameters: int) -> Model:
        """A plausible shape for a parameter count alone.

        A block holds 12 h^2 weights, the embedding V h. Loss depends on the aspect ratio h / layers only
        weakly over a wide range (Kaplan et al. 2020, arXiv 2001.08361, figure 5), and published models keep
        it between 64 (GPT-3 125M) and 128 (GPT-3 175B, Llama 7B); 64 is taken below 1B parameters, else 128.
        Below 30M a vocabulary of 32,000 would swallow the model, so bytes are assumed.
        """
        _at_least_one(num_parameters, "number of parameters")
        aspect_ratio = 64 if num_parameters < 10**9 else 128
        vocabulary_size = 256 if num_parameters < 3 * 10**7 else 32_000
        granularity = 16 if num_parameters < 10**6 else 64
        # 12 h^2 layers with layers = h / aspect ratio; the embedding is then taken off the layers.
        width = (num_parameters * aspect_ratio / 12) ** (1 / 3)
        hidden_size = max(granularity, round(width / granularity) * granularity)
        in_blocks = num_parameters - vocabulary_size * hidden_size
        num_layers = max(1, round(in_blocks / (12 * hidden_size**2)))
        rationale = (
            f"{format_count(num_parameters)} parameters are taken for {num_layers} blocks of width"
            f" {hidden_size} and a vocabulary of {vocabulary_size};"
            " only activations and buffers depend on this guess"
        )
        return cls(num_parameters, num_layers, hidden_size, vocabulary_size, rationale)


@dataclass(frozen=True)
class Cluster:
    """Where it runs: equal nodes with equal devices, one rank a device.

    Attributes:
        num_nodes: hosts.
        ranks_per_node: GPUs a host; processes a host where the CPU does the work.
        device_memory_bytes: memory of one GPU; None where the CPU does the work.
        host_memory_bytes: memory of one host that the job may use; None if unknown: no offload then.
    """

    num_nodes: int
    ranks_per_node: int
    device_memory_bytes: int | None
    host_memory_bytes: int | None

    def __post_init__(self) -> None:
        _at_least_one(self.num_nodes, "number of nodes")
        _at_least_one(self.ranks_per_node, "number of ranks a node")
        for value, noun in (
            (self.device_memory_bytes, "GPU memory"),
            (self.host_memory_bytes, "host memory"),
        ):
            if value is not None:
                _at_least_one(value, noun)

    @property
    def world_size(self) -> int:
        """All ranks; each holds one data-parallel share."""
        return self.num_nodes * self.ranks_per_node

    @property
    def has_gpus(self) -> bool:
        """Whether a GPU does the work, not the CPU."""
        return self.device_memory_bytes is not None


@dataclass(frozen=True)
class Job:
    """A model on a cluster, and how it is fed.

    Attributes:
        micro_batch_size: samples of one forward pass on one rank.
        accumulation_steps: micro batches of one optimizer step.
        sequence_length: tokens of one sample.
        recompute_activations: whether blocks are computed again in backward instead of being kept
            (activation checkpointing).
    """

    model: Model
    cluster: Cluster
    precision: Precision
    micro_batch_size: int
    accumulation_steps: int
    sequence_length: int
    recompute_activations: bool = False

    def __post_init__(self) -> None:
        _at_least_one(self.micro_batch_size, "micro batch size")
        _at_least_one(self.accumulation_steps, "number of accumulation steps")
        _at_least_one(self.sequence_length, "sequence length")

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.micro_batch_size * self.accumulation_steps * self.cluster.world_size


def _at_least_one(value: int, noun: str) -> None:
    if value < 1:
        raise ToolkitError(f"the {noun} is {value}", fix="give 1 or more")
    if value > _LARGEST:
        raise ToolkitError(f"the {noun} is above {_LARGEST:.0e}", fix="give a number that exists")
