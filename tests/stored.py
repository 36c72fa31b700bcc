"""What lies in a checkpoint, compared with what should."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from ds_toolkit.checkpoint.tensors import CheckpointMap, StoredTensor


def tag_of(case_folder: Path) -> Path:
    """The only tag of a case of the zoo."""
    (folder,) = (case_folder / "checkpoints").glob("global_step*")
    return folder


def copier(zoo: Path, folder: Path) -> Callable[[str], Path]:
    """Copies the tag of a case to where a test may damage it."""

    def copy(case: str) -> Path:
        return Path(shutil.copytree(tag_of(zoo / case), folder / case))

    return copy


def values_of(tensor: StoredTensor) -> torch.Tensor:
    data = bytearray()
    for place in tensor.slices:
        with place.path.open("rb") as file:
            file.seek(place.offset_bytes)
            data += file.read(place.num_bytes)
    dtype = getattr(torch, tensor.dtype.name)
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(tensor.shape)


def assert_holds(weights: CheckpointMap, truth: dict[str, torch.Tensor]) -> None:
    assert set(weights.names) == set(truth)
    for name in weights.names:
        stored = weights.tensors[weights.aliases.get(name, name)]
        values = values_of(stored)
        values = values.float() if values.is_floating_point() else values
        assert values.dtype == truth[name].dtype
        assert values.shape == truth[name].shape
        assert torch.equal(values, truth[name]), name
