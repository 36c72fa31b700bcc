"""DS903, DS912 and DS913: what is wrong with the data of a tag; they look at it only if it was read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ds_toolkit.checkpoint.examining.contents import NotFinite
from ds_toolkit.checkpoint.examining.examined import TAG_RULES, ExaminedTag
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem


@TAG_RULES.rule("DS903", "changed-content", Severity.ERROR)
def changed_content(tag: ExaminedTag) -> Iterator[Problem]:
    """A file has the right size and another content than was saved: a CRC-32 does not fit (`--deep`).

    Compared with the manifest, where the tag has one; else with the CRC-32 that torch writes beside every
    tensor's storage in the file.

    Bad:
        a shard in which one byte of a weight was flipped on the disk
    Good:
        a shard whose bytes give the CRC-32 that was saved
    """
    for path, why in tag.contents.changed.items() if tag.contents is not None else ():
        yield Problem(_name(tag, path), why, "use another tag, or bring the file back from another copy")


@TAG_RULES.rule("DS912", "weights-that-contradict", Severity.ERROR)
def weights_that_contradict(tag: ExaminedTag) -> Iterator[Problem]:
    """The fp32 weights of optimizer states, rounded, are not the weights of the model states (`--deep`).

    Stages 1 and 2 save trained weights twice, and after every step they are the same: a shard in which they
    differ is of another run, or of another save under the same name. (A script that changes weights after
    `engine.step()` makes them differ too, and the next step undoes its change.)

    Bad:
        the optimizer states of rank 1 from a run with another random seed
    Good:
        model states and optimizer states of one save
    """
    for path, why in tag.contents.differing.items() if tag.contents is not None else ():
        yield Problem(_name(tag, path), why, "use another tag, or bring the shard of this save back")


@TAG_RULES.rule("DS913", "values-not-finite", Severity.ERROR)
def values_not_finite(tag: ExaminedTag) -> Iterator[Problem]:
    """A weight, a buffer or a state of the optimizer holds NaN or infinite values (`--deep`).

    Training goes on from such a checkpoint with losses of NaN; the damage was done before it was saved.
    Infinite values in a buffer are only noted: attention masks are made of them. So is what may be padding of
    a flat group: DeepSpeed pads with whatever its memory held before.

    Bad:
        a weight with one NaN
    Good:
        weights that are numbers
    """
    for found in tag.contents.not_finite if tag.contents is not None else ():
        harmless = found.range_.may_be_padding or (found.range_.is_buffer and found.num_nan == 0)
        more = f" and {len(found.paths) - 1} more files" if len(found.paths) > 1 else ""
        yield Problem(
            _name(tag, found.paths[0]),
            f"{_described(found)}{more}",
            None if harmless else "resume from a tag before the values went bad",
            severity=Severity.INFO if harmless else None,
        )


def _described(found: NotFinite) -> str:
    range_ = found.range_
    tensor = range_.name if range_.what in ("weight", "value") else f"{range_.what} of {range_.name}"
    counts = [
        f"{count:,} {kind}"
        for count, kind in ((found.num_nan, "NaN"), (found.num_infinite, "infinite"))
        if count
    ]
    doubt = ", perhaps of padding" if range_.may_be_padding else ""
    return f"{tensor} holds {' and '.join(counts)} values ({range_.dtype}){doubt}"


def _name(tag: ExaminedTag, path: Path) -> str:
    return path.relative_to(tag.folder).as_posix()
