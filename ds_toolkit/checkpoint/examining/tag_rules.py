"""DS901 to DS911: what is wrong with the files of a tag, as far as names, sizes and structure tell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ds_toolkit.checkpoint.damage import WrongSizeError
from ds_toolkit.checkpoint.examining.agreement import of_another_run, of_another_step, saved_apart
from ds_toolkit.checkpoint.examining.coverage import coverage_problems
from ds_toolkit.checkpoint.examining.examined import TAG_RULES, ExaminedTag
from ds_toolkit.checkpoint.layout import UnsupportedLayoutError, parse_shard_name
from ds_toolkit.checkpoint.manifest import MANIFEST_NAME
from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem
from ds_toolkit.units import format_seconds

_ANOTHER_TAG = "use another tag, or bring the file back from another copy"


@TAG_RULES.rule("DS901", "missing-file", Severity.ERROR)
def missing_file(tag: ExaminedTag) -> Iterator[Problem]:
    """A file of the tag is not there: the manifest lists it, or the world size asks for a shard of that rank.

    DeepSpeed alone writes `latest` before the other ranks' shards are on the disk, so that a crash during a
    save leaves such a tag. Without a manifest the ranks are counted by the data-parallel world size that the
    other files name.

    Bad:
        a run on two ranks, without zero_pp_rank_1_mp_rank_00_optim_states.pt
    Good:
        a run on two ranks, with the optimizer states of rank 0 and of rank 1
    """
    for name in tag.missing:
        message = "the file is missing"
        parsed = parse_shard_name(Path(name))
        if parsed is not None:
            rank = "" if parsed.dp_rank is None else f" of data-parallel rank {parsed.dp_rank}"
            cell = f" in cell {parsed.mp_rank}" if tag.num_cells > 1 else ""
            message = f"the {parsed.kind.value}{rank}{cell} are missing"
        yield Problem(name, message, _ANOTHER_TAG)


@TAG_RULES.rule("DS902", "wrong-size", Severity.ERROR)
def wrong_size(tag: ExaminedTag) -> Iterator[Problem]:
    """A file is shorter or longer than it was written: the manifest has another size, or its end is missing.

    What torch writes is a zip archive, whose table of contents stands at the end. A full disk, a broken copy
    or a node that died before its data reached the disk cut it off.

    Bad:
        a shard whose last 100 bytes are gone
    Good:
        a shard as long as it was written
    """
    for name, message in tag.wrong_sizes.items():
        yield Problem(name, message, _ANOTHER_TAG)


@TAG_RULES.rule("DS904", "unreadable-file", Severity.ERROR)
def unreadable_file(tag: ExaminedTag) -> Iterator[Problem]:
    """A file cannot be read: the disk reports an error, its structure is damaged, or it holds something else.

    A damaged manifest counts too: then nothing says what the tag should hold, and only its structure is
    checked. Nothing in a file is executed to read it.

    Bad:
        a manifest in which one digit was changed
    Good:
        a manifest that fits its own CRC-32
    """
    if tag.manifest_error is not None:
        yield Problem(MANIFEST_NAME, _told(tag.manifest_error), tag.manifest_error.fix)
    for shard in tag.files:
        # Shorter files have a rule of their own, whatever could not be read because of it.
        if shard.error is not None and not isinstance(shard.error, WrongSizeError):
            yield Problem(shard.name, _told(shard.error), _ANOTHER_TAG)
    for path, why in tag.contents.unreadable.items() if tag.contents is not None else ():
        yield Problem(path.relative_to(tag.folder).as_posix(), why, _ANOTHER_TAG)


@TAG_RULES.rule("DS905", "tensors-not-covered", Severity.ERROR)
def tensors_not_covered(tag: ExaminedTag) -> Iterator[Problem]:
    """The shards are there and fit each other, but do not hold every tensor of the model exactly once.

    The shapes of the parameters, the sizes of the flat fp32 groups and the number of ranks are put together
    as DeepSpeed does it when it loads. No two tensors may share bytes of a group, and what no tensor claims
    must be padding. Judged only if no file is missing, unreadable, left over or of another run.

    Bad:
        groups of 64 fp32 weights for parameters of 70 elements
    Good:
        groups of 70 fp32 weights for parameters of 70 elements
    """
    broken = tag.manifest_error is not None or any(file.error is not None for file in tag.files)
    if broken or tag.missing or tag.wrong_sizes or tag.surplus:
        return
    if of_another_step(tag) or of_another_run(tag):
        return
    if isinstance(tag.weights, UnsupportedLayoutError):
        return
    if isinstance(tag.weights, ToolkitError):
        error = tag.weights
        path = Path(error.where or tag.folder)
        # In a universal checkpoint files of one name lie in many folders.
        inside = path.is_relative_to(tag.folder) and path != tag.folder
        where = path.relative_to(tag.folder).as_posix() if inside else ""
        yield Problem(where, _told(error), "use another tag")
        return
    for path, message in coverage_problems(tag, tag.weights):
        name = "" if path == tag.folder else path.relative_to(tag.folder).as_posix()
        yield Problem(name, message, "use another tag")


@TAG_RULES.rule("DS907", "left-over-shard", Severity.ERROR)
def left_over_shard(tag: ExaminedTag) -> Iterator[Problem]:
    """A shard lies in the tag that its world size, or its manifest, has no place for.

    DeepSpeed writes over the files of an older tag of the same name in place: where fewer ranks save, the
    shards of the others stay. `zero_to_fp32.py` counts files and then refuses the tag.

    Bad:
        a run on two ranks, and a zero_pp_rank_2_mp_rank_00_optim_states.pt
    Good:
        a run on two ranks, with the optimizer states of ranks 0 and 1
    """
    for file in tag.surplus:
        message = "the manifest does not list it"
        if file.name not in tag.expected_names and tag.dp_world_size is not None:
            message = f"the data-parallel world size is {tag.dp_world_size}: it has no place here"
        yield Problem(file.name, message, "move it away, if a larger run wrote it before")


@TAG_RULES.rule("DS908", "shard-of-another-step", Severity.ERROR)
def shard_of_another_step(tag: ExaminedTag) -> Iterator[Problem]:
    """A shard holds another step than the rest of the tag.

    DeepSpeed loads such a tag without a word and trains on with parts of two models. The step is the
    optimizer's own count in its states, and `global_steps` in the model states; the manifest, or else what
    most files say, decides which shard is the odd one.

    Bad:
        optimizer states of step 5 on rank 0 and of step 4 on rank 1
    Good:
        optimizer states of step 5 on both ranks
    """
    for file, differences in of_another_step(tag).items():
        yield Problem(file.name, str(differences[0]), "use another tag, or bring the shard of this step back")


@TAG_RULES.rule("DS909", "shard-of-another-run", Severity.ERROR)
def shard_of_another_run(tag: ExaminedTag) -> Iterator[Problem]:
    """A shard is of the same step and tells of another run: world size, settings, shapes or version differ.

    Compared are the world sizes, DeepSpeed's version, the parts of the ds_config that are the same on every
    rank, the shapes of the parameters, the sizes of the groups, the scheduler, the loss scale and the
    optimizer's settings. DeepSpeed gives a run no name: two runs that agree in all this are told apart by
    their values only, which `--deep` compares at stages 1 and 2 (DS912); at stage 3 nothing can.

    Bad:
        optimizer states with learning rate 1e-3 on rank 0 and 1e-4 on rank 1
    Good:
        optimizer states with learning rate 1e-3 on both ranks
    """
    for file, differences in of_another_run(tag).items():
        more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
        yield Problem(file.name, f"{differences[0]}{more}", "bring the shard of this run back")


@TAG_RULES.rule("DS910", "shards-saved-apart", Severity.WARNING)
def shards_saved_apart(tag: ExaminedTag) -> Iterator[Problem]:
    """A file without a manifest was changed more than an hour before or after the others of its tag.

    All ranks of a run save at the same time, so a file with another time may have been copied here from
    another run. It may also be that a download was interrupted; the times of files say no more.

    Bad:
        shards of noon, and one of the evening
    Good:
        shards of noon
    """
    if tag.manifest is None and not of_another_step(tag) and not of_another_run(tag) and not tag.surplus:
        for file, seconds in saved_apart(tag).items():
            message = f"it was changed {format_seconds(seconds)} apart from the other files"
            yield Problem(file.name, message, "if it was copied from elsewhere, use another tag")


@TAG_RULES.rule("DS911", "unknown-layout", Severity.WARNING)
def unknown_layout(tag: ExaminedTag) -> Iterator[Problem]:
    """The weights of this layout cannot be put together here, so that nobody has checked that all are there.

    Every file was opened and compared with the others all the same, and `--deep` reads their data.

    Bad:
        a layout that `ds-toolkit consolidate` refuses
    Good:
        files of ZeRO stage 0, 1, 2 or 3
    """
    if isinstance(tag.weights, UnsupportedLayoutError):
        yield Problem("", f"not every tensor was checked: {_told(tag.weights)}")


def _told(error: ToolkitError) -> str:
    return f"{error.what}: {error.why}" if error.why else error.what
