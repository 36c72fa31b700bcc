"""Tables whose keys are regular expressions that a checkpoint brings with it.

DeepSpeed names parameters so (deepspeed/checkpoint/constants.py) and matches from a name's beginning. A
hostile expression can keep Python's matcher busy for years, so only those that cannot are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Generic, TypeVar

from ds_toolkit.errors import ToolkitError

Value = TypeVar("Value")

_MAX_PATTERN_LENGTH = 2000
# Without repeated groups the matcher tries a number of ways that is polynomial, of this degree at most.
_MAX_REPEATS = 3
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_BRACKETS = re.compile(r"\[\^?\]?[^\]]*\]")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_REPEAT = re.compile(r"[*+{]")


class PatternTable(Generic[Value]):
    """Values by patterns of names."""

    def __init__(self, pairs: Iterable[tuple[str, Value]], where: str) -> None:
        """Take pairs of pattern and value.

        Raises:
            ToolkitError: a pattern is no regular expression, or one that might take for ever.
        """
        self._exact: dict[str, list[Value]] = {}
        self._others: list[tuple[re.Pattern[str], Value]] = []
        for pattern, value in pairs:
            name = _only_name(pattern)
            if name is not None:
                self._exact.setdefault(name, []).append(value)
            else:
                self._others.append((_compiled(pattern, where), value))

    def find(self, name: str) -> list[Value]:
        """The values whose pattern matches the name's beginning."""
        matched = [value for pattern, value in self._others if pattern.match(name)]
        return [*self._exact.get(name, ()), *matched]


def _only_name(pattern: str) -> str | None:
    """The one name that a pattern such as AutoTP's `^model\\.norm\\.weight$` matches."""
    if not (isinstance(pattern, str) and pattern.startswith("^") and pattern.endswith("$")):
        return None
    name = _ESCAPED.sub(r"\1", pattern[1:-1])
    return name if re.escape(name) == pattern[1:-1] else None


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    why = None
    if not isinstance(pattern, str) or len(pattern) > _MAX_PATTERN_LENGTH:
        why = "it is no text, or absurdly long"
    else:
        bare = _BRACKETS.sub("_", _ESCAPED.sub("_", pattern))
        if _REPEATED_GROUP.search(bare) or len(_REPEAT.findall(bare)) > _MAX_REPEATS:
            why = "matching it might never end"
        else:
            try:
                return re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                why = str(error)
    raise ToolkitError(
        "a pattern of parameter names in a checkpoint is not usable",
        where=where,
        why=f"{str(pattern)[:100]!r}: {why}",
    )
