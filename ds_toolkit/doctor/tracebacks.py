"""Python's tracebacks in a log whose lines are those of many processes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ds_toolkit.doctor.lines import LogLine

_HEAD = "Traceback (most recent call last):"
_FRAME = re.compile(r' +File "(?P<file>[^"]*)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
_EXCEPTION = re.compile(
    r"(?P<type>(?:[A-Za-z_]\w*\.)+[A-Z]\w*|[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Iteration|Warning|Failure|Group))"
    r"(?::(?P<message>.*))?$"
)
_CHAINED = re.compile(r"During handling of the above exception|The above exception was the direct cause")
_IGNORED = re.compile(r"Exception ignored (?:in|on|while)")
_MAX_LINES = 2000
_MAX_OPEN = 512
_AGE_EVERY = 64


@dataclass
class Raised:
    """An exception that a traceback ends with.

    Attributes:
        line: the line that names the exception.
        type: its class, as it is written.
        message: the first line of what it says.
        frames: file, line and function of the calls that led to it, the innermost last; the last few.
        is_ignored: whether it happened where Python ignores exceptions, as in `__del__`.
        is_chained: whether it was raised while an earlier one was handled.
    """

    line: LogLine
    type: str
    message: str
    frames: list[tuple[str, int, str]] = field(default_factory=list)
    is_ignored: bool = False
    is_chained: bool = False

    @property
    def text(self) -> str:
        """The exception as Python prints it."""
        return f"{self.type}: {self.message}" if self.message else self.type

    @property
    def place(self) -> str | None:
        """The innermost call outside installed packages, else the innermost one."""
        own = [frame for frame in self.frames if not re.search(r"site-packages|/lib/python|<", frame[0])]
        frame = next(iter(reversed(own or self.frames)), None)
        return None if frame is None else f"{frame[0]}:{frame[1]}, in {frame[2]}"


@dataclass
class _Open:
    frames: list[tuple[str, int, str]]
    is_ignored: bool
    is_chained: bool
    num_lines: int = 0


class Tracebacks:
    """Follows the tracebacks of one log; lines of one process are known by their prefix."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._ignored: set[str] = set()
        self._chained: set[str] = set()
        self._num_lines = 0

    @property
    def is_open(self) -> bool:
        """Whether lines that follow are needed."""
        return bool(self._open)

    def take(self, line: LogLine) -> Raised | None:
        """Look at one more line; the exception, if this line names the one of a traceback."""
        prefix, text = line.prefix, line.text
        if _HEAD in text and len(self._open) < _MAX_OPEN:
            self._open[prefix] = _Open([], prefix in self._ignored, prefix in self._chained)
            self._ignored.discard(prefix)
            self._chained.discard(prefix)
            return None
        if _IGNORED.match(text):
            self._ignored.add(prefix)
        elif _CHAINED.match(text):
            self._chained.add(prefix)
        opened = self._open.get(prefix)
        if opened is None:
            self._age()
            return None
        return self._follow(opened, line)

    def _follow(self, opened: _Open, line: LogLine) -> Raised | None:
        opened.num_lines += 1
        if frame := _FRAME.match(line.text):
            opened.frames = [
                *opened.frames[-30:],
                (frame["file"], int(frame["line"]), frame["function"] or "?"),
            ]
            return None
        if not line.text or line.text.startswith(" "):
            return None
        found = _EXCEPTION.match(line.text)
        # Other lines of the same process may stand between, those of other ranks without a prefix too.
        if found is None or not opened.frames:
            if opened.num_lines > 200:
                del self._open[line.prefix]
            return None
        del self._open[line.prefix]
        message = (found["message"] or "").strip()
        return Raised(line, found["type"], message, opened.frames, opened.is_ignored, opened.is_chained)

    def _age(self) -> None:
        self._num_lines += 1
        if self._num_lines % _AGE_EVERY:
            return
        for prefix, opened in list(self._open.items()):
            opened.num_lines += _AGE_EVERY
            if opened.num_lines > _MAX_LINES:
                del self._open[prefix]
