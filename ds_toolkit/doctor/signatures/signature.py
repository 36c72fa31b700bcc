"""The form in which a known failure is written down: data, no code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ds_toolkit.findings import Severity

# What a line must hold to be looked at, with the four bytes that are looked for. Each pattern holds one.
WORDS: Mapping[str, tuple[str, ...]] = {
    "rror": ("rror",),
    "xception": ("xcep",),
    "Traceback": ("aceb",),
    "ailed": ("iled",),
    "ailure": ("ilur",),
    "illed": ("lled",),
    "illing": ("Kill", "kill"),
    "oom": ("oom_", "oom-"),
    "emory": ("emor",),
    "xit": ("exit", "Exit"),
    "NCCL WARN": ("WARN",),
    "Bootstrap": ("Boot",),
    "imeout": ("meou",),
    "imed out": ("ed o",),
    "onnect": ("nnec",),
    "egmentation": ("egme",),
    "OVERFLOW": ("VERF",),
    "nan": (" nan", "'nan", '"nan', "=nan", ":nan", "(nan"),
    "NaN": (" NaN", "'NaN", '"NaN', "=NaN", ":NaN", "(NaN"),
    "ermission": ("rmis",),
    "ot found": ("t fo",),
    "o such": ("o su",),
    "nable to": ("ble ",),
    "cmd = ": ("cmd ",),
    "NVRM": ("NVRM",),
    "allreduce": ("llre",),
    "heckpoint": ("heck",),
    "ffload": ("floa", "Offl"),
    "nterruption": ("terr",),
    "State=": ("ate=",),
    "ostname": ("ostn",),
    "dumped": ("umpe",),
    "erminat": ("ermi",),
    "local_rank": ("l_ra",),
    "CANCELLED": ("ANCE",),
    "size=": ("ize=",),
    "finite": ("init",),
    "reempt": ("reem",),
    "o space": ("o sp",),
    "NET/IB": ("T/IB",),
    "NODES": ("ODES",),
    "CPUAdam": ("CPUA",),
    "nodes=": ("des=",),
    "deepspeed_env": ("d_en",),
    "receive grad": ("ive ",),
    "ismatch": ("isma",),
    "CUDA_HOME": ("_HOM",),
    "Abort": ("Abor",),
    "fallen off": ("llen",),
}


class Confidence(str, Enum):
    """How sure a cause is: its evidence proves it; it is by far the most frequent one; it is worth a look."""

    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"


@dataclass(frozen=True)
class Signature:
    """A failure that is known: what tells it, what it means, and what mends it.

    Attributes:
        code: permanent, from DS1201 on.
        name: in words, for `ds-toolkit explain`.
        cause: what happened; `{group}` is what a pattern's group of that name has seen.
        fix: what to do; groups as in `cause`.
        patterns: regular expressions, any of which must be found in a line. Without any, `needs` decide.
        needs: what else must have been seen: names of signatures and markers, or facts such as
            `exit:SIGKILL`; of `a|b` one is enough.
        unless: names of signatures that must not fit besides.
        at_least: in how many lines.
        is_fallback: whether it is told only where no other cause was found.
        more_than_half: a line counts only if the number of the first group is over half of the second's.
    """

    code: str
    name: str
    cause: str
    fix: str
    patterns: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    at_least: int = 1
    confidence: Confidence = Confidence.CERTAIN
    severity: Severity = Severity.ERROR
    is_fallback: bool = False
    more_than_half: tuple[str, str] | None = None

    @property
    def manual(self) -> str:
        """What `ds-toolkit explain` prints."""
        lines = [_plain(self.cause) + ".", "", f"Fix: {_plain(self.fix)}."]
        if self.patterns:
            lines += ["", "Seen in a log as:", *(f"    {pattern}" for pattern in self.patterns)]
        if self.at_least > 1:
            lines += [f"at least {self.at_least} times."]
        for noun, names in (("Only together with", self.needs), ("Not if there is", self.unless)):
            if names:
                lines += ["", f"{noun}: {', '.join(name.replace('|', ' or ') for name in names)}."]
        if self.is_fallback:
            lines += ["", "Told only where no other cause was found."]
        return "\n".join(lines)


def _plain(text: str) -> str:
    return re.sub(r"\{(\w+)\}", r"<\1>", text)
