"""Sizes, counts and durations as people write them, and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ds_toolkit.errors import ToolkitError

_BYTES: dict[str, float] = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", start=1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGTP", start=1)},
}
_COUNTS: dict[str, float] = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LEAST_MEMORY_BYTES = 2**20
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes of `80GB` (10^9 each) or `80GiB` (2^30 each); a bare number is bytes.

    Raises:
        ToolkitError: the text is not a size.
    """
    return round(_scaled(text, _BYTES, str.upper, "a size", "80GB, 512MiB or 1TB"))


def parse_memory_bytes(text: str, noun: str) -> int:
    """Bytes of a memory size, as `parse_bytes` reads it; `noun` is what has the memory, for the error.

    Raises:
        ToolkitError: the text is not a size, or one below 1 MiB: of `80` the unit was forgotten.
    """
    num_bytes = parse_bytes(text)
    if num_bytes >= _LEAST_MEMORY_BYTES:
        return num_bytes
    number, unit = re.findall(r"[0-9.]+|[A-Za-z]+", text + " B")[:2]
    raise ToolkitError(
        f"the {noun} is {num_bytes} bytes: too few",
        why=None if unit in text else "a number without a unit is bytes",
        fix=f"did you mean {number}GB?" if float(number) else "write it as 80GB, 512MiB or 1TB",
    )


def parse_count(text: str) -> int:
    """The count that `350M`, `7B` or `1000000` names.

    Raises:
        ToolkitError: the text is not a count.
    """
    return round(_scaled(text, _COUNTS, str.upper, "a count", "350M, 7B or 1000000"))


def parse_seconds(text: str) -> float:
    """Seconds of `90s`, `10min`, `1.5h` or `2d`.

    Raises:
        ToolkitError: the text is not a duration; a bare number is refused, since its unit is not known.
    """
    return _scaled(text, _SECONDS, str.lower, "a duration", "90s, 10min or 1.5h")


def counted(count: int, noun: str) -> str:
    """`1 file`, `3 files`: for nouns that take an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_bytes(num_bytes: float) -> str:
    """`80.0 GB`: decimal units, three significant digits or so."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} PB"


def format_count(count: float) -> str:
    """`7.2B`: thousands, millions, billions or trillions with one digit."""
    for unit in ("", "K", "M", "B"):
        if abs(count) < 1000:
            return f"{count:.0f}" if unit == "" else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}T"


def format_seconds(seconds: float) -> str:
    """`850 ms`, `12.3 s`, `4 min 5 s` or `3 h 20 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole_minutes, rest = divmod(round(seconds), 60)
    if whole_minutes < 60:
        return f"{whole_minutes} min {rest} s"
    return f"{whole_minutes // 60} h {whole_minutes % 60} min"


def _scaled(
    text: str, units: Mapping[str, float], spelling: Callable[[str], str], noun: str, examples: str
) -> float:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    unit = spelling(match[2]) if match else "no unit"
    if match is None or unit not in units:
        raise ToolkitError(f"`{text}` is not {noun}", fix=f"write it as {examples}")
    return float(match[1]) * units[unit]
