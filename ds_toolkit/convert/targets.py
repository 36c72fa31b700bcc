"""Where weights go: one file, or a folder as Hugging Face's libraries lay it out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.checkpoint.dtypes import DType
from ds_toolkit.convert.placing import real_path
from ds_toolkit.convert.selection import Selected
from ds_toolkit.convert.weight_files import SAFETENSORS, TORCH_SUFFIXES
from ds_toolkit.convert.writers import OutputTensor, Writer
from ds_toolkit.convert.writers.bin import BinWriter
from ds_toolkit.convert.writers.safetensors import SafetensorsWriter
from ds_toolkit.errors import ToolkitError


@dataclass(frozen=True)
class Format:
    """A format, and the names of its files in a folder (huggingface_hub/constants.py)."""

    name: str
    stem: str
    suffix: str
    writer: type[BinWriter] | type[SafetensorsWriter]

    @property
    def single(self) -> str:
        """The file of a model that fits into one."""
        return f"{self.stem}{self.suffix}"

    @property
    def index(self) -> str:
        """Says which file holds which tensor."""
        return f"{self.single}.index.json"

    def shard(self, number: int, count: int) -> str:
        """One file of several, counted from 1."""
        return f"{self.stem}-{number:05d}-of-{count:05d}{self.suffix}"

    def is_shard(self, name: str) -> bool:
        """Whether a file of this name is one of several."""
        return re.fullmatch(rf"{self.stem}-\d{{5}}-of-\d{{5}}{re.escape(self.suffix)}", name) is not None

    def is_own(self, name: str) -> bool:
        """Whether a file of this name belongs to a set of this format."""
        return name in (self.single, self.index) or self.is_shard(name)


FORMATS = {
    "safetensors": Format("safetensors", "model", SAFETENSORS, SafetensorsWriter),
    "bin": Format("bin", "pytorch_model", ".bin", BinWriter),
}
SUFFIXES = {SAFETENSORS: FORMATS["safetensors"], **dict.fromkeys(TORCH_SUFFIXES, FORMATS["bin"])}


@dataclass(frozen=True)
class Target:
    """A place that may be written to."""

    path: Path
    format: Format
    is_folder: bool

    @property
    def free_in(self) -> Path:
        """A folder that is there, on the file system of the output."""
        path = real_path(self.path)
        return path if self.is_folder and path.is_dir() else path.parent

    def own_files(self) -> list[Path]:
        """What a folder holds of a set of this format."""
        if not self.path.is_dir():
            return []
        return sorted(path for path in self.path.iterdir() if self.format.is_own(path.name))


@dataclass(frozen=True)
class OutputFile:
    """A file of the output: its name, its tensors, and all names for them."""

    name: str
    tensors: tuple[OutputTensor, ...]
    names: tuple[str, ...]
    aliases: Mapping[str, str]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors alone."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def new_writer(self, format_: Format) -> Writer:
        """Writes this file."""
        return format_.writer()


def find_target(out: str | os.PathLike[str], format_name: str | None, *, force: bool) -> Target:
    """The place that `out` means: a folder if it is one or ends in a slash, else a file.

    Raises:
        ToolkitError: nothing can be written there, or something is there already.
    """
    if not os.fspath(out):
        raise ToolkitError("the output has no name", fix="name a file, or a folder; `.` is the current one")
    # A bare `.` has no name that a hidden folder could be called after.
    path = Path(out) if Path(out).name else Path(out).resolve()
    if format_name is not None and format_name not in FORMATS:
        raise ToolkitError(f"`{format_name}` is no output format", fix=f"choose one of {', '.join(FORMATS)}")
    is_folder = os.fspath(out).endswith("/") or path.is_dir()
    if is_folder:
        target = Target(path, FORMATS[format_name or "safetensors"], is_folder)
    else:
        target = Target(path, _format_of(path, format_name), is_folder)
    # Of a link, the folder that it leads to.
    parent = real_path(path).parent
    if not parent.is_dir():
        shown = parent if path.is_symlink() else path.parent
        raise ToolkitError("the output's folder does not exist", where=shown, fix="make it first")
    if is_folder and path.exists() and not path.is_dir():
        raise ToolkitError("the output is a file, and its name ends in a slash", where=path)
    if not force:
        _refuse_what_is_there(target)
    return target


def keep_clear_of(target: Target, tag_folder: Path) -> None:
    """Refuse to write into the checkpoint that is read.

    Raises:
        ToolkitError: the output lies in it.
    """
    if target.path.resolve().is_relative_to(tag_folder.resolve()):
        raise ToolkitError(
            "the output lies inside the checkpoint",
            where=target.path,
            fix="name a file outside the tag's folder",
        )


def _format_of(path: Path, format_name: str | None) -> Format:
    named = SUFFIXES.get(path.suffix)
    if named is None:
        raise ToolkitError(
            f"the output's format is not known: its name ends in `{path.suffix}`"
            if path.suffix
            else "the output's format is not known: its name has no ending",
            where=path,
            fix=f"name a file that ends in one of {', '.join(SUFFIXES)}, or a folder with a slash at its end",
        )
    if format_name not in (None, named.name):
        raise ToolkitError(
            f"the output's name is that of another format than {format_name}",
            where=path,
            fix="leave the format out, or write into a folder",
        )
    return named


def _refuse_what_is_there(target: Target) -> None:
    if target.is_folder and (there := target.own_files()):
        names = ", ".join(path.name for path in there[:3]) + (", ..." if len(there) > 3 else "")
        raise ToolkitError(
            "the output's folder holds weights already",
            where=target.path,
            why=f"there are {names}",
            fix="name another folder, or replace them with --force",
        )
    if not target.is_folder and target.path.exists():
        raise ToolkitError(
            "the output exists", where=target.path, fix="name another file, or replace it with --force"
        )


def output_files(target: Target, selected: Selected, dtype: DType, max_shard_bytes: int) -> list[OutputFile]:
    """The files of the output, and what goes into each.

    A folder's are cut as `huggingface_hub.split_torch_state_dict_into_shards` cuts them: in order, and a
    tensor larger than `max_shard_bytes` alone.
    """
    outputs = [
        OutputTensor(
            tensor.name,
            tensor.shape,
            kept := dtype if tensor.dtype.is_convertible else tensor.dtype,
            tensor.num_elements * kept.size_bytes,
        )
        for tensor in selected.tensors.values()
    ]
    if not target.is_folder:
        return [_file(target.path.name, outputs, selected)]
    shards = _cut(outputs, max_shard_bytes)
    if len(shards) == 1:
        return [_file(target.format.single, outputs, selected)]
    return [
        _file(target.format.shard(number, len(shards)), shard, selected)
        for number, shard in enumerate(shards, start=1)
    ]


def _cut(outputs: Sequence[OutputTensor], max_shard_bytes: int) -> list[list[OutputTensor]]:
    shards: list[list[OutputTensor]] = []
    current: list[OutputTensor] = []
    current_bytes = 0
    for output in outputs:
        if output.num_bytes > max_shard_bytes:
            shards.append([output])
            continue
        if current_bytes + output.num_bytes > max_shard_bytes:
            shards.append(current)
            current, current_bytes = [], 0
        current.append(output)
        current_bytes += output.num_bytes
    return [*shards, current] if current else shards


def _file(name: str, outputs: Sequence[OutputTensor], selected: Selected) -> OutputFile:
    held = {output.name for output in outputs}
    names = tuple(name for name in selected.names if selected.aliases.get(name, name) in held)
    aliases = {name: selected.aliases[name] for name in names if name in selected.aliases}
    return OutputFile(name, tuple(outputs), names, aliases)


def index_of(files: Sequence[OutputFile], format_: Format) -> bytes:
    """The index of a folder: the size of all tensors, and the file of each name.

    Aliases are names of a `.bin` file, which shares storages. A `.safetensors` file holds them in its
    metadata, and its index leaves them out, as `save_pretrained` does.
    """
    lists_aliases = format_.name == "bin"
    weight_map = {
        name: file.name for file in files for name in file.names if lists_aliases or name not in file.aliases
    }
    index = {"metadata": {"total_size": sum(file.num_bytes for file in files)}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
