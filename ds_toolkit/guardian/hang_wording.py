"""Where ranks stand that do not move, in words: who waits where, and who is elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ds_toolkit
from ds_toolkit.guardian.control import Phase
from ds_toolkit.guardian.hangs import IN_A_STEP
from ds_toolkit.guardian.stacks import Frame, Stacks

_COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
_LOADERS = ("/torch/utils/data/", "/deepspeed/runtime/dataloader.py")
# Within them no line of a program stands; the training script may well lie below the second one.
_NOT_THE_PROGRAM = ("/site-packages/", "/dist-packages/", "<frozen ")
_OF_PYTHON = str(Path(os.__file__).parent)
_OF_THE_TOOLKIT = str(Path(ds_toolkit.__path__[0]).resolve())


@dataclass(frozen=True)
class Standstill:
    """A rank that does not move.

    Attributes:
        rank: global rank.
        phase: of its training loop.
        batches: that it has finished since its process began.
        stacks: where its threads are.
        has_closed: whether it has closed its guard.
    """

    rank: int
    phase: Phase
    batches: int
    stacks: Stacks
    has_closed: bool = False

    @property
    def program(self) -> Frame | None:
        """The innermost line of the training program; None if no stack is known."""
        return next((frame for frame in self.stacks.main if _is_of_the_program(frame)), None)

    @property
    def at(self) -> str:
        """That line in words, with a comma in front; empty if it is not known."""
        frame = self.program
        return "" if frame is None else f", at {Path(frame.file).name}:{frame.line} in {frame.function}"

    @property
    def collective(self) -> str | None:
        """The collective that its main thread is in; None if it is in none that is known."""
        # The outermost one: `all_gather_object` and not the `all_gather` that it is made of.
        calls = [frame for frame in self.stacks.main if _lies_in(frame, _COLLECTIVES)]
        own = [frame for frame in calls if frame.function not in ("wrapper", "log_wrapper", "inner")]
        return own[-1].function if own else None

    @property
    def is_loading(self) -> bool:
        """Whether it waits for its data loader."""
        return any(_lies_in(frame, _LOADERS) for frame in self.stacks.main)


def in_words(ranks: Sequence[Standstill], num_nodes: int) -> str:
    """Who is elsewhere, and who waits where; in one or two sentences."""
    foremost = max((known.batches for known in ranks if known.phase in IN_A_STEP), default=None)
    some_call = any(known.collective for known in ranks if known.phase in IN_A_STEP)
    phrases: dict[tuple[str, str], list[Standstill]] = {}
    for known in ranks:
        phrases.setdefault(_phrase(known, foremost, some_call), []).append(known)
    # Those that are elsewhere first: they are what the others wait for.
    in_order = sorted(phrases.items(), key=lambda phrase: _precedence(phrase[1]))
    text = "; ".join(
        f"{_names([known.rank for known in alike])} {one if len(alike) == 1 else many}"
        for (one, many), alike in in_order
    )
    return f"{text}.{_remark(ranks, num_nodes, alike=len(phrases) == 1)}"


def main_stack(known: Standstill, max_frames: int = 16) -> list[str]:
    """Lines of the main thread's stack, the innermost first."""
    if not known.stacks.main:
        return [known.stacks.why_none or "its main thread is not among the stacks"]
    lines = [str(frame) for frame in known.stacks.main[:max_frames]]
    left = len(known.stacks.main) - max_frames
    return lines if left <= 0 else [*lines, f"and {left} more"]


def _precedence(alike: Sequence[Standstill]) -> tuple[bool, int, int, int]:
    """Who is inside a step and can run comes last; of these those that have come farthest, or are most."""
    first = alike[0]
    is_inside = first.phase in IN_A_STEP and not first.stacks.is_stopped
    return is_inside, first.batches if is_inside else 0, len(alike), first.rank


def _phrase(known: Standstill, foremost: int | None, some_call: bool) -> tuple[str, str]:
    """What a rank does, for one and for several."""
    if known.has_closed:
        return _both("has", "have", "closed the guard")
    if known.stacks.is_stopped:
        why = "by a signal" if known.stacks.state == "T" else "by a debugger"
        return _both("is", "are", f"stopped {why}, {_place(known)}")
    if known.phase in IN_A_STEP:
        if some_call and known.stacks.main and known.collective is None:
            return _both("is", "are", f"{_place(known)}{known.at}")
        return _both("waits", "wait", _place(known))
    after = f"after {_batches(known.batches)}"
    if known.phase is Phase.IDLE:
        return f"left its loop {after}", f"left their loops {after}"
    if known.phase is Phase.SAVE:
        return _both("is", "are", f"saving a checkpoint {after}{known.at}")
    if known.phase is Phase.LOAD:
        return _both("is", "are", f"loading a checkpoint {after}{known.at}")
    if known.phase is Phase.EVALUATION:
        return _both("is", "are", f"in an evaluation {after}{known.at}")
    return _between_batches(known, after, is_behind=foremost is not None and known.batches <= foremost)


def _between_batches(known: Standstill, after: str, *, is_behind: bool) -> tuple[str, str]:
    if known.is_loading:
        return _both("waits", "wait", f"for the data of batch {known.batches + 1}{known.at}")
    collective = known.collective
    if collective is not None and is_behind:
        waits = f"in `{collective}`{known.at}"
        return f"left its loop {after} and waits {waits}", f"left their loops {after} and wait {waits}"
    if collective is not None:
        return _both("waits", "wait", f"in `{collective}` between two batches, {after}{known.at}")
    return _both("is", "are", f"between two batches, {after}{known.at}")


def _remark(ranks: Sequence[Standstill], num_nodes: int, *, alike: bool) -> str:
    if not any(known.phase in IN_A_STEP for known in ranks):
        return " No rank is inside a step: an evaluation, or other work of the program, looks the same."
    if not alike:
        return ""
    if num_nodes > 1:
        return " All ranks of this node wait for one of another node, or for the network."
    if len(ranks) > 1:
        return (
            " All ranks wait at the same place: for the network or the device, or in different collectives."
        )
    return ""


def _place(known: Standstill) -> str:
    if known.phase in IN_A_STEP:
        return f"in {known.phase.name.lower()} of batch {known.batches + 1}"
    return f"after {_batches(known.batches)}"


def _both(one: str, many: str, rest: str) -> tuple[str, str]:
    return f"{one} {rest}", f"{many} {rest}"


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count} batches"


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _lies_in(frame: Frame, places: Sequence[str]) -> bool:
    return any(place in frame.file for place in places)


def _is_of_the_program(frame: Frame) -> bool:
    if any(place in frame.file for place in _NOT_THE_PROGRAM) or frame.file.startswith(_OF_THE_TOOLKIT):
        return False
    return not frame.file.startswith(_OF_PYTHON)
