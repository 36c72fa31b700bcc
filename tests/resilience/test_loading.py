"""`ds_toolkit.load`: what comes of files that torch wrote, and of those that it did not."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_toolkit
from ds_toolkit import ToolkitError
from ds_toolkit.resilience import loading


@pytest.fixture
def file(tmp_path: Path) -> Path:
    state = OrderedDict(weight=torch.arange(6.0), bias=torch.zeros(2))
    path = tmp_path / "init.pt"
    torch.save({"model": state, "steps": [torch.ones(3)], "epoch": 4}, path)
    return path


def mapped_files() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}


def test_the_file_is_mapped_and_not_read(file: Path) -> None:
    loaded = ds_toolkit.load(file)
    assert str(file) in mapped_files()
    assert loaded["epoch"] == 4
    assert torch.equal(loaded["model"]["weight"], torch.arange(6.0))
    assert loaded["model"]["weight"].device.type == "cpu"
    # A change stays in this process.
    loaded["model"]["weight"].zero_()
    assert torch.equal(ds_toolkit.load(file)["model"]["weight"], torch.arange(6.0))


def test_what_is_asked_for_goes_to_the_device(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No second device here: one that holds no values stands for it.
    monkeypatch.setattr(loading, "rank_device", lambda: torch.device("meta"))
    loaded = ds_toolkit.load(file, to_device=["model"])
    assert type(loaded["model"]) is OrderedDict
    assert {tensor.device.type for tensor in loaded["model"].values()} == {"meta"}
    assert loaded["steps"][0].device.type == "cpu"
    assert ds_toolkit.load(file, to_device="steps")["steps"][0].device.type == "meta"
    everything = ds_toolkit.load(file, to_device=True)
    assert (everything["model"]["bias"].device.type, everything["steps"][0].device.type) == ("meta", "meta")
    assert everything["epoch"] == 4
    with pytest.raises(ToolkitError, match="the file has model, steps, epoch"):
        ds_toolkit.load(file, to_device=["optimizer"])


def test_the_device_of_a_rank_on_a_cpu() -> None:
    assert loading.rank_device() == torch.device("cpu")


class Accelerator:
    """One with four devices, of which none was chosen."""

    def __init__(self, chosen: int) -> None:
        self.chosen = chosen

    def device_name(self, index: int | None = None) -> str:
        return "cuda" if index is None else f"cuda:{index}"

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return self.chosen

    def device_count(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("chosen", "local_rank", "index"), [(0, "3", 3), (2, "3", 2), (0, None, 0), (0, "5", 1)]
)
def test_the_device_of_a_rank_is_not_that_of_rank_0(
    chosen: int, local_rank: str | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "get_accelerator", lambda: Accelerator(chosen))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert loading.rank_device() == torch.device("cuda", index)


def test_a_file_of_the_old_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({"weight": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(ds_toolkit.load(path)["weight"], torch.ones(2))


class Custom:
    pass


def test_code_is_refused_until_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "custom.pt"
    torch.save({"object": Custom()}, path)
    with pytest.raises(ToolkitError, match="weights_only=False runs the code"):
        ds_toolkit.load(path)
    loaded: Any = ds_toolkit.load(path, weights_only=False)
    assert type(loaded["object"]).__name__ == "Custom"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"", "none that torch.save wrote"),
        (b"PK\x03\x04 and no more", "none that torch.save"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_line(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "broken.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ToolkitError, match=says):
        ds_toolkit.load(path)


def test_a_damaged_file_is_told_in_a_line(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(ToolkitError, match="damaged"):
        ds_toolkit.load(file)
