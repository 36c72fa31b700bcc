"""What the rules about configuration, model, machine and environment together look at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ds_toolkit.config.subject import Config
from ds_toolkit.plan.job import Cluster, Job
from ds_toolkit.plan.memory import Offload
from ds_toolkit.plan.network import Network
from ds_toolkit.plan.zero import ZeroSettings

ZERO = "zero_optimization"


@dataclass(frozen=True)
class Plan:
    """Everything that is known about a run before it starts.

    Attributes:
        config: the ds_config; empty where only variables are looked at.
        job: the model, the cluster and how it is fed; None if the model is not known.
        network: the slowest that the ranks share; None if that is not known.
        variables: of the `.deepspeed_env`.
        gpu_names: of one host, as the driver reports them.
        cluster: the job's; given alone where there is no job, None if it is not known.
    """

    config: Mapping[str, object]
    job: Job | None = None
    network: Network | None = None
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    gpu_names: tuple[str, ...] = ()
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        if self.job is not None:
            object.__setattr__(self, "cluster", self.job.cluster)

    @property
    def stage(self) -> int | None:
        """The ZeRO stage; None where it is not a plain number."""
        return Config(self.config).zero_stage

    @property
    def offload(self) -> Offload:
        """What the configuration offloads."""
        config = Config(self.config)
        optimizer, parameters = (config.offload_device(key) for key in ("offload_optimizer", "offload_param"))
        return Offload(optimizer != "none", parameters != "none", "nvme" in (optimizer, parameters))

    def number(self, key: str) -> int | None:
        """A whole number of `zero_optimization`; None where none is written."""
        value = Config(self.config).section(ZERO).get(key)
        # Sizes such as 5e8 are written as floats; what is no finite number is the linter's to refuse.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        return int(value)

    @property
    def settings(self) -> ZeroSettings:
        """The sizes that the configuration gives to buffers, with DeepSpeed's defaults."""
        written = {
            "reduce_bucket_size": self.number("reduce_bucket_size"),
            "prefetch_bucket_size": self.number("stage3_prefetch_bucket_size"),
            "persistence_threshold": self.number("stage3_param_persistence_threshold"),
            "max_reuse_distance": self.number("stage3_max_reuse_distance"),
            "sub_group_size": self.number("sub_group_size"),
        }
        overlap = Config(self.config).section(ZERO).get("overlap_comm")
        sizes = {name: size for name, size in written.items() if size is not None}
        return replace(ZeroSettings(), **sizes, overlap_comm=overlap is True)
