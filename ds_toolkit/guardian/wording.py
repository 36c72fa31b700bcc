"""A decision about the snapshots, in words for the log and the incident file."""

from __future__ import annotations

from collections.abc import Sequence

from ds_toolkit.guardian.topology import Decision, Missing, Verdict

_MAX_PLACES = 8


def in_words(decision: Decision) -> str:
    """What can be written, and which (dp, tp, pp) places are missing at which step."""
    step = decision.step
    if step is None:
        return "Nothing can be written: no rank has a whole snapshot that can be read."
    if decision.verdict is Verdict.COMPLETE:
        text = f"Step {step} is complete."
        if decision.fresh_ranks:
            text += (
                f" The random states and tracked objects of {_ranks(decision.fresh_ranks)} are lost:"
                " they start afresh."
            )
        return text
    missing = _missing(decision.missing)
    if decision.verdict is Verdict.WEIGHTS_ONLY:
        return (
            f"Only the weights are whole, at step {step}; training cannot be resumed from them."
            f" Missing at that step: {missing}."
        )
    return (
        "Nothing can be written: at no step is all of it there, nor all weights."
        f" Step {step} comes nearest; missing at that step: {missing}."
    )


def _missing(missing: Sequence[Missing]) -> str:
    """What lies at one place and is missing in the same way is said together."""
    places: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for entry in missing:
        place = (entry.piece.place, entry.ranks, entry.other_steps)
        places.setdefault(place, []).append(entry.piece.kind.value)
    parts = [
        f"{' and '.join(kinds)} of {place} ({_ranks(ranks)}{_steps(steps)})"
        for (place, ranks, steps), kinds in places.items()
    ]
    if len(parts) > _MAX_PLACES:
        parts[_MAX_PLACES:] = [f"and {len(parts) - _MAX_PLACES} more places"]
    return "; ".join(parts)


def _steps(steps: Sequence[int]) -> str:
    return f", there at {_listed('step', steps)} only" if steps else ""


def _ranks(ranks: Sequence[int]) -> str:
    return _listed("rank", ranks)


def _listed(noun: str, numbers: Sequence[int]) -> str:
    shown = [str(number) for number in numbers[:_MAX_PLACES]]
    if len(numbers) > _MAX_PLACES:
        shown.append(f"{len(numbers) - _MAX_PLACES} more")
    if len(shown) == 1:
        return f"{noun} {shown[0]}"
    return f"{noun}s {', '.join(shown[:-1])} and {shown[-1]}"
