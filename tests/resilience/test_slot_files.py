"""Files of a slot: mapped, of fixed places, and whole for torch after every change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mounts
import pytest
import torch

from ds_toolkit.errors import ToolkitError
from ds_toolkit.resilience.copying_thread import Batch, Copy, CopyingThread, batched, copy_all
from ds_toolkit.resilience.slot_files import SlotFile, bytes_of
from ds_toolkit.resilience.state_pickle import StatePickler


def copies_of(file: SlotFile, storages: Any) -> list[Batch]:
    pairs = zip(storages, file.places, strict=True)
    return batched([Copy(bytes_of(storage), place) for storage, place in pairs])


def test_a_file_is_filled_again_and_again(tmp_path: Path) -> None:
    state = {
        "weight": torch.randn(300),
        "half": torch.randn(7).bfloat16(),
        "empty": torch.empty(0),
        "step": 255,
    }
    pickler = StatePickler()
    first = pickler.pickle(state)
    file = SlotFile(tmp_path / "a.pt", [storage.nbytes() for storage in first.storages])
    for step in (255, 256, 7, 2**40):
        state["step"] = step
        state["weight"].add_(1)
        pickled = pickler.pickle(state)
        copy_all(copies_of(file, pickled.storages))
        file.write_tail(pickled.data)
        found = torch.load(tmp_path / "a.pt", weights_only=True)
        assert found["step"] == step
        assert torch.equal(found["weight"], state["weight"])
        assert torch.equal(found["half"], state["half"])
        assert found["empty"].shape == (0,)
    file.close()
    assert torch.load(tmp_path / "a.pt", weights_only=True)["step"] == 2**40


def test_a_state_without_tensors(tmp_path: Path) -> None:
    file = SlotFile(tmp_path / "a.pt", [])
    file.write_tail(StatePickler().pickle({"step": 3}).data)
    assert torch.load(tmp_path / "a.pt", weights_only=True) == {"step": 3}


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of one megabyte."""
    with mounts.tmpfs(tmp_path / "small", "1m") as place:
        yield place


def test_too_little_room_is_told_before_anything_is_copied(small_memory: Path) -> None:
    """And not by a SIGBUS in the middle of a copy."""
    with pytest.raises(ToolkitError, match="no room for a snapshot") as caught:
        SlotFile(small_memory / "a.pt", [2**21])
    assert "2.1 MB" in str(caught.value)
    assert "`arena`" in str(caught.value)
    assert list(small_memory.iterdir()) == []


def test_the_thread_copies_and_then_says_so() -> None:
    thread = CopyingThread()
    sources = [torch.arange(1000, dtype=torch.uint8) for _ in range(5)]
    places = [torch.zeros(1000, dtype=torch.uint8) for _ in sources]
    seen: list[bool] = []
    pairs = [Copy(source, place) for source, place in zip(sources, places, strict=True)]
    thread.start(batched(pairs), lambda: seen.append(all(map(torch.equal, sources, places))))
    assert thread.wait(10)
    assert seen == [True]
    thread.close()


def test_a_storage_that_changed_its_size_is_not_copied() -> None:
    """Its bytes behind the end are somebody else's."""
    source, place = torch.arange(1000, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    batches = batched([Copy(source, place)])
    source.untyped_storage().resize_(10)
    with pytest.raises(ToolkitError, match="changed its size"):
        copy_all(batches)
    assert not place.any()


def test_large_copies_go_in_several_batches() -> None:
    sources = [torch.empty(40 * 2**20, dtype=torch.uint8) for _ in range(3)]
    batches = batched([Copy(source, source) for source in sources])
    assert [len(batch.sources) for batch in batches] == [2, 1]


def test_a_failure_is_told_to_the_one_who_waits_and_the_thread_goes_on() -> None:
    thread = CopyingThread()

    def fail() -> None:
        raise OSError(28, "No space left on device")

    thread.start([], fail)
    with pytest.raises(OSError, match="No space left"):
        thread.wait(10)
    assert thread.wait(10), "it is told once"
    done: list[int] = []
    thread.start([], lambda: done.append(1))
    assert thread.wait(10)
    assert done == [1]
    thread.close()
