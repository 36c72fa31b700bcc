"""What a host answered: the probe's JSON, taken for what it says only where it has the right shape."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class Space(_Part):
    """A file system's size, and what this user may still write."""

    total_bytes: int
    free_bytes: int


class Executable(_Part):
    """The Python of the launch, by its path."""

    exists: bool
    can_run: bool


class Software(_Part):
    """What that Python could import, run in the launch's folder with its PYTHONPATH.

    Attributes:
        versions: of `python`, `torch`, `deepspeed`, `ds_toolkit`, `cuda` and `nccl`: those that are there.
        errors: why an import failed, by name.
        gpus: as torch counts them; None where it has no CUDA.
        failure: why there is no answer at all.
    """

    versions: dict[str, str]
    errors: dict[str, str]
    gpus: int | None
    failure: str | None


class Limits(_Part):
    """Soft limits of processes that are started there; None for none."""

    memlock_bytes: int | None
    open_files: int | None


class Memory(_Part):
    """Of the host, what is left before the kernel or a cgroup ends a process, and the cgroup's limit."""

    total_bytes: int | None
    free_bytes: int | None
    limit_bytes: int | None


class Storage(_Part):
    """The checkpoint directory as this host has it.

    Attributes:
        folder: it, or the nearest folder above it that is there.
        error: why a file could not be written.
        space: None where that is not known.
        bytes_per_second: of writing with flushes, all hosts at the same time; None where that failed.
        largest_tag_bytes: of its folders; 0 where there is none.
        all_tags_bytes: of all of them together.
    """

    folder: str
    error: str | None
    space: Space | None
    bytes_per_second: float | None
    largest_tag_bytes: int
    all_tags_bytes: int


class Answer(_Part):
    """All that the probe says about a host; `interfaces` and `infiniband` give states by name."""

    host_name: str
    user_id: int
    executable: Executable
    folder_exists: bool
    script_sha256: str | None
    software: Software
    gpus: int | None
    shared_memory: Space | None
    limits: Limits
    memory: Memory
    interfaces: dict[str, str] = Field(max_length=10_000)
    infiniband: dict[str, str] = Field(max_length=10_000)
    port_error: str | None
    variables: dict[str, str]
    storage: Storage | None

    @property
    def num_gpus(self) -> int | None:
        """As the driver lists them, or else as torch counts them; None where neither sees one."""
        return self.gpus or self.software.gpus or None

    @property
    def active_ports(self) -> int:
        """InfiniBand and RoCE ports with a link."""
        return sum(state == "ACTIVE" for state in self.infiniband.values())
