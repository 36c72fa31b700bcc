"""A checkpoint as a mapping from names to torch tensors, of which only those are read that are asked for."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from ds_toolkit.checkpoint.layout import LATEST, find_tag_folder, is_tag_folder, tag_folders
from ds_toolkit.checkpoint.masters import name_masters
from ds_toolkit.checkpoint.reading import OpenFiles
from ds_toolkit.checkpoint.tensors import StoredTensor
from ds_toolkit.checkpoint.weights import read_weights
from ds_toolkit.convert.copying import BLOCK_BYTES
from ds_toolkit.convert.gathering import Gather
from ds_toolkit.convert.moves import pieces
from ds_toolkit.convert.weight_files import WeightFiles, holds_weight_files, read_weight_files
from ds_toolkit.errors import ToolkitError

# Linux refuses a writable private mapping of a file larger than memory unless it need not be reserved. Python
# has the name from 3.13 on; the value is that of these processors (asm-generic/mman.h).
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0)


class Weights(Mapping[str, torch.Tensor]):
    """The weights of a checkpoint by name, read when they are asked for; tied names give one tensor.

    A tensor that lies in one piece is mapped from its file: it costs no memory until it is looked at, and
    changes to it stay in this process (a private mapping; who asks again for the name sees them). Others are
    put together in memory, and go when the caller lets go of them. CRCs are not compared.

    Attributes:
        aliases: further names of tied weights, and which name they stand for.
    """

    def __init__(
        self, tensors: Mapping[str, StoredTensor], aliases: Mapping[str, str], names: tuple[str, ...]
    ) -> None:
        self.aliases = dict(aliases)
        self._tensors = tensors
        self._names = names
        self._maps: dict[Path, mmap.mmap | None] = {}
        self._alive: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors or name in self.aliases

    def __getitem__(self, name: str) -> torch.Tensor:
        name = self.aliases.get(name, name)
        tensor = self._alive.get(name)
        if tensor is None:
            tensor = self._alive[name] = self._read(self._tensors[name])
        return tensor

    def is_mapped(self, name: str) -> bool:
        """Whether the tensor is mapped from its file, and not put together in memory."""
        return self._mapped(self._tensors[self.aliases.get(name, name)]) is not None

    def _read(self, stored: StoredTensor) -> torch.Tensor:
        dtype = _torch_dtype(stored)
        if stored.num_elements == 0:
            return torch.empty(stored.shape, dtype=dtype)
        mapped = self._mapped(stored)
        flat = _gathered(stored) if mapped is None else mapped
        return flat.view(dtype).reshape(stored.shape)

    def _mapped(self, stored: StoredTensor) -> torch.Tensor | None:
        if not stored.is_plain or len(stored.slices) != 1:
            return None
        (place,) = stored.slices
        if place.offset_bytes % stored.dtype.size_bytes:
            return None
        if place.path not in self._maps:
            self._maps[place.path] = _map(place.path)
        memory = self._maps[place.path]
        if memory is None or len(memory) < place.offset_bytes + place.num_bytes:
            return None
        return torch.frombuffer(memory, dtype=torch.uint8, count=place.num_bytes, offset=place.offset_bytes)


def open_checkpoint(path: str | os.PathLike[str], tag: str | None = None) -> Weights:
    """The weights of a DeepSpeed checkpoint, or of files that `consolidate` wrote, as a mapping of tensors.

    Nothing in the files is executed. Tensors have the type that they are stored as: of a DeepSpeed checkpoint
    the optimizer's fp32 weights, where it has them. `model.load_state_dict(open_checkpoint(path))` works, and
    both names of tied weights are there, also of a `.safetensors` file that holds them once.

    Args:
        path: a save directory or the folder of a tag, a `.safetensors`, `.bin`, `.pt` or `.pth` file, or a
            folder of such files as Hugging Face's libraries lay them out.
        tag: which checkpoint of a save directory; by default the one that `latest` names.

    Raises:
        ToolkitError: there is no such checkpoint, or it cannot be read.
    """
    path = Path(path)
    if tag is None and (path.is_file() or _holds_files_only(path)):
        return _weights(read_weight_files(path))
    weights = name_masters(read_weights(find_tag_folder(path, tag)))
    return Weights(weights.tensors, weights.aliases, weights.names)


def _weights(files: WeightFiles) -> Weights:
    return Weights(files.tensors, files.aliases, files.names)


def _holds_files_only(path: Path) -> bool:
    # A Trainer's checkpoint folder holds both DeepSpeed's tag and 16-bit weights: DeepSpeed's are more exact.
    if not path.is_dir() or (path / LATEST).exists() or is_tag_folder(path.resolve()):
        return False
    return holds_weight_files(path) and not tag_folders(path)


def _torch_dtype(stored: StoredTensor) -> torch.dtype:
    dtype = getattr(torch, stored.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise ToolkitError(f"this torch has no dtype {stored.dtype}, which {stored.name} is of")
    return dtype


def _map(path: Path) -> mmap.mmap | None:
    with path.open("rb") as file, contextlib.suppress(OSError, ValueError):
        return mmap.mmap(
            file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    # Where it cannot be mapped (no address space left, odd file systems) tensors are read.
    return None


def _gathered(stored: StoredTensor) -> torch.Tensor:
    flat = torch.empty(stored.num_elements * stored.dtype.size_bytes, dtype=torch.uint8)
    memory: memoryview = flat.numpy().data
    with OpenFiles() as files:
        if stored.is_plain:
            position = 0
            for place in stored.slices:
                files.read(place.path, place.offset_bytes, memory[position : position + place.num_bytes])
                position += place.num_bytes
        else:
            whole = Gather(stored, 0, stored.num_elements, 0, stored.dtype, stored.name)
            for piece in pieces(whole, BLOCK_BYTES):
                piece.fill(memory[piece.destination_offset_bytes :], files.read)
    return flat
