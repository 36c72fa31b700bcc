"""`ds_toolkit.load`: `torch.load` with what every rank of a run wants as its defaults."""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_toolkit.errors import ToolkitError

_EVERYTHING = True


def load(
    path: str | os.PathLike[str],
    *,
    to_device: bool | Collection[str] = (),
    map_location: Any = "cpu",
    mmap: bool = True,
    weights_only: bool = True,
) -> Any:
    """What `torch.save` wrote, without a copy for every rank and without running code of the file.

    `torch.load` puts tensors back where they were saved: on every rank on GPU 0. Here they stay in host
    memory, mapped from the file, which ranks of one node then share; nothing is read before it is used.

    Args:
        path: of the file.
        to_device: what goes to this rank's device: names of the top level of a dict (`["model"]`), True for
            all of it, nothing by default.
        map_location: as `torch.load` takes it.
        mmap: map the file; files in the format before torch 1.6 are read instead.
        weights_only: refuse whatever is not tensors and plain containers.

    Raises:
        ToolkitError: the file cannot be read, has what `weights_only` refuses, or has no such name.
    """
    path = Path(path)
    loaded = _read(path, map_location, mmap, weights_only)
    if to_device is _EVERYTHING:
        return _moved(loaded, rank_device())
    if not to_device:
        return loaded
    names = [to_device] if isinstance(to_device, str) else list(to_device)  # type: ignore[arg-type]
    missing = [name for name in names if not isinstance(loaded, Mapping) or name not in loaded]
    if missing:
        known = (
            ", ".join(map(str, list(loaded)[:10])) if isinstance(loaded, Mapping) else type(loaded).__name__
        )
        raise ToolkitError(
            f"there is no `{missing[0]}` to be moved to the device",
            where=path,
            why=f"the file has {known}",
            fix="give names of the top level, or True for all of it",
        )
    for name in names:
        loaded[name] = _moved(loaded[name], rank_device())
    return loaded


def rank_device() -> torch.device:
    """This rank's device, also before anything has chosen it: then the launcher's `LOCAL_RANK` does."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu" or not accelerator.is_available():
        return torch.device("cpu")
    index = int(accelerator.current_device())
    if index == 0:
        index = int(os.environ.get("LOCAL_RANK", "0")) % max(1, int(accelerator.device_count()))
    return torch.device(accelerator.device_name(index))


def _read(path: Path, map_location: Any, mmap: bool, weights_only: bool) -> Any:
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        return torch.load(path, map_location=map_location, mmap=mmap and is_zip, weights_only=weights_only)
    except OSError as error:
        raise ToolkitError("the file cannot be read", where=path, why=error.strerror or str(error)) from error
    except pickle.UnpicklingError as error:
        fix = "weights_only=False runs the code of the file: only if you trust where it comes from"
        why = str(error).strip().partition("\n")[0]
        raise ToolkitError("the file has more than tensors", where=path, why=why, fix=fix) from error
    except (RuntimeError, EOFError) as error:
        why = str(error).strip().partition("\n")[0]
        raise ToolkitError(
            "the file is none that torch.save wrote, or is damaged", where=path, why=why
        ) from error


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        # In place: an OrderedDict with attributes, such as a state_dict, stays what it is.
        for key in value:
            value[key] = _moved(value[key], device)
        return value
    if isinstance(value, list):
        return [_moved(entry, device) for entry in value]
    if type(value) is tuple:
        return tuple(_moved(entry, device) for entry in value)
    return value
