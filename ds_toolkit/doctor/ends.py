"""Which processes ended how, as launchers, shells, schedulers and kernels write it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ds_toolkit.doctor.exit_codes import Exit, exit_by_signal, exit_of
from ds_toolkit.doctor.lines import LogLine

_KEPT = 200
_SIGNAL_WORDS = {
    "Killed": 9,
    "Aborted": 6,
    "Bus error": 7,
    "Segmentation fault": 11,
    "Terminated": 15,
    "Floating point exception": 8,
    "Illegal instruction": 4,
}
_WORD = "|".join(_SIGNAL_WORDS)
_CODE = re.compile(
    r"exits with return code = (?P<launcher>-?\d+)"
    r"|failed \(exitcode: (?P<elastic>-?\d+)\)(?: local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\))?"
    r"|task (?P<task>\d+): [Ee]xited with exit code (?P<slurm>\d+)"
    r"|[Ee]xit(?:ed with)?(?: exit)? ?(?:code|Code|status)(?: |: |=)(?P<plain>-?\d+)(?::(?P<by_signal>\d+))?"
    r"|ExitCode=(?P<sacct>\d+):(?P<sacct_signal>\d+)"
)
_SHELL = re.compile(
    rf"(?:task (?P<task>\d+): |line \d+: +(?P<pid>\d+) +|^)(?P<word>{_WORD})(?= *\(core dumped\)|$| {{2,}})"
)
_SIGNAL = re.compile(r"Signal (?P<number>\d+) \(SIG\w+\) received by PID (?P<pid>\d+)")
_TABLE_RANK = re.compile(r"^ +rank +: (?P<rank>\d+) \(local_rank: \d+\)")
_TABLE_CODE = re.compile(r"^ +exitcode +: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)")
_SPAWNED = re.compile(r"process (?P<pid>\d+) spawned with command: .*--local_rank=(?P<rank>\d+)")
_KILLING = re.compile(r"Killing subprocess (?P<pid>\d+)")
_KERNEL = re.compile(r"Kill(?:ed)? process (?P<pid>\d+)|oom-kill:.*pid=(?P<other>\d+)")
_SIZE = re.compile(r"dist_world_size=(?P<size>\d+)")


@dataclass(frozen=True)
class End:
    """The end of a process, with the line that tells it; `who` is the source, `rank` what it says."""

    line: LogLine
    exit: Exit
    who: str
    rank: int | None = None
    pid: int | None = None


@dataclass
class EndsSeen:
    """What was seen of ends.

    Attributes:
        ends: in the order in which they were written.
        first: what torchrun calls the root cause.
        ranks_by_pid: local ranks of processes.
        killed_pids: processes that the kernel ended for want of memory.
        world_size: of the launch, where it is written.
        given: the exit code that was given beside the logs.
    """

    ends: list[End] = field(default_factory=list)
    first: End | None = None
    ranks_by_pid: dict[int, int] = field(default_factory=dict)
    killed_pids: list[tuple[int, LogLine]] = field(default_factory=list)
    world_size: int | None = None
    given: Exit | None = None
    _table_left: int = 0
    _table_rank: int | None = None
    _num_killing: int = 0

    @property
    def wants_more(self) -> bool:
        """Whether the lines that follow belong to a table."""
        return self._table_left > 0

    @property
    def facts(self) -> set[str]:
        """How it ended: `exit:SIGKILL`, `exit:127`; torchrun's root cause alone, where there is one."""
        ends = [end.exit for end in ([self.first] if self.first else self.ends)]
        if self.given is not None and (self.given.code != 1 or not ends):
            ends = [*ends, self.given]
        return {end.fact for end in ends}

    @property
    def is_failure(self) -> bool:
        """Whether anything ended with another code than 0."""
        return bool(self.facts - {"exit:0"})

    def take(self, line: LogLine) -> bool:
        """Look at a line; whether it tells of an end."""
        text = line.text
        if "Root Cause (first observed failure)" in text:
            self._table_left = 12
            return True
        if self._table_left:
            self._table_left -= 1
            return self._take_of_table(line)
        if self._take_pids(line):
            return True
        return self._take_code(line) or self._take_signal(line)

    def take_if_table(self, line: LogLine) -> None:
        """Look at a line that holds no word of a failure, inside a table."""
        if self._table_left:
            self._table_left -= 1
            self._take_of_table(line)

    def _take_of_table(self, line: LogLine) -> bool:
        if match := _TABLE_RANK.match(line.text):
            self._table_rank = int(match["rank"])
        elif match := _TABLE_CODE.match(line.text):
            code, pid = int(match["code"]), int(match["pid"])
            self.first = self.first or End(line, exit_of(code), "torchrun", self._table_rank, pid)
            self._table_left = 0
        return True

    def _take_pids(self, line: LogLine) -> bool:
        text = line.text
        if match := _SPAWNED.search(text):
            self.ranks_by_pid[int(match["pid"])] = int(match["rank"])
        elif match := _KILLING.search(text):
            # In the order of local ranks.
            self.ranks_by_pid.setdefault(int(match["pid"]), self._num_killing)
            self._num_killing += 1
        elif match := _SIZE.search(text):
            self.world_size = int(match["size"])
        elif match := _KERNEL.search(text):
            self.killed_pids.append((int(match["pid"] or match["other"]), line))
        else:
            return False
        del self.killed_pids[_KEPT:]
        return True

    def _take_code(self, line: LogLine) -> bool:
        match = _CODE.search(line.text)
        if match is None:
            return False
        number = next(
            int(match[name])
            for name in ("launcher", "elastic", "slurm", "plain", "sacct")
            if match[name] is not None
        )
        by_signal = int(match["by_signal"] or match["sacct_signal"] or 0)
        end = exit_by_signal(by_signal) if by_signal else exit_of(number)
        who = next(name for name in ("launcher", "elastic", "slurm", "plain", "sacct") if match[name])
        rank = match["task"] or match["local"]
        # Of DeepSpeed's line the command is that of the last rank, whichever failed.
        self._add(End(line, end, who, int(rank) if rank else None, int(match["pid"] or 0) or None))
        return True

    def _take_signal(self, line: LogLine) -> bool:
        if match := _SHELL.search(line.text):
            number, rank, pid = _SIGNAL_WORDS[match["word"]], match["task"], match["pid"]
        elif match := _SIGNAL.search(line.text):
            number, rank, pid = int(match["number"]), None, match["pid"]
        else:
            return False
        who = "slurm" if rank else "shell"
        self._add(
            End(line, exit_by_signal(number), who, int(rank) if rank else None, int(pid) if pid else None)
        )
        return True

    def _add(self, end: End) -> None:
        if end.exit.code != 0 and len(self.ends) < _KEPT:
            self.ends.append(end)
