"""What is said about a run beside its files, and the plan that a person's own file makes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_toolkit.advise.answers import DEFAULT_SEQUENCE_LENGTH
from ds_toolkit.advise.subject import Plan
from ds_toolkit.config.subject import Config, whole_number
from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.job import Cluster, Job, Model, Precision
from ds_toolkit.plan.network import Network


@dataclass(frozen=True)
class Surroundings:
    """What is known about model and machine; None is not known, and what depends on it is left out.

    Attributes:
        model: its shape.
        num_nodes: hosts.
        gpus_per_node: ranks a host.
        gpu_memory_bytes: of one GPU.
        network: the slowest links that the ranks share.
        sequence_length: tokens of one sample.
        world_size: all ranks, where that is known without the hosts.
    """

    model: Model | None = None
    num_nodes: int | None = None
    gpus_per_node: int | None = None
    gpu_memory_bytes: int | None = None
    network: Network | None = None
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH
    world_size: int | None = None

    def __post_init__(self) -> None:
        missing = self._missing()
        if missing is not None:
            why, flag = missing
            raise ToolkitError(f"{why} is not known", why="what was given is judged by it", fix=f"add {flag}")
        if self.world_size is None:
            return
        nodes, per_node = self.num_nodes, self.gpus_per_node
        counted = (nodes or 1) * (per_node or 1)
        exact = nodes is not None and per_node is not None
        if self.world_size % counted or (exact and self.world_size != counted):
            hosts = "hosts" if nodes is None else f"{nodes} host{'s' * (nodes > 1)}"
            gpus = "" if per_node is None else f" of {per_node} GPUs"
            raise ToolkitError(
                f"{self.world_size} ranks do not fill {hosts}{gpus}", fix="leave one of the numbers out"
            )

    def _missing(self) -> tuple[str, str] | None:
        """What has to be known for something that was given to mean anything, and the flag that says it."""
        if self.gpu_memory_bytes is not None and self.model is None:
            return "the model", "--model 7B"
        if self.gpu_memory_bytes is not None and self.num_ranks is None:
            return "the number of GPUs", "--gpus-per-node 8"
        if self.model is None or self.network is None or self.num_nodes == 1:
            return None
        if self.num_nodes is None:
            return "the number of hosts", "--num-nodes 2"
        return None if self.gpu_memory_bytes is not None else ("the memory of a GPU", "--gpu-memory 80GB")

    @property
    def num_ranks(self) -> int | None:
        """All ranks; None if that is not known."""
        if self.world_size is not None or self.gpus_per_node is None:
            return self.world_size
        return (self.num_nodes or 1) * self.gpus_per_node

    @property
    def cluster(self) -> Cluster | None:
        """The hosts; None if it is not known how many ranks there are."""
        num_ranks = self.num_ranks
        if num_ranks is None:
            return None
        # Ranks whose hosts are not known count as one host's: nothing is then said about a network.
        per_node = self.gpus_per_node or num_ranks // (self.num_nodes or 1)
        return Cluster(num_ranks // per_node, per_node, self.gpu_memory_bytes, None)

    def around_config(self, config: Mapping[str, object]) -> Plan:
        """A ds_config in these surroundings."""
        return Plan(config, self._job(Config(config)), self.network, cluster=self.cluster)

    def around_variables(self, variables: Mapping[str, str], gpu_names: tuple[str, ...] = ()) -> Plan:
        """The variables of a `.deepspeed_env` in these surroundings, on hosts with GPUs of these names."""
        return Plan({}, None, self.network, variables, gpu_names, self.cluster)

    def _job(self, config: Config) -> Job | None:
        # How tensor or sequence parallelism cuts a model is not in the configuration.
        if self.model is None or config.model_parallel_size > 1:
            return None
        # On one rank nothing is shared: what one rank holds is judged where the number of ranks is known.
        cluster = self.cluster or Cluster(self.num_nodes or 1, 1, None, None)
        micro, accumulation = _micro_batch(config, cluster.world_size)
        precision = Precision(config.precision)
        return Job(self.model, cluster, precision, micro, accumulation, self.sequence_length)


def _micro_batch(config: Config, world_size: int) -> tuple[int, int]:
    """Micro batch and accumulation as DeepSpeed works them out, 1 for what a consumer fills in."""
    total, micro, accumulation = (
        whole_number(config.data.get(key))
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if micro is None and total is not None:
        micro = total // (world_size * max(accumulation or 1, 1))
    if accumulation is None and total is not None and micro is not None and micro > 0:
        accumulation = total // (world_size * micro)
    return max(micro or 1, 1), max(accumulation or 1, 1)
