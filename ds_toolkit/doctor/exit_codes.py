"""Exit codes in all their spellings: a death by signal 9 is -9, 137 (128 + 9) or 247 (-9 in one byte)."""

from __future__ import annotations

import signal
from dataclasses import dataclass

_NAMES = {number.value: number.name for number in signal.Signals}
# Those that training jobs end by. 129 and such are also exit codes that programs choose themselves.
_OF_DEATHS = (1, 2, 4, 6, 7, 8, 9, 11, 13, 15, 24, 25)


@dataclass(frozen=True)
class Exit:
    """How a process ended.

    Attributes:
        code: as it was written.
        signal: name of the signal that ended it, as `SIGKILL`; None if it ended by itself.
    """

    code: int
    signal: str | None

    @property
    def fact(self) -> str:
        """What signatures ask for: `exit:SIGKILL`, `exit:127`."""
        return f"exit:{self.signal or self.code}"

    def __str__(self) -> str:
        return f"{self.code} ({self.signal})" if self.signal else str(self.code)


def exit_of(code: int) -> Exit:
    """What an exit code means, however it is spelled."""
    for number in _OF_DEATHS:
        # A launcher that ends with -n has n taken from 256; a shell adds n to 128.
        if code in (-number, 128 + number, 256 - number) and code not in (128 + 1, 255, 254):
            return Exit(code, _NAMES[number])
    return Exit(code, _NAMES.get(-code))


def exit_by_signal(number: int) -> Exit:
    """The end by a signal of this number."""
    return Exit(-number, _NAMES.get(number, f"signal {number}"))
