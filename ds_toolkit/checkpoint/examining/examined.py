"""A tag under examination: all that can be read of it, whatever else is broken in it."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_toolkit.checkpoint.damage import WrongSizeError
from ds_toolkit.checkpoint.examining.headers import Header, read_header
from ds_toolkit.checkpoint.fields import Fields
from ds_toolkit.checkpoint.layout import (
    UNIVERSAL_FOLDER,
    ShardFile,
    ShardKind,
    UnsupportedLayoutError,
    parameter_files,
    shard_files,
)
from ds_toolkit.checkpoint.layouts.cells import Cell, read_cell
from ds_toolkit.checkpoint.layouts.experts import with_experts
from ds_toolkit.checkpoint.layouts.states import model_states, optimizer_states
from ds_toolkit.checkpoint.manifest import MANIFEST_NAME, Manifest
from ds_toolkit.checkpoint.shards import Shard, open_shard
from ds_toolkit.checkpoint.tag_files import TagFiles
from ds_toolkit.checkpoint.tensors import CheckpointMap
from ds_toolkit.checkpoint.weights import read_weights
from ds_toolkit.errors import ToolkitError
from ds_toolkit.rules import Registry

if TYPE_CHECKING:
    from ds_toolkit.checkpoint.examining.contents import Contents

# More than any run has; a damaged world size may be any number.
_MOST_RANKS = 2**18
_STATES = (ShardKind.MODEL, ShardKind.OPTIMIZER)


@dataclass(frozen=True, eq=False)
class ExaminedFile:
    """One of DeepSpeed's files: its name's meaning, its structure and header, or why there are none.

    `name` is its name in the tag's folder.
    """

    name: str
    file: ShardFile
    size_bytes: int
    shard: Shard | None
    header: Header
    error: ToolkitError | None

    @property
    def root(self) -> dict[str, Any]:
        """What was saved, if it was a mapping; else nothing."""
        return self.shard.root if self.shard is not None and isinstance(self.shard.root, dict) else {}

    @property
    def buffer_names(self) -> frozenset[str]:
        """Names of the model's tensors that are no weights, as far as the file tells."""
        names = self.root.get("buffer_names")
        return frozenset(map(str, names)) if isinstance(names, list | tuple | set) else frozenset()


@dataclass
class ExaminedTag:
    """What the rules about a tag look at.

    Attributes:
        manifest: ds_toolkit's; None if there is none, or `manifest_error` says what is wrong with it.
        contents: what reading the data has shown; None if it was not read.
    """

    folder: Path
    files: tuple[ExaminedFile, ...]
    manifest: Manifest | None
    manifest_error: ToolkitError | None
    contents: Contents | None = field(default=None)

    @cached_property
    def dp_world_size(self) -> int | None:
        """What most files say; None if none can be read."""
        sizes = Counter(
            file.header.of_tag["data-parallel world size"]
            for file in self.files
            if "data-parallel world size" in file.header.of_tag
        )
        return sizes.most_common(1)[0][0] if sizes else None

    @cached_property
    def num_cells(self) -> int:
        """Ranks that share a model other than by data parallelism."""
        for file in self.of_kind(ShardKind.MODEL):
            size = file.header.of_kind.get("model-parallel world size")
            if isinstance(size, int) and size > 0:
                return size
        return max((file.file.mp_rank for file in self.files), default=0) + 1

    @property
    def step(self) -> int | None:
        """Optimizer steps done: of the manifest, else of the first model states that can be read."""
        if self.manifest is not None:
            return self.manifest.step
        steps = (file.header.of_kind.get("step") for file in self.of_kind(ShardKind.MODEL))
        return next((step for step in steps if isinstance(step, int)), None)

    @property
    def is_universal(self) -> bool:
        """Whether it is a universal checkpoint, which keeps each parameter in a folder of its own."""
        return (self.folder / UNIVERSAL_FOLDER).is_dir()

    def of_kind(self, *kinds: ShardKind) -> list[ExaminedFile]:
        """The files of these kinds, in the order of the ranks."""
        return [file for file in self.files if file.file.kind in kinds]

    @cached_property
    def expected_names(self) -> frozenset[str]:
        """The model and optimizer states that the layout asks for; empty where the layout is not known."""
        dp_world_size = self.dp_world_size
        if dp_world_size is None or dp_world_size * self.num_cells > _MOST_RANKS or self.is_universal:
            return frozenset()
        models, optimizers = self.of_kind(ShardKind.MODEL), self.of_kind(ShardKind.OPTIMIZER)
        told = ["fp32_flat_groups" in _state(file) for file in optimizers if _state(file)]
        is_split = any(told) if told else any(file.file.dp_rank is not None for file in models)
        has_groups = any(file.root.get("param_shapes") for file in models)
        is_bf16 = sum(file.file.bf16 for file in optimizers) * 2 > len(optimizers)
        names = []
        for mp_rank in range(self.num_cells):
            model, ranks = f"mp_rank_{mp_rank:02d}_model_states.pt", range(dp_world_size)
            names += [f"zero_pp_rank_{rank}_{model}" for rank in ranks] if is_split else [model]
            if optimizers or has_groups or is_split:
                prefix = "bf16_" if is_bf16 or (not optimizers and _config_says_bf16(models)) else ""
                ending = f"mp_rank_{mp_rank:02d}_optim_states.pt"
                names += [f"{prefix}zero_pp_rank_{rank}_{ending}" for rank in ranks]
        return frozenset(names)

    @cached_property
    def missing(self) -> list[str]:
        """Names of files that the manifest lists, or the layout asks for, and that are not there."""
        listed = [file.name for file in self.manifest.files] if self.manifest is not None else []
        names = dict.fromkeys([*listed, *sorted(self.expected_names)])
        return [name for name in names if not (self.folder / name).exists()]

    @cached_property
    def wrong_sizes(self) -> dict[str, str]:
        """Files that are not as long as they were written, and how long they are."""
        found = {}
        for file in self.manifest.files if self.manifest is not None else ():
            path = self.folder / file.name
            size_bytes = path.stat().st_size if path.exists() else file.size_bytes
            if size_bytes != file.size_bytes:
                found[file.name] = f"it has {size_bytes:,} bytes and was written with {file.size_bytes:,}"
        for examined in self.files:
            if isinstance(examined.error, WrongSizeError):
                found.setdefault(examined.name, examined.error.why or examined.error.what)
        return found

    @cached_property
    def surplus(self) -> list[ExaminedFile]:
        """Shards for which neither the layout nor the manifest has a place."""
        listed = {file.name for file in self.manifest.files} if self.manifest is not None else None
        return [
            file
            for file in self.files
            if (listed is not None and file.name not in listed)
            or (self.expected_names and file.file.kind in _STATES and file.name not in self.expected_names)
        ]

    @cached_property
    def belonging(self) -> list[ExaminedFile]:
        """The files that can be read and have their place."""
        return [file for file in self.files if file.error is None and file not in self.surplus]

    @cached_property
    def weights(self) -> CheckpointMap | ToolkitError:
        """The map of the weights, or why there is none."""
        try:
            return read_weights(self.folder)
        except ToolkitError as error:
            return error

    @cached_property
    def cells(self) -> dict[int, Cell]:
        """By rank, the cells whose weights can be put together."""
        found: dict[int, Cell] = {}
        for mp_rank in dict.fromkeys(file.file.mp_rank for file in self.of_kind(*_STATES)):
            # What is wrong with the others, the rules say.
            with contextlib.suppress(ToolkitError):
                tag = TagFiles.of(self.folder)
                found[mp_rank] = with_experts(tag, read_cell(tag, mp_rank))
        return found


