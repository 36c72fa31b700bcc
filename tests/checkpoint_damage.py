"""Copies of real checkpoints, and the ways in which these are damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ds_toolkit.checkpoint.manifest import Manifest, ManifestFile, RunShape
from ds_toolkit.files import crc32_of

TAG = "global_step3"
RANK_1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


def copied(zoo: Path, case: str, directory: Path) -> Path:
    """A copy of a case's save directory; returns its tag."""
    shutil.copytree(zoo / case / "checkpoints", directory)
    return directory / TAG


def write_manifest(folder: Path, step: int = 3, left_out: str = "") -> None:
    """Commit a tag as it is, perhaps but for one file."""
    names = sorted(path.name for path in folder.glob("*.pt") if path.name != left_out)
    files = tuple(
        ManifestFile(name, (folder / name).stat().st_size, crc32_of(folder / name), 0) for name in names
    )
    Manifest(folder.name, step, "periodic", RunShape(2, 2, 1, 1, "fp32"), files).write(folder)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what is in a shard, all CRCs being right again."""
    root = torch.load(path, weights_only=False)
    with torch.no_grad():
        change(root)
    torch.save(root, path)


def flip(path: Path, offset_bytes: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset_bytes] ^= 1
    path.write_bytes(data)


def zero_state(root: dict[str, Any]) -> dict[str, Any]:
    """The ZeRO optimizer's state in a shard."""
    state: dict[str, Any] = root["optimizer_state_dict"]
    return state


def base_state(root: dict[str, Any]) -> dict[str, Any]:
    """The base optimizer's state in a shard of stages 1 and 2."""
    state: dict[str, Any] = zero_state(root)["base_optimizer_state"]
    return state


def set_optimizer_step(step: int) -> Callable[[dict[str, Any]], None]:
    """A change that makes optimizer states those of another step."""

    def change(root: dict[str, Any]) -> None:
        base = zero_state(root).get("base_optimizer_state") or zero_state(root)["optimizer_state_dict"]
        for entry in base["state"].values():
            entry["step"].fill_(step)

    return change
