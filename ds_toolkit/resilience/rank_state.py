"""What a bit-exact resume needs and DeepSpeed does not save: random states, own buffers, tracked objects.

Each rank keeps its own in `ds_toolkit_rank_00000.pt` of the tag, a file that loads with `weights_only=True`.
"""

from __future__ import annotations

import random
import secrets
import sys
import time
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

from ds_toolkit.errors import ToolkitError
from ds_toolkit.resilience.writing import written

# Tells the states of this process from those of any other.
_PROCESS = secrets.token_hex(8)
# What the guards of this process have put back last, by their engines.
_restored: weakref.WeakKeyDictionary[Any, Mapping[str, Any]] = weakref.WeakKeyDictionary()
_PLAIN = {bool, int, float, complex, str, bytes, bytearray, type(None), torch.dtype, torch.device, torch.Size}


class Stateful(Protocol):
    """Anything that can hand out its state and take it back: samplers, loaders, schedulers, averages."""

    def state_dict(self) -> Any:
        """Its state, made of tensors, numpy arrays, numbers, strings and containers of these."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Continue from a state that `state_dict` gave."""


def rank_state_name(rank: int) -> str:
    """File name of a rank's state inside a tag."""
    return f"ds_toolkit_rank_{rank:05d}.pt"


def random_states() -> dict[str, Any]:
    """States of every random number generator that training commonly draws from.

    Python's, numpy's if it is imported, torch's, the accelerator's, and those DeepSpeed keeps for
    activation checkpointing under tensor parallelism.
    """
    states: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "accelerator": get_accelerator().get_rng_state(),
        "activation_checkpointing": dict(get_cuda_rng_tracker().get_states()),
        "process": _PROCESS,
        "taken_ns": time.monotonic_ns(),
    }
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def restore_newest_random_states(engine: Any, states: Mapping[str, Any]) -> None:
    """Put back the states that came with an engine, or later ones of the same process.

    All engines of a process draw from the same generators. Of two that are trained in turn and are resumed
    one after the other, one may have died a step ahead: the states at the later of both steps count.
    """
    _restored[engine] = states
    of_one_process = [
        known for known in _restored.values() if known.get("process") == states.get("process", "unknown")
    ]
    restore_random_states(max(of_one_process, key=lambda known: int(known["taken_ns"]), default=states))


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Put back what `random_states` gave; numpy's is put back if it was saved, imported by now or not."""
    random.setstate(states["python"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    get_accelerator().set_rng_state(states["accelerator"])
    if states["activation_checkpointing"]:
        get_cuda_rng_tracker().set_states(states["activation_checkpointing"])


def check_trackable(name: str, tracked: Stateful) -> None:
    """Refuse what cannot be saved and restored, before it is missed.

    Raises:
        ToolkitError: it lacks a method, or its state could not be loaded safely.
    """
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(tracked, method, None)):
            raise ToolkitError(
                f"`{name}` cannot be tracked", why=f"a {type(tracked).__name__} has no {method}()"
            )
    tracked_states({name: tracked})


def tracked_states(tracked: Mapping[str, Stateful]) -> dict[str, Any]:
    """The state of every tracked object.

    Raises:
        ToolkitError: a state holds something that could only be loaded by executing code.
    """
    states = {}
    for name, tracked_object in tracked.items():
        state = tracked_object.state_dict()
        _check_plain(state, name)
        states[name] = state
    return states


def buffer_digests(engine: Any) -> dict[str, int]:
    """CRC-32 of every persistent buffer of this rank, by name.

    Empty at ZeRO stage 3, where each rank has a model file of its own.
    """
    if engine.zero_optimization_partition_weights():
        return {}
    return {name: _digest(buffer) for name, buffer in persistent_buffers(engine.module).items()}


def own_buffers(
    engine: Any, digests: Mapping[str, int], saved_digests: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """The buffers of this rank that differ from those in the model file, by name.

    Below stage 3 DeepSpeed saves the buffers of data-parallel rank 0 alone, while BatchNorm and the like
    keep statistics of what each rank has seen.

    Args:
        engine: a DeepSpeed engine.
        digests: `buffer_digests` of this rank.
        saved_digests: the same of the rank that writes this rank's model file.
    """
    buffers = persistent_buffers(engine.module)
    return {
        name: buffers[name].detach() for name, digest in digests.items() if digest != saved_digests.get(name)
    }


def restore_buffers(engine: Any, saved: Mapping[str, torch.Tensor]) -> None:
    """Put back what `own_buffers` gave."""
    buffers = dict(engine.module.named_buffers())
    with torch.no_grad():
        for name, value in saved.items():
            buffers[name].copy_(value)


def save_rank_state(folder: Path, rank: int, state: Mapping[str, Any]) -> str:
    """Write a rank's state into a tag's folder and return the file's name."""
    name = rank_state_name(rank)
    with written(folder / name):
        torch.save(dict(state), folder / name)
    return name


def load_rank_state(folder: Path, rank: int) -> dict[str, Any] | None:
    """Read a rank's state; None if the tag has none, as when DeepSpeed alone wrote it."""
    path = folder / rank_state_name(rank)
    if not path.exists():
        return None
    with torch.serialization.safe_globals(_numpy_globals()):
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a checkpoint holds, by name."""
    persistent = {
        f"{prefix}.{name}" if prefix else name
        for prefix, submodule in module.named_modules()
        for name in submodule._buffers
        if name not in submodule._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in module.named_buffers() if name in persistent}


def _digest(buffer: torch.Tensor) -> int:
    raw = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(raw.numpy().tobytes())


def _check_plain(value: object, place: str) -> None:
    # Exactly these types: a subclass (defaultdict, a named tuple, an enum) is pickled as a call of its own.
    if isinstance(value, (dict, OrderedDict)) and type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _check_plain(key, place)
            _check_plain(item, f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple, set)) and type(value) in (list, tuple, set):
        for index, item in enumerate(value):
            _check_plain(item, f"{place}[{index}]")
    elif not (
        (type(value) in _PLAIN and not _is_huge(value))
        or isinstance(value, torch.Tensor)
        or _is_numpy_data(value)
    ):
        raise ToolkitError(
            f"the state of a tracked object holds a {type(value).__module__}.{type(value).__qualname__}",
            where=place,
            why="checkpoints hold only what can be loaded without executing code",
            fix="make its state_dict() of tensors, numpy arrays, numbers, strings, lists, tuples and dicts",
        )


def _is_huge(value: object) -> bool:
    # Integers of more than 255 bytes are pickled in a way that torch's safe loader does not read.
    return isinstance(value, int) and value.bit_length() > 2000


def _is_numpy_data(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    if type(value) is numpy.ndarray:
        return not value.dtype.hasobject and value.dtype.names is None
    return isinstance(value, (numpy.number, numpy.bool_))


def _numpy_globals() -> list[Any]:
    # The names that numpy's own pickles of arrays and scalars call; none of them runs foreign code.
    import numpy
    from numpy._core.multiarray import _reconstruct, scalar

    dtypes = {type(numpy.dtype(code)) for code in numpy.typecodes["All"] if code != "O"}
    return [_reconstruct, scalar, numpy.ndarray, numpy.dtype, *dtypes]
