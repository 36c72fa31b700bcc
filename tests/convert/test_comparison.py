"""DeepSpeed's own script as a witness: what it cannot read is said, and a real difference is found."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ds_toolkit import ToolkitError, consolidate
from ds_toolkit.checkpoint.layout import find_tag_folder
from ds_toolkit.checkpoint.weights import read_weights
from ds_toolkit.cli.app import make_app
from ds_toolkit.convert import consolidate as room
from ds_toolkit.convert.comparison import compare_with_upstream
from ds_toolkit.convert.selection import Choice, select
from ds_toolkit.convert.targets import find_target


def test_it_needs_trust(zoo: Path, tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="runs code that is in the checkpoint") as caught:
        consolidate(zoo / "stage2-bf16-2ranks" / "checkpoints", tmp_path / "model.bin", check=True)
    assert "--trust" in str(caught.value.fix)
    assert not list(tmp_path.iterdir())


def test_they_agree_whatever_is_chosen(zoo: Path, tmp_path: Path) -> None:
    options = {"dtype": "bf16", "only": ["up.*", "head.*", "positions"], "strip_prefix": "up."}
    checkpoint = zoo / "stage3-subgroups" / "checkpoints"
    done = consolidate(checkpoint, f"{tmp_path}/out/", check=True, trust=True, max_shard_size=64, **options)
    assert done.comparison is not None
    assert (done.comparison.num_equal, done.comparison.agrees) == (4, True)
    assert (done.comparison.left_out, done.comparison.unreadable) == ((), None)


@pytest.mark.parametrize("max_shard_size", ["64", "5GB"])
def test_it_compares_what_was_written(zoo: Path, tmp_path: Path, max_shard_size: str) -> None:
    # Other weights lie in the folder, and the checkpoint itself does as well.
    out = tmp_path / "out"
    shutil.copytree(zoo / "stage2-bf16-2ranks" / "checkpoints", out)
    consolidate(zoo / "stage1-bf16-otherseed" / "checkpoints", out)
    options = {"file_format": "bin", "dtype": "fp16", "max_shard_size": max_shard_size}
    done = consolidate(out, out, check=True, trust=True, **options)
    assert done.comparison is not None
    assert (done.comparison.num_equal, done.comparison.agrees) == (18, True)
    written = next(out.glob("pytorch_model*.bin"))
    state = torch.load(written, weights_only=True)
    name = next(name for name in state if state[name].is_floating_point() and state[name].numel())
    state[name].view(-1)[0] = 77
    torch.save(state, written)
    folder = find_tag_folder(out)
    weights = read_weights(folder)
    target = find_target(out, "bin", force=True)
    found = compare_with_upstream(folder, target, select(weights, Choice()), weights, "fp16")
    assert list(found.different) in ([name], [name, "head.weight"], ["head.weight", name])


def test_what_it_leaves_out_is_no_difference(zoo: Path, tmp_path: Path) -> None:
    arguments = [str(zoo / "stage1-fp32-2ranks" / "checkpoints"), str(tmp_path / "model.safetensors")]
    result = CliRunner().invoke(make_app(), ["consolidate", *arguments, "--check", "--trust"])
    assert result.exit_code == 0, result.output
    assert "15 names equal to what DeepSpeed's zero_to_fp32 reads" in result.output
    assert "which leaves out empty, frozen.weight, frozen.bias" in result.output


def test_what_it_cannot_read_is_no_difference(zoo: Path, tmp_path: Path) -> None:
    arguments = [str(zoo / "stage0-fp32-2ranks" / "checkpoints"), str(tmp_path / "model.safetensors")]
    result = CliRunner().invoke(make_app(), ["consolidate", *arguments, "--check", "--trust"])
    assert result.exit_code == 0, result.output
    assert "zero_to_fp32 cannot read this checkpoint: TypeError" in result.output


def test_real_differences_are_found(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find_tag_folder(zoo / "stage2-fp32-2ranks" / "checkpoints")
    out = tmp_path / "model.bin"
    consolidate(folder, out)
    state = torch.load(out, weights_only=True)
    with torch.no_grad():
        state["up.bias"][3] += 1e-6
        state["scale"][0] = float("nan")
    torch.save({**state, "down.bias": state["down.bias"].bfloat16(), "norm.bias": torch.zeros(2)}, out)
    weights = read_weights(folder)
    narrowed = dataclasses.replace(weights, names=tuple(name for name in weights.names if name != "mask"))
    target = dataclasses.replace(find_target(tmp_path / "new.bin", None, force=False), path=out)
    found = compare_with_upstream(folder, target, select(narrowed, Choice()), narrowed, "fp32")
    assert found.different == {
        "up.bias": "1 of 11 elements differ",
        "scale": "1 of 1 elements differ",
        "down.bias": "[7] of torch.bfloat16 here, [7] of torch.float32 there",
        "norm.bias": "[2] of torch.float32 here, [11] of torch.float32 there",
    }
    assert (found.lost, found.agrees) == (("mask",), False)
    # The command says so by its exit code.
    monkeypatch.setattr(room, "compare_with_upstream", lambda *_: found)
    arguments = ["consolidate", str(folder), str(out), "--force", "--check", "--trust"]
    result = CliRunner().invoke(make_app(), arguments)
    assert result.exit_code == 1
    assert "DIFFERS up.bias: 1 of 11 elements differ" in result.output
    assert "DIFFERS zero_to_fp32 finds names that are not here: mask" in result.output


def test_a_script_that_is_killed_is_told_of(zoo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "tag"
    folder.mkdir(parents=True)
    module = {"weight": torch.zeros(3), "deadly._extra_state": Deadly()}
    state = {"module": module, "buffer_names": [], "global_steps": 1, "dp_world_size": 1, "mp_world_size": 1}
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    done = consolidate(folder, tmp_path / "model.safetensors", check=True, trust=True)
    assert done.comparison is not None
    assert (done.comparison.unreadable, done.comparison.agrees) == ("it was ended by signal 9", True)


class Deadly:
    """What runs in the process that unpickles it."""

    def __reduce__(self) -> object:
        return (
            eval,
            (f"__import__('os').kill(__import__('os').getpid(), {int(os.environ.get('KILL', 9))})",),
        )
