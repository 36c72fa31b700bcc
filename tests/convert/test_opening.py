"""A checkpoint as a mapping: the live engine's weights, mapped where they lie in one piece, never changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ds_toolkit import ToolkitError, consolidate, open_checkpoint

CASES = ["stage0-bf16-2ranks", "stage1-fp32-3ranks", "stage2-bf16-2ranks", "stage3-bf16-3ranks"]


@pytest.mark.parametrize("case", CASES)
def test_the_weights_of_the_live_engine(zoo: Path, case: str) -> None:
    weights = open_checkpoint(zoo / case / "checkpoints")
    truth = torch.load(zoo / case / "truth.pt")
    assert set(weights) == set(truth)
    assert len(weights) == len(truth)
    assert next(iter(weights)) == "scale"
    for name, expected in truth.items():
        found = weights[name]
        assert torch.equal(found.float() if found.is_floating_point() else found, expected), name
        assert found.shape == expected.shape
    assert weights["up.weight"].dtype == torch.float32
    assert "nothing" not in weights
    with pytest.raises(KeyError):
        weights["nothing"]


class Tied(nn.Module):
    """The names and shapes of the zoo's model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 7)
        self.scale = nn.Parameter(torch.zeros(1))
        self.up = nn.Linear(7, 11)
        self.norm = nn.BatchNorm1d(11)
        self.frozen = nn.Linear(11, 5)
        self.down = nn.Linear(5, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.zeros(5, dtype=torch.int64))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))


@pytest.mark.parametrize("out", [None, "model.safetensors", "model.bin", "folder/", "folder/ bin"])
def test_a_model_loads_strictly_with_both_tied_names(zoo: Path, tmp_path: Path, out: str | None) -> None:
    case = zoo / "stage3-fp32-2ranks"
    path = case / "checkpoints"
    if out is not None:
        name, _, file_format = out.partition(" ")
        consolidate(path, f"{tmp_path}/{name}", file_format=file_format or None, max_shard_size=500)
        path = tmp_path / name
    model = Tied()
    assert model.load_state_dict(open_checkpoint(path), strict=True).missing_keys == []
    for name, expected in torch.load(case / "truth.pt").items():
        assert torch.equal(model.state_dict()[name], expected), name


def test_what_lies_in_one_piece_is_mapped_and_not_copied(zoo: Path) -> None:
    # One rank's part of stage 2 is one piece of a vector; at stage 3 every parameter is split over the ranks.
    weights = open_checkpoint(zoo / "stage2-fp32-2ranks" / "checkpoints")
    assert weights.is_mapped("positions")
    assert weights.is_mapped("scale")
    weights = open_checkpoint(zoo / "stage3-fp32-2ranks" / "checkpoints")
    assert (weights.is_mapped("positions"), weights.is_mapped("up.weight")) == (True, False)
    maps = Path("/proc/self/maps").read_text()
    assert sum("stage3-fp32-2ranks" in line for line in maps.splitlines()) == 1


def test_changes_stay_in_the_process(zoo: Path) -> None:
    folder = zoo / "stage0-fp32-2ranks" / "checkpoints"
    weights = open_checkpoint(folder)
    assert weights.is_mapped("up.weight")
    before = weights["up.weight"].clone()
    with torch.no_grad():
        weights["up.weight"].add_(1)
    assert torch.equal(weights["up.weight"], before + 1)
    assert torch.equal(open_checkpoint(folder)["up.weight"], before)


@pytest.mark.parametrize("case", ["stage0-fp32-2ranks", "stage3-fp32-2ranks"])
def test_tied_names_give_one_tensor(zoo: Path, case: str) -> None:
    weights = open_checkpoint(zoo / case / "checkpoints")
    first = weights["embedding.weight"]
    assert weights["head.weight"].data_ptr() == first.data_ptr()


def test_a_tag_is_chosen(zoo: Path, tmp_path: Path) -> None:
    folder = zoo / "stage0-fp32-2ranks" / "checkpoints"
    assert set(open_checkpoint(folder, "global_step3")) == set(open_checkpoint(folder / "global_step3"))
    with pytest.raises(ToolkitError, match="no tag `global_step4`"):
        open_checkpoint(folder, "global_step4")
    with pytest.raises(ToolkitError, match="no checkpoint in this directory"):
        open_checkpoint(tmp_path)


def test_deepspeeds_weights_go_before_those_beside_them(zoo: Path, tmp_path: Path) -> None:
    (tmp_path / "tag").symlink_to(zoo / "stage0-fp32-2ranks" / "checkpoints" / "global_step3")
    torch.save({"other": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert "up.weight" in open_checkpoint(tmp_path)
    (tmp_path / "tag").unlink()
    assert set(open_checkpoint(tmp_path)) == {"other"}
