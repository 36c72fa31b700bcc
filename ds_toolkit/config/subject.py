"""What config rules look at: the data, the place that it is meant for, and pointers into it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from ds_toolkit.config.consumers import Consumer
from ds_toolkit.config.members import Fault, Member, members

if TYPE_CHECKING:
    from ds_toolkit.config.reader import Document

# DeepSpeed reads these values through pydantic, which takes "2" and 2.0 for 2.
_BOOLEAN: TypeAdapter[bool] = TypeAdapter(bool)
_INTEGER: TypeAdapter[int] = TypeAdapter(int)


def json_pointer(*parts: str | int) -> str:
    """The JSON pointer (RFC 6901) that leads through these keys and indices; empty for the whole document."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


@dataclass(frozen=True)
class Config:
    """A ds_config under examination.

    Attributes:
        data: the configuration as DeepSpeed would get it.
        world_size: number of ranks, None when it is not known.
        consumer: who hands it to DeepSpeed.
        newer_deepspeed: whether it is meant for a DeepSpeed newer than the schema, which may know more keys.
        document: the text that the data came from, None for plain data.
    """

    data: Mapping[str, object]
    world_size: int | None = None
    consumer: Consumer = Consumer.NATIVE
    newer_deepspeed: bool = False
    document: Document | None = field(default=None, repr=False)

    @functools.cached_property
    def members(self) -> list[Member]:
        """Every key of the configuration and of its sections."""
        return list(members(self.data))

    @functools.cached_property
    def faults(self) -> list[tuple[Member, Fault, str]]:
        """What is wrong with single values, and what was expected; sections and `"auto"` are left out."""
        found = []
        for member in self.members:
            known = member.known
            if known is None or known.subsection is not None or member.value == "auto":
                continue
            fault = known.fault(member.value)
            if fault is not None:
                found.append((member, *fault))
        return found

    def section(self, *path: str) -> Mapping[str, object]:
        """The object at this path; empty where there is none or something else stands there."""
        value: object = self.data
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value if isinstance(value, Mapping) else {}

    def integer(self, key: str) -> int | None:
        """A whole number at the top level; None where there is none or something else stands there."""
        return whole_number(self.data.get(key))

    def is_enabled(self, section: str) -> bool:
        """Whether DeepSpeed would take the section's `enabled` for true, spelt as `true`, `"true"` or 1."""
        return is_true(self.section(section).get("enabled", False))

    @property
    def zero_stage(self) -> int | None:
        """The ZeRO stage that DeepSpeed would use; None where it would refuse what is written."""
        if "zero_optimization" not in self.data:
            return 0
        # A bare boolean is the oldest spelling: it switches stage 1 on.
        value = self.data["zero_optimization"]
        if isinstance(value, bool):
            return int(value)
        try:
            stage = _INTEGER.validate_python(self.section("zero_optimization").get("stage", 0))
        except ValidationError:
            return None
        return stage if 0 <= stage <= 3 else None

    @property
    def zero(self) -> Mapping[str, object]:
        """The section `zero_optimization`."""
        return self.section("zero_optimization")

    @property
    def precision(self) -> str:
        """The number format of the weights: fp16, bf16 or fp32."""
        # DeepSpeed reads the old name only where the new one does not stand.
        if self.is_enabled("fp16"):
            return "fp16"
        return "bf16" if self.is_enabled("bf16" if "bf16" in self.data else "bfloat16") else "fp32"

    def offload_device(self, key: str) -> str:
        """Where `offload_optimizer` or `offload_param` puts things: none, cpu or nvme."""
        device = self.section("zero_optimization", key).get("device", "none")
        # "auto" is dropped by DeepSpeed, which leaves the default.
        if device in ("cpu", "nvme"):
            return str(device)
        old = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}[key]
        return "cpu" if is_true(self.zero.get(old)) else "none"

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one sample: sequence times tensor parallelism, as far as is written."""
        sequence = whole_number(self.data.get("sequence_parallel_size")) or 1
        tensor = whole_number(self.section("tensor_parallel").get("autotp_size")) or 1
        return max(sequence, 1) * max(tensor, 1)

    @property
    def data_parallel_size(self) -> int | None:
        """Ranks that each get samples of their own; None when it is not known or does not come out."""
        if self.world_size is None or self.world_size % self.model_parallel_size:
            return None
        return self.world_size // self.model_parallel_size


def whole_number(value: object) -> int | None:
    """The value if it is a whole number (2.0 counts), else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) else None


def is_true(value: object) -> bool:
    """Whether DeepSpeed's models take a value for true."""
    try:
        return _BOOLEAN.validate_python(value)
    except ValidationError:
        return False
