"""Weights in plain files: `.safetensors`, what `torch.save` writes, and Hugging Face's folders.

Nothing in them is executed: safetensors are JSON and bytes, and pickles are interpreted without a call.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_toolkit.checkpoint.dtypes import DTYPES
from ds_toolkit.checkpoint.layouts.whole_tensors import whole_tensor
from ds_toolkit.checkpoint.reductions import TensorRecord
from ds_toolkit.checkpoint.shards import Slice, open_shard
from ds_toolkit.checkpoint.tensors import Part, Role, StoredTensor
from ds_toolkit.convert.writers.safetensors import CODES, MAX_HEADER_BYTES, METADATA
from ds_toolkit.errors import ToolkitError

# In the order in which Hugging Face's libraries look for them.
FOLDER_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
SAFETENSORS = ".safetensors"
TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_DTYPES = {code: DTYPES[name] for name, code in CODES.items()}
_MAX_INDEX_BYTES = 256 * 2**20


@dataclass(frozen=True)
class WeightFiles:
    """What one or several files of weights hold, without the data.

    Attributes:
        tensors: by name, each tensor once; all of them count as frozen, for nothing says what they are.
        aliases: further names of tied weights, and which tensor they stand for.
        names: all names, aliases included.
    """

    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    names: tuple[str, ...]


def read_weight_files(path: Path) -> WeightFiles:
    """The map of a file, or of a folder with an index.

    Raises:
        ToolkitError: it is not there, is damaged, or holds no weights.
    """
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise ToolkitError("the file of weights does not exist", where=path)
    if path.suffix == SAFETENSORS:
        return _read_safetensors(path)
    if path.name.endswith(".index.json"):
        return _read_index(path)
    if path.suffix in TORCH_SUFFIXES:
        return _read_torch_file(path)
    raise ToolkitError(
        "the format of these weights is not known",
        where=path,
        fix=f"name a file that ends in one of {', '.join((SAFETENSORS, *TORCH_SUFFIXES))}, or a folder",
    )


def holds_weight_files(folder: Path) -> bool:
    """Whether a folder has weights as Hugging Face's libraries name them."""
    return any((folder / name).is_file() for name in FOLDER_FILES)


def _read_folder(folder: Path) -> WeightFiles:
    for name in FOLDER_FILES:
        if (folder / name).is_file():
            return read_weight_files(folder / name)
    raise ToolkitError(
        "there are no weights in this folder", where=folder, why=f"none of {', '.join(FOLDER_FILES)} is there"
    )


def _read_index(path: Path) -> WeightFiles:
    weight_map = _json_object(path, path.read_bytes()[: _MAX_INDEX_BYTES + 1]).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise _damaged(path, "it has no `weight_map`")
    tensors: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    for name in dict.fromkeys(weight_map.values()):
        if Path(name).name != name:
            raise _damaged(path, f"it names a file in another folder: {name}")
        shard = read_weight_files(path.with_name(name))
        tensors |= shard.tensors
        aliases |= shard.aliases
    for name, file_name in weight_map.items():
        if name not in tensors and name not in aliases:
            raise _damaged(path, f"{file_name} does not hold {name}")
    return WeightFiles(tensors, aliases, (*tensors, *aliases))


def _read_torch_file(path: Path) -> WeightFiles:
    shard = open_shard(path)
    if not isinstance(shard.root, dict):
        raise _damaged(path, "it holds no state dict")
    tensors: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    by_place: dict[TensorRecord, str] = {}
    for name, record in shard.root.items():
        if not isinstance(name, str) or not isinstance(record, TensorRecord):
            continue
        if record.num_elements and by_place.setdefault(record, name) != name:
            aliases[name] = by_place[record]
        else:
            tensors[name] = whole_tensor(shard, name, record, Role.FROZEN)
    if not tensors:
        raise _damaged(path, "it holds no tensor under a name: not a state dict, or one inside another")
    names = (name for name in shard.root if name in tensors or name in aliases)
    return WeightFiles(tensors, aliases, tuple(names))


def _read_safetensors(path: Path) -> WeightFiles:
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else size_bytes
        if header_bytes > min(size_bytes - 8, MAX_HEADER_BYTES):
            raise _damaged(path, "its header is longer than the file, or absurdly long")
        header = _json_object(path, file.read(header_bytes))
    metadata = header.pop(METADATA, None) or {}
    data_start = 8 + header_bytes
    tensors = {name: _stored(path, name, entry, data_start, size_bytes) for name, entry in header.items()}
    aliases = {
        alias: name
        for alias, name in metadata.items()
        if isinstance(name, str) and _is_alias(alias, name, tensors)
    }
    return WeightFiles(tensors, aliases, (*tensors, *aliases))


def _is_alias(alias: str, name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    # Whatever else people keep in the metadata names no tensor.
    return name in tensors and alias not in tensors and alias != "format"


def _stored(path: Path, name: str, entry: Any, data_start: int, size_bytes: int) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    shape, offsets = _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise _damaged(path, f"the entry of {name} is not that of a tensor")
    dtype = _DTYPES.get(str(fields.get("dtype")))
    if dtype is None:
        raise _damaged(path, f"{name} has the dtype {fields.get('dtype')}, which is not supported")
    begin, end = offsets
    if end - begin != math.prod(shape) * dtype.size_bytes or data_start + end > size_bytes:
        raise _damaged(path, f"{name} of shape {list(shape)} does not lie where the header says")
    place = Slice(path, data_start + begin, end - begin)
    return StoredTensor(name, shape, dtype, (Part((place,) if place.num_bytes else ()),), Role.FROZEN)


def _counts(values: Any) -> tuple[int, ...] | None:
    if not isinstance(values, list) or not all(isinstance(value, int) and value >= 0 for value in values):
        return None
    return tuple(values)


def _json_object(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "its header is no JSON") from error
    if not isinstance(value, dict):
        raise _damaged(path, "its header is no JSON object")
    return value


def _damaged(path: Path, why: str) -> ToolkitError:
    return ToolkitError("a file of weights cannot be read", where=os.fspath(path), why=why)
