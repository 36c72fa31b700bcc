"""What preflight is about, what the hosts answered, and the registry of the checks on both."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from ds_toolkit.doctor.preflight.answers import Answer
from ds_toolkit.env.envfile import EnvFile
from ds_toolkit.env.launchers import Launcher
from ds_toolkit.rules import Registry

# Variables that NCCL, torch, gloo, CUDA, MPI and DeepSpeed listen to.
RELEVANT = re.compile(r"(NCCL|TORCH|GLOO|CUDA|HIP|UCX|MV2|OMP|DS|DEEPSPEED)_|LD_LIBRARY_PATH$")
LOCAL = "localhost"
# The place of what is not about one host.
ALL_HOSTS = "all hosts"


@dataclass(frozen=True)
class Intent:
    """The launch that is meant.

    Attributes:
        slots: ranks of each host, in the order of the hostfile; None where that is not known. Empty: this
            host alone.
        launcher: what starts the ranks.
        python: the interpreter, by its absolute path.
        folder: where the launch is started, and where pdsh goes on every host.
        script: the training script, by its absolute path; None leaves it out.
        checkpoint_dir: likewise.
        master_port: TCP port of the rendezvous on the first host.
        env_file: what the launcher will read; None where there is none.
        environment: variables with which the packages are imported, beside what a host has.
        shell_variables: variables of this shell that a run listens to.
        checkpoint_bytes: of one checkpoint; None takes the largest that is in the directory.
        keep_last: checkpoints that are kept.
        deadline_seconds: within which last words must be written.
        arena_slots: snapshots that a host keeps on `/dev/shm`; 0 where it keeps none there.
    """

    slots: Mapping[str, int | None]
    launcher: Launcher
    python: str
    folder: str
    script: str | None = None
    checkpoint_dir: str | None = None
    master_port: int = 29500
    env_file: EnvFile | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    shell_variables: Mapping[str, str] = field(default_factory=dict)
    checkpoint_bytes: int | None = None
    keep_last: int = 3
    deadline_seconds: float = 25.0
    arena_slots: int = 0

    @property
    def hosts(self) -> list[str]:
        """Their names; this one's where there is no hostfile."""
        return list(self.slots) or [LOCAL]

    @property
    def is_local(self) -> bool:
        """Whether nothing but this host is asked, without ssh."""
        return not self.slots

    @property
    def settings(self) -> dict[str, str]:
        """The variables of the environment file, without lines that end the launcher."""
        lines = self.env_file.lines if self.env_file else ()
        return {line.key: line.value for line in lines if line.key is not None}


@dataclass(frozen=True)
class Clock:
    """By how much a host's clock is ahead of this one's: between two numbers, since answers travel."""

    least_seconds: float
    most_seconds: float

    def ahead_seconds(self, other: Clock) -> float:
        """By how much it is ahead of another for certain: negative if behind, 0 where nobody can tell."""
        ahead = self.least_seconds - other.most_seconds
        return ahead if ahead > 0 else min(0.0, self.most_seconds - other.least_seconds)

    def narrowed(self, other: Clock | None) -> Clock:
        """What two measurements say together."""
        if other is None:
            return self
        least = max(self.least_seconds, other.least_seconds)
        most = min(self.most_seconds, other.most_seconds)
        # A clock that was set in between fits neither.
        return Clock(least, most) if least <= most else self


@dataclass(frozen=True)
class Host:
    """A host and what came of asking it.

    Attributes:
        name: as the hostfile has it.
        answer: None where there is none.
        unreached: why nothing ran there.
        no_python: why the probe did not run, although the host was reached.
        clock: None where the host did not tell.
        tokens: what the probe files said that it could read; None where it was not asked or did not answer.
    """

    name: str
    answer: Answer | None = None
    unreached: str | None = None
    no_python: str | None = None
    clock: Clock | None = None
    tokens: frozenset[str] | None = None


@dataclass(frozen=True)
class Fleet:
    """All hosts and the launch; what rules of preflight look at.

    Attributes:
        missing_tool: the program here that the launcher needs and that is not installed.
    """

    intent: Intent
    hosts: tuple[Host, ...]
    missing_tool: str | None = None

    @property
    def answers(self) -> Iterator[tuple[Host, Answer]]:
        """The hosts that answered."""
        return ((host, host.answer) for host in self.hosts if host.answer is not None)

    def odd_ones(self, value: Callable[[Answer], Hashable]) -> Iterator[tuple[Host, Hashable, Hashable]]:
        """Hosts whose value is not the usual one, with it and the usual one.

        The usual one is what most hosts have; of equals, what the first of them in the hostfile has.
        """
        values = [(host, value(answer)) for host, answer in self.answers]
        if not values:
            return
        # Counter keeps the order of first sight among equals.
        usual = Counter(found for _, found in values).most_common(1)[0][0]
        yield from ((host, found, usual) for host, found in values if found != usual)

    @property
    def checkpoint_bytes(self) -> int | None:
        """The size of one checkpoint: as planned, or else the largest that any host sees."""
        seen = [answer.storage.largest_tag_bytes for _, answer in self.answers if answer.storage]
        return self.intent.checkpoint_bytes or max(seen, default=0) or None


THIS_CLOCK = Clock(0.0, 0.0)
RULES: Registry[Fleet] = Registry()
