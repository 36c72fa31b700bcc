"""Checkpoints in which something is not as DeepSpeed writes it: an error that explains itself, or weights.

Every file of every layout gets a bomb, random values in random places of its structure, and flipped bytes.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_toolkit.checkpoint.layout import find_tag_folder, shard_files
from ds_toolkit.checkpoint.tensors import CheckpointMap
from ds_toolkit.checkpoint.weights import read_weights
from ds_toolkit.convert.consolidate import consolidate
from ds_toolkit.errors import ToolkitError

NUM_CHANGES = 60
JUNK: tuple[Any, ...] = (
    None,
    -1,
    0,
    2**63,
    1.5,
    "text",
    b"bytes",
    [],
    {},
    (),
    [[]],
    {"weight": "text"},
    {1: 2},
    (3, -1),
    (2**40, 2**40),
    True,
    torch.zeros(0),
    torch.zeros(3, 3),
    torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    {"weight": torch.zeros(2)},
    [torch.zeros(2)],
)


class Bomb:
    """Leaves a file where it went off."""

    def __init__(self, crater: Path, call: Any = os.system) -> None:
        self.crater, self.call = crater, call

    def __reduce__(self) -> Any:
        if self.call is os.system:
            return os.system, (f"touch {self.crater}",)
        if self.call is exec:
            return exec, (f"open({str(self.crater)!r}, 'w').close()",)
        # Nested: what is called is itself the result of a call.
        return getattr, (Bomb(self.crater), "__class__")


@pytest.fixture(params=["zoo", "layouts_zoo"])
def any_zoo(request: pytest.FixtureRequest) -> Path:
    """Every folder of real checkpoints in turn."""
    folder: Path = request.getfixturevalue(request.param)
    return folder


def case_names(zoo: Path) -> list[str]:
    return sorted(folder.name for folder in zoo.iterdir() if (folder / "checkpoints").is_dir())


def smallest_of_each_kind(zoo: Path) -> Iterator[tuple[str, str]]:
    """A case and a file in it for every kind of file in every layout, one data-parallel rank each."""
    for case in case_names(zoo):
        kinds = set()
        for file in shard_files(find_tag_folder(zoo / case / "checkpoints")):
            kind = (file.kind, file.mp_rank)
            if kind not in kinds:
                kinds.add(kind)
                yield case, file.path.name


def everything(weights: CheckpointMap) -> dict[str, list[bytes]]:
    return {
        tensor.name: [
            place.path.read_bytes()[place.offset_bytes : place.offset_bytes + place.num_bytes]
            for place in tensor.slices
        ]
        for tensor in weights.tensors.values()
    }


@pytest.mark.parametrize("call", [os.system, exec, getattr], ids=["system", "exec", "nested"])
def test_bombs_in_every_kind_of_file_do_nothing(any_zoo: Path, tmp_path: Path, call: Any) -> None:
    crater = tmp_path / "crater"
    seen = 0
    for case, name in smallest_of_each_kind(any_zoo):
        folder = find_tag_folder(any_zoo / case / "checkpoints")
        truth = everything(read_weights(folder))
        copy = Path(shutil.copytree(folder, tmp_path / "copy"))
        root = torch.load(copy / name, weights_only=False)
        # Layers without weights have empty files.
        first = next(iter(root), "none._extra_state")
        torch.save({"bomb._extra_state": Bomb(crater, call), **root, first: root.get(first)}, copy / name)
        assert everything(read_weights(copy)) == truth, (case, name)
        shutil.rmtree(copy)
        seen += 1
    assert seen >= 2 * len(case_names(any_zoo)) - 4
    assert not crater.exists()
    # That they go off elsewhere.
    torch.save(Bomb(crater, call), tmp_path / "bomb.pt")
    code = f"import torch; torch.load({str(tmp_path / 'bomb.pt')!r}, weights_only=False)"
    subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=120)
    assert crater.exists()


def places_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a structure, as keys and indices."""
    if path:
        yield path
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in list(items)[:12]:
            if key != "ds_config":
                yield from places_of(inner, (*path, key))


def changed(root: Any, path: tuple[Any, ...], chosen: random.Random) -> None:
    for key in path[:-1]:
        root = root[key]
    if chosen.random() < 0.2 and isinstance(root, dict):
        del root[path[-1]]
    else:
        root[path[-1]] = chosen.choice(JUNK)


@pytest.mark.parametrize("seed", range(4))
def test_anything_in_any_place_is_an_error_that_explains_itself(
    any_zoo: Path, tmp_path: Path, seed: int
) -> None:
    chosen = random.Random(seed)
    files = list(smallest_of_each_kind(any_zoo))
    num_errors = 0
    for number in range(NUM_CHANGES):
        case, name = chosen.choice(files)
        folder = tmp_path / str(number)
        shutil.copytree(find_tag_folder(any_zoo / case / "checkpoints"), folder)
        root = torch.load(folder / name, weights_only=False)
        place = chosen.choice(list(places_of(root)))
        changed(root, place, chosen)
        torch.save(root, folder / name)
        try:
            consolidate(folder, tmp_path / "model.safetensors", force=True)
        except ToolkitError as error:
            num_errors += 1
            assert str(error)
        except Exception as error:
            raise AssertionError((case, name, place)) from error
        shutil.rmtree(folder)
    assert num_errors > NUM_CHANGES // 10


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes_are_noticed_or_do_not_matter(any_zoo: Path, tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    files = list(smallest_of_each_kind(any_zoo))
    num_errors = 0
    for number in range(NUM_CHANGES):
        case, name = chosen.choice(files)
        original = find_tag_folder(any_zoo / case / "checkpoints")
        folder = Path(shutil.copytree(original, tmp_path / str(number)))
        data = bytearray((folder / name).read_bytes())
        for _ in range(chosen.randint(1, 4)):
            data[chosen.randrange(len(data))] = chosen.randrange(256)
        (folder / name).write_bytes(data)
        try:
            consolidate(folder, tmp_path / "model.safetensors", force=True)
        except ToolkitError:
            num_errors += 1
        else:
            # Only torch's old format has no checksums that would notice.
            if "oldformat" in case:
                continue
            consolidate(original, tmp_path / "truth.safetensors", force=True)
            written = [(tmp_path / stem).read_bytes() for stem in ("model.safetensors", "truth.safetensors")]
            assert written[0] == written[1], (case, name)
        shutil.rmtree(folder)
    assert num_errors > NUM_CHANGES // 10