# The rules about a tag; what registers them are the modules `*_rules`.
TAG_RULES: Registry[ExaminedTag] = Registry()


def examine(folder: Path) -> ExaminedTag:
    """Open every file of a tag that can be opened; reads no tensor data.

    Raises:
        ToolkitError: the folder cannot be listed.
    """
    try:
        found = [*shard_files(folder), *parameter_files(folder)]
    except OSError as error:
        raise ToolkitError("a tag cannot be read", where=folder, why=error.strerror) from error
    manifest, manifest_error = None, None
    try:
        if (folder / MANIFEST_NAME).exists():
            manifest = Manifest.read(folder)
    except ToolkitError as error:
        manifest_error = error
    files = tuple(_examined(folder, file) for file in found)
    return ExaminedTag(folder, files, manifest, manifest_error)


def tensors_in(root: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor record below a value, with the keys that lead to it joined by dots."""
    from ds_toolkit.checkpoint.reductions import Inert, TensorRecord

    pending: list[tuple[str, Any]] = [("", root)]
    seen: set[int] = set()
    while pending:
        path, value = pending.pop()
        if isinstance(value, TensorRecord):
            yield path, value
            continue
        if isinstance(value, Inert):
            value = [value.arguments, value.state, value.items]
        if isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            below = [(f"{path}.{key}" if path else str(key), item) for key, item in items]
            pending.extend(reversed(below))


def num_parameters_of(file: ExaminedFile) -> int | None:
    """Elements of the optimized parameters that a model states file lists; None if it lists none."""
    try:
        groups = Fields(file.shard, file.root).rows_of_shapes("param_shapes") if file.shard else ()
    except ToolkitError:
        return None
    return sum(math.prod(shape) for group in groups for shape in group.values()) or None


def _examined(folder: Path, file: ShardFile) -> ExaminedFile:
    name = file.path.relative_to(folder).as_posix()
    shard, size_bytes = None, 0
    try:
        size_bytes = file.path.stat().st_size
        shard = open_shard(file.path)
        if file.kind is ShardKind.MODEL:
            model_states(shard)
        elif file.kind is ShardKind.OPTIMIZER:
            optimizer_states(shard)
    except UnsupportedLayoutError:
        pass
    except ToolkitError as error:
        return ExaminedFile(name, file, size_bytes, None, Header(), error)
    header = read_header(file.kind, shard) if shard is not None else Header()
    return ExaminedFile(name, file, size_bytes, shard, header, None)


def _state(file: ExaminedFile) -> dict[str, Any]:
    state = file.root.get("optimizer_state_dict")
    return state if isinstance(state, dict) else {}


def _config_says_bf16(models: list[ExaminedFile]) -> bool:
    configs = (file.root.get("ds_config") for file in models)
    sections = (config.get("bf16") for config in configs if isinstance(config, dict))
    return any(isinstance(section, dict) and section.get("enabled") is True for section in sections)
