"""One line of a log: without colours, with the rank and the time that its prefixes tell."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_LINE_CHARACTERS = 4000

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
# What is put before each line: torch's `[rank1]:`, torchrun's `[default0]:`, mpirun's `[1,3]<stderr>:`,
# `3: ` of srun, `host: ` of pdsh. They may stand one behind the other.
_PREFIX = re.compile(
    r"\[(?:rank|Rank |default)(?P<rank>\d{1,6})\]:?[ ]?"
    r"|\[\d+,(?P<mpi>\d{1,6})\]<std(?:out|err)>:[ ]?"
    r"|(?P<task>\d{1,6}):[ ]"
    r"|(?P<host>[A-Za-z][\w-]*(?:\.[\w-]+)*|\d{1,3}(?:\.\d{1,3}){3}):[ ](?=[\s\[\d]|[A-Z][a-z]+ ?[(A-Z])"
)
# Programs speak so too: `bash: `, `srun: ` and words that end in Error are no hosts.
_NO_HOSTS = re.compile(
    r"(?:\w+\.)*\w*(?:Error|Exception|Warning|Interrupt|Exit)|srun|slurmstepd|bash|sh|ssh|pdsh|python\d*"
    r"|error|warning|info|kernel|File|Traceback|env|sbatch|torchrun|deepspeed|loss|step|epoch|Epoch"
    r"|\w*[Ll]oss\w*|\w+Killed"
)
_FILE_RANK = re.compile(r"(?:rank|local_rank|task)[_.=-]?(\d{1,6})(?!\d)", re.IGNORECASE)
_TORCHRUN_FILE = re.compile(r"attempt_\d+/(\d+)/std(?:out|err)\.log$")
_TIME = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)[ T_](?P<clock>\d\d:\d\d:\d\d(?:[.,]\d+)?)"
    r"|\[?[EWIF](?P<month>\d\d?)(?P<day>\d\d) (?P<time>\d\d:\d\d:\d\d\.\d+)"
)


@dataclass(frozen=True)
class LogLine:
    """A line that says something.

    Attributes:
        file: the log, as it was named.
        number: of the line, from 1.
        text: without prefixes, colours and control characters.
        prefix: what the launcher put before it; lines of one process share it.
        rank: that the prefix or the name of the file tells; None if neither does.
        host: likewise.
    """

    file: str
    number: int
    text: str
    prefix: str = ""
    rank: int | None = None
    host: str | None = None

    @property
    def time(self) -> str | None:
        """`MM-DD HH:MM:SS.f` as far as the line tells it; such times can be compared."""
        match = _TIME.search(self.prefix + self.text[:200])
        if match is None:
            return None
        if match["date"]:
            return f"{match['date'][5:]} {match['clock'].replace(',', '.')}"
        return f"{int(match['month']):02}-{match['day']} {match['time']}"


def clean(raw: bytes) -> str:
    """The text of a raw line; what a terminal would obey is left out, what is too long is cut."""
    text = raw[: 2 * MAX_LINE_CHARACTERS].decode("utf-8", errors="replace")
    if not text.isprintable():
        text = _CONTROLS.sub("", _ESCAPES.sub("", text))
    return text[:MAX_LINE_CHARACTERS].rstrip()


def parse(raw: bytes, file: str, number: int, file_rank: int | None) -> LogLine:
    """A raw line with its prefixes taken off."""
    text = clean(raw)
    position, rank, host = 0, None, None
    for _ in range(4):
        match = _PREFIX.match(text, position)
        if match is None or (match["host"] and _NO_HOSTS.fullmatch(match["host"])):
            break
        said = match["rank"] or match["mpi"] or match["task"]
        rank = int(said) if said else rank
        host = match["host"] or host
        position = match.end()
    return LogLine(file, number, text[position:], text[:position], file_rank if rank is None else rank, host)


def rank_of_file(name: str) -> int | None:
    """The rank whose log a file is, by its name; None if the name tells none."""
    match = _TORCHRUN_FILE.search(name) or _FILE_RANK.search(name.rpartition("/")[2])
    return int(match[1]) if match else None
