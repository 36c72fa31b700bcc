"""Which files of a tag do not belong to the others, judged by what they say of the run that wrote them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ds_toolkit.checkpoint.examining.examined import ExaminedFile, ExaminedTag
from ds_toolkit.checkpoint.examining.headers import STEP_FACTS, Header
from ds_toolkit.checkpoint.layout import ShardKind

_LONGEST_VALUE = 40
_APART_SECONDS = 3600.0


@dataclass(frozen=True)
class Difference:
    """A fact in which a file is not like the others."""

    file: ExaminedFile
    fact: str
    here: Any
    elsewhere: Any
    witness: str

    def __str__(self) -> str:
        here, elsewhere = _shown(self.here), _shown(self.elsewhere)
        if here is None or elsewhere is None or here == elsewhere:
            return f"not the same {self.fact} as {self.witness}"
        return f"{self.fact} is {here} here and {elsewhere} in {self.witness}"


def of_another_step(tag: ExaminedTag) -> dict[ExaminedFile, list[Difference]]:
    """Files whose step is not that of the tag: of the manifest if there is one, else of most files."""
    return _by_file(difference for difference in _differences(tag) if difference.fact in STEP_FACTS)


def of_another_run(tag: ExaminedTag) -> dict[ExaminedFile, list[Difference]]:
    """Files of the tag's step that differ in anything else."""
    stale = of_another_step(tag)
    return _by_file(difference for difference in _differences(tag) if difference.file not in stale)


def saved_apart(tag: ExaminedTag) -> dict[ExaminedFile, float]:
    """Files changed more than an hour before or after most others, and by how many seconds."""
    times = sorted(((file.file.path.stat().st_mtime, file) for file in tag.files), key=lambda pair: pair[0])
    gaps = [(later[0] - earlier[0], index) for index, (earlier, later) in enumerate(pairwise(times), 1)]
    widest, index = max(gaps, default=(0.0, 0))
    if widest <= _APART_SECONDS:
        return {}
    older, newer = times[:index], times[index:]
    odd = older if len(older) < len(newer) else newer
    return {file: widest for _, file in odd}


def _differences(tag: ExaminedTag) -> Iterator[Difference]:
    files = tag.belonging
    models = [file for file in files if file.file.kind is ShardKind.MODEL]
    optimizers = [file for file in files if file.file.kind is ShardKind.OPTIMIZER]
    # A step that nobody else vouches for is weighed against the number that the model states give.
    hints = {name: _steps_done(models) for name in STEP_FACTS}
    yield from _odd(files, lambda header: header.of_tag, hints)
    for group in (models, optimizers):
        yield from _odd(group, lambda header: header.of_kind, hints)
        for mp_rank in sorted({file.file.mp_rank for file in group}):
            cell = [file for file in group if file.file.mp_rank == mp_rank]
            yield from _odd(cell, lambda header: header.of_cell, hints)
    if tag.manifest is not None:
        for file in models:
            step = file.header.of_kind.get("step", tag.manifest.step)
            if step != tag.manifest.step:
                yield Difference(file, "step", step, tag.manifest.step, "the manifest")


def _odd(
    files: Sequence[ExaminedFile],
    facts_of: Callable[[Header], Mapping[str, Any]],
    hints: Mapping[str, Any],
) -> Iterator[Difference]:
    names = dict.fromkeys(name for file in files for name in facts_of(file.header))
    for name in names:
        told = [(facts_of(file.header)[name], file) for file in files if name in facts_of(file.header)]
        values = [value for value, _ in told]
        if all(value == values[0] for value in values):
            continue
        # Of two values that as many files have, the hinted one, then the first counts.
        usual = max(values, key=lambda value: (values.count(value), value == hints.get(name)))
        witness = next(file.name for value, file in told if value == usual)
        for value, file in told:
            if value != usual:
                yield Difference(file, name, value, usual, witness)


def _steps_done(models: Sequence[ExaminedFile]) -> int | None:
    for file in models:
        step, skipped = (file.header.of_kind.get(name) for name in ("step", "number of skipped steps"))
        if isinstance(step, int):
            return step - (skipped if isinstance(skipped, int) else 0)
    return None


def _by_file(differences: Iterator[Difference]) -> dict[ExaminedFile, list[Difference]]:
    found: dict[ExaminedFile, list[Difference]] = {}
    for difference in differences:
        found.setdefault(difference.file, []).append(difference)
    return found


def _shown(value: Any) -> str | None:
    """A value short enough to be read, or None."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST_VALUE else None
