"""Which tensors are written, and under which names."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ds_toolkit.checkpoint.tensors import CheckpointMap, Role, StoredTensor
from ds_toolkit.convert.integrity import num_without_checksums
from ds_toolkit.convert.weight_files import WeightFiles
from ds_toolkit.errors import ToolkitError

_NUM_NEAR = 3
_ROLES = (Role.BUFFER, Role.FROZEN, Role.TRAINED)


@dataclass(frozen=True)
class Choice:
    """What a person asked for.

    Attributes:
        only: globs; a tensor is kept if one of them matches a name of it, as it is in the checkpoint or in
            the output.
        exclude_frozen: whether frozen weights are left out.
        strip_prefix: removed from the names that begin with it.
    """

    only: tuple[str, ...] = ()
    exclude_frozen: bool = False
    strip_prefix: str = ""


@dataclass(frozen=True)
class Selected:
    """What goes into the output, by the names that it has there.

    Attributes:
        tensors: each tensor once, in the order in which DeepSpeed's zero_to_fp32 takes them: buffers, frozen
            weights, then the others as they lie in the shards.
        aliases: further names of tied weights, and which tensor they stand for.
        names: all names, aliases included: the checkpoint's in its order, then those of the base.
        sources: of the names that the checkpoint has, what they are called there.
        missing: names of the model that are known and that nothing holds.
    """

    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    names: tuple[str, ...]
    sources: Mapping[str, str]
    missing: tuple[str, ...] = ()
    from_base: tuple[str, ...] = ()


@dataclass
class _Entries:
    """Names and their tensors while they are put together; tied names have the same object."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)


def select(weights: CheckpointMap, choice: Choice, base: WeightFiles | None = None) -> Selected:
    """The tensors that are asked for, with what the checkpoint lacks taken from `base`.

    Raises:
        ToolkitError: two tensors would have one name, a glob or the prefix fits nothing, or nothing is left.
    """
    entries = _of_checkpoint(weights, choice)
    known = set(entries.tensors)
    if base is not None:
        _fill(entries, base)
    missing = _tie_missing(entries, weights, choice)
    kept = _kept(entries, choice.only)
    from_base = tuple(name for name in kept if name not in known)
    selected = _without_doubles(entries, kept, choice.strip_prefix)
    place = {name: number for number, name in enumerate(weights.tensors)}
    ordered = sorted(
        selected.tensors.items(),
        key=lambda item: (
            _ROLES.index(item[1].role),
            place.get(selected.sources.get(item[0], ""), len(place)),
        ),
    )
    return dataclasses.replace(selected, tensors=dict(ordered), missing=missing, from_base=from_base)


def _of_checkpoint(weights: CheckpointMap, choice: Choice) -> _Entries:
    if choice.exclude_frozen and weights.stage == 0:
        raise ToolkitError(
            "which weights are frozen is not known",
            where=weights.folder,
            why="checkpoints of ZeRO stage 0 do not record it",
            fix="name what you want with --only",
        )
    names = [name for name in weights.names if not (choice.exclude_frozen and _is_frozen(weights, name))]
    prefix = choice.strip_prefix
    if prefix and not any(name.startswith(prefix) for name in names):
        shown = ", ".join(names[:_NUM_NEAR])
        raise ToolkitError(
            f"no name begins with `{prefix}`", where=weights.folder, why=f"names are {shown}, ..."
        )
    entries = _Entries()
    for name in names:
        stripped = name.removeprefix(prefix)
        if not stripped or stripped in entries.tensors:
            other = entries.sources.get(stripped)
            why = (
                f"it is what {other} and {name} would be called" if other else f"{name} is the prefix itself"
            )
            raise ToolkitError(
                f"without `{prefix}` a name would be `{stripped}`", where=weights.folder, why=why
            )
        entries.tensors[stripped] = weights.tensors[weights.aliases.get(name, name)]
        entries.sources[stripped] = name
    return entries


def _is_frozen(weights: CheckpointMap, name: str) -> bool:
    return weights.tensors[weights.aliases.get(name, name)].role is Role.FROZEN


