"""Whether DeepSpeed's own zero_to_fp32 makes the same weights of a checkpoint.

It runs in a process of its own, for it unpickles the shards, which executes what is in them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_toolkit.checkpoint.tensors import CheckpointMap
from ds_toolkit.convert.selection import Selected
from ds_toolkit.convert.targets import Target

_TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# What convert_zero_checkpoint_to_state_dict does (deepspeed/utils/zero_to_fp32.py), with a comparison where
# it saves. One tensor at a time is put together (stage 3) and converted; below, DeepSpeed holds them all.
_SCRIPT = """
import json, sys
import torch
from ds_toolkit.convert.opening import open_checkpoint
asked = json.load(open(sys.argv[1]))
known = set(asked["known"])
told = {"equal": [], "different": {}, "lost": [], "seen": [], "unreadable": None}
try:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    theirs = get_fp32_state_dict_from_zero_checkpoint(asked["directory"], asked["tag"], lazy_mode=True)
except Exception as error:
    told["unreadable"] = f"{type(error).__name__}: {error}"
    theirs = {}
ours = open_checkpoint(asked["output"])
for name in list(theirs):
    if name not in known:
        told["lost"].append(name)
    if name not in asked["names"]:
        continue
    told["seen"].append(name)
    mine, full = ours[asked["names"][name]], theirs.pop(name).contiguous()
    if full.is_floating_point() and full.dtype != mine.dtype:
        full = full.to(getattr(torch, asked["dtype"]))
    if (mine.dtype, mine.shape) != (full.dtype, full.shape):
        here, there = (f"{list(one.shape)} of {one.dtype}" for one in (mine, full))
        told["different"][name] = f"{here} here, {there} there"
        continue
    mine, full = mine.reshape(-1), full.reshape(-1)
    count = 0
    if not torch.equal(mine.view(torch.uint8), full.view(torch.uint8)):
        # Any NaN is as good as another.
        count = int(((mine != full) & ~((mine != mine) & (full != full))).sum())
    if count:
        told["different"][name] = f"{count} of {mine.numel()} elements differ"
    else:
        told["equal"].append(name)
    del mine, full
json.dump(told, open(sys.argv[2], "w"))
"""


@dataclass(frozen=True)
class Comparison:
    """The output beside what DeepSpeed's zero_to_fp32 reads.

    Attributes:
        num_equal: names with the same values, shape and dtype.
        different: what differs, by the checkpoint's name; a real difference.
        lost: names that zero_to_fp32 finds and the toolkit does not; a real difference.
        left_out: names that are in the output and that zero_to_fp32 leaves out.
        unreadable: why zero_to_fp32 cannot read the checkpoint, if so.
    """

    num_equal: int
    different: Mapping[str, str]
    lost: tuple[str, ...]
    left_out: tuple[str, ...]
    unreadable: str | None

    @property
    def agrees(self) -> bool:
        """Whether nothing speaks against the output."""
        return not self.different and not self.lost


def compare_with_upstream(
    tag_folder: Path, target: Target, selected: Selected, weights: CheckpointMap, dtype: str
) -> Comparison:
    """Read the checkpoint with DeepSpeed in another process and compare it with the output, tensor by tensor.

    What came from a base, or was not selected, is not compared.
    """
    folder = tag_folder.resolve()
    names = {source: name for name, source in selected.sources.items()}
    asked = {
        "directory": os.fspath(folder.parent),
        "tag": folder.name,
        "output": os.fspath(_written(target)),
        "dtype": _TORCH_DTYPES[dtype],
        "names": names,
        "known": list(weights.names),
    }
    told = _run(asked)
    seen = set(told["seen"])
    return Comparison(
        num_equal=len(told["equal"]),
        different=told["different"],
        lost=tuple(told["lost"]),
        left_out=() if told["unreadable"] else tuple(name for name in names if name not in seen),
        unreadable=told["unreadable"],
    )


def _written(target: Target) -> Path:
    """The file that names all tensors of the output: a folder may hold other weights, or a checkpoint."""
    path = target.path.resolve()
    if not target.is_folder:
        return path
    index = path / target.format.index
    return index if index.exists() else path / target.format.single


def _run(asked: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder, "asked.json"), Path(folder, "told.json")
        question.write_text(json.dumps(asked))
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, question, answer],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            check=False,
        )
        if answer.exists():
            told: dict[str, Any] = json.loads(answer.read_text())
            return told
    last_line = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
    how = f"it was ended by signal {-done.returncode}" if done.returncode < 0 else last_line
    return {"equal": [], "different": {}, "lost": [], "seen": [], "unreadable": how}