def _fill(entries: _Entries, base: WeightFiles) -> None:
    """Add the base's tensors under names that are not there; names tied to one that is there follow it."""
    there: dict[str, StoredTensor] = {}
    for name in base.names:
        if name in entries.tensors:
            there.setdefault(base.aliases.get(name, name), entries.tensors[name])
    for name in base.names:
        tensor = base.aliases.get(name, name)
        entries.tensors.setdefault(name, there.get(tensor, base.tensors[tensor]))


def _tie_missing(entries: _Entries, weights: CheckpointMap, choice: Choice) -> tuple[str, ...]:
    """Names that are known to be tied get the tensor that one of them found in the base."""
    missing: dict[str, None] = {}
    for alias, name in weights.missing.items():
        pair = (name.removeprefix(choice.strip_prefix), alias.removeprefix(choice.strip_prefix))
        tensor = next((entries.tensors[one] for one in pair if one in entries.tensors), None)
        for one in pair:
            if tensor is None:
                missing[one] = None
            else:
                entries.tensors.setdefault(one, tensor)
    return () if choice.exclude_frozen else tuple(missing)


def _kept(entries: _Entries, globs: Iterable[str]) -> list[str]:
    names = list(entries.tensors)
    if not names:
        raise ToolkitError("there is nothing to write", why="every tensor was left out")
    globs = tuple(globs)
    if not globs:
        return names
    matched = set()
    for glob in globs:
        found = {name for name in names if _matches(name, glob) or _matches(entries.sources.get(name), glob)}
        if not found:
            raise _nothing_matches(glob, [*names, *entries.sources.values()])
        matched |= found
    return [name for name in names if name in matched]


def _matches(name: str | None, glob: str) -> bool:
    return name is not None and fnmatch.fnmatchcase(name, glob)


def _nothing_matches(glob: str, names: list[str]) -> ToolkitError:
    # Globs are compared with the beginnings of names as well: `layer.0.*` is near `layers.0.weight`.
    literal = glob.strip("*")
    depth = literal.strip(".").count(".") + 1
    beginnings = {".".join(name.split(".")[:depth]): name for name in reversed(names)}
    near = difflib.get_close_matches(literal, [*dict.fromkeys(names), *beginnings], n=_NUM_NEAR, cutoff=0.5)
    shown = list(dict.fromkeys(beginnings.get(name, name) for name in near)) or names[:_NUM_NEAR]
    return ToolkitError(
        f"no tensor matches `{glob}`", why=f"{'near' if near else 'there'} are {', '.join(shown)}"
    )


def _without_doubles(entries: _Entries, kept: list[str], prefix: str) -> Selected:
    by_tensor: dict[int, list[str]] = {}
    for name in kept:
        by_tensor.setdefault(id(entries.tensors[name]), []).append(name)
    tensors: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    for names in by_tensor.values():
        tensor = entries.tensors[names[0]]
        own = tensor.name.removeprefix(prefix)
        chosen = own if own in names else names[0]
        tensors[chosen] = tensor if tensor.name == chosen else dataclasses.replace(tensor, name=chosen)
        aliases |= {name: chosen for name in names if name != chosen}
    sources = {name: entries.sources[name] for name in kept if name in entries.sources}
    return Selected(tensors, aliases, tuple(kept), sources)


def notes_on(weights: CheckpointMap, selected: Selected, *, has_base: bool) -> Iterator[str]:
    """What the reader of a summary should know about the weights."""
    yield from weights.notes
    num_unchecked = num_without_checksums(weights.shards)
    if num_unchecked:
        yield f"{num_unchecked} files have torch's old format, which has no checksums to compare"
    if weights.unnamed_masters:
        count = sum(map(len, weights.unnamed_masters))
        yield (
            f"{count} fp32 weights in the optimizer state could not be matched to parameters; "
            "the 16-bit weights of these parameters were taken"
        )
    if weights.left_out:
        yield f"left out, for they are no tensors: {', '.join(weights.left_out)}"
    if weights.without_frozen and not has_base:
        yield (
            "the checkpoint was saved without frozen weights (exclude_frozen_parameters), and does not list "
            "them; --base FILE takes them from the model that training began with"
        )
    if selected.missing:
        yield f"missing, for neither the checkpoint nor a base holds them: {', '.join(selected.missing)}"
    if has_base and not selected.from_base:
        yield "the base held nothing that the checkpoint lacks"
