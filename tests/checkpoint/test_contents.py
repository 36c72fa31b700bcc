"""Reading all data: every floating type, and files of more pieces than one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from checkpoint_damage import MODEL, RANK_1, TAG, copied, flip, write_manifest

from ds_toolkit.checkpoint.dtypes import DTYPES
from ds_toolkit.checkpoint.examination import verify
from ds_toolkit.checkpoint.examining import contents
from ds_toolkit.checkpoint.examining.contents import read_contents
from ds_toolkit.checkpoint.examining.coverage import coverage_problems
from ds_toolkit.checkpoint.examining.examined import examine
from ds_toolkit.checkpoint.examining.named_ranges import named_ranges
from ds_toolkit.checkpoint.examining.values import can_be_counted, count_not_finite
from ds_toolkit.checkpoint.shards import Slice
from ds_toolkit.checkpoint.tensors import CheckpointMap, Part, Role, StoredTensor, block_in_order

WITH_NAN = [name for name, dtype in DTYPES.items() if can_be_counted(dtype) and "complex" not in name]


@pytest.mark.parametrize("name", WITH_NAN)
def test_every_bit_pattern_counts_as_torch_says(name: str) -> None:
    dtype = DTYPES[name]
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (2**16 * dtype.size_bytes,), dtype=torch.uint8, generator=generator)
    if dtype.size_bytes <= 2:
        raw = torch.arange(256**dtype.size_bytes).to(torch.int32).view(torch.uint8).reshape(-1, 4)
        raw = raw[:, : dtype.size_bytes].contiguous().view(-1)
    else:
        # Random bits are seldom NaN, and infinite never.
        special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -math.nan], dtype=getattr(torch, name))
        raw = torch.cat([raw, special.view(torch.uint8)])
    values = raw.view(getattr(torch, name)).double()
    expected = int(values.isnan().sum()), int(values.isinf().sum())
    assert expected[0] > 0
    assert count_not_finite(raw.numpy().tobytes(), dtype) == expected


def test_parts_of_complex_values_count_and_whole_numbers_do_not() -> None:
    values = torch.tensor([complex(math.nan, math.inf), 1j])
    assert count_not_finite(values.view(torch.uint8).numpy().tobytes(), DTYPES["complex64"]) == (1, 1)
    assert not any(can_be_counted(DTYPES[name]) for name in ("int64", "uint8", "bool"))
    assert count_not_finite(b"", DTYPES["float32"]) == (0, 0)


def write_stage0(folder: Path, module: dict[str, torch.Tensor], *, as_zip: bool = True) -> Path:
    folder.mkdir()
    state = {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "global_steps": 1,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }
    torch.save(state, folder / MODEL, _use_new_zipfile_serialization=as_zip)
    return folder


@pytest.mark.parametrize("manifest", [False, True])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_file_of_many_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manifest: bool, num_threads: int
) -> None:
    monkeypatch.setattr(contents, "PIECE_BYTES", 256)
    weight = torch.zeros(10_000)
    # The first and the last element, and both sides of the border of two pieces, wherever it is.
    for index in (0, *range(500, 700), 9_999):
        weight[index] = math.nan
    half = torch.full((333,), math.inf, dtype=torch.bfloat16)
    folder = write_stage0(tmp_path / "tag", {"a": weight, "b": torch.ones(77), "half": half})
    if manifest:
        write_manifest(folder, step=1)
    found = read_contents(examine(folder), num_threads=num_threads)
    assert (found.changed, found.unreadable, found.differing) == ({}, {}, {})
    assert {(one.range_.name, one.num_nan, one.num_infinite) for one in found.not_finite} == {
        ("a", 202, 0),
        ("half", 0, 333),
    }
    path = folder / MODEL
    flip(path, path.read_bytes().index(torch.ones(3).numpy().tobytes()) + 40)
    (changed,) = read_contents(examine(folder), num_threads=num_threads).changed.values()
    assert f"{path.stem}/data/1" in changed


@pytest.mark.parametrize("manifest", [False, True])
@pytest.mark.parametrize("name_bytes", range(1, 5))
def test_the_old_format_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name_bytes: int, manifest: bool
) -> None:
    monkeypatch.setattr(contents, "PIECE_BYTES", 256)
    weight = torch.zeros(10_000)
    for index in (0, *range(500, 700), 9_999):
        weight[index] = math.nan
    # Nothing is aligned there: the length of a name shifts every byte behind it.
    module = {"a" * name_bytes: weight, "double": torch.full((99,), math.inf, dtype=torch.float64)}
    folder = write_stage0(tmp_path / "tag", module, as_zip=False)
    if manifest:
        write_manifest(folder, step=1)
    found = read_contents(examine(folder))
    assert (found.changed, found.unreadable, found.differing) == ({}, {}, {})
    assert {(one.range_.name, one.num_nan, one.num_infinite) for one in found.not_finite} == {
        ("a" * name_bytes, 202, 0),
        ("double", 0, 99),
    }


def test_what_torch_wrote_without_a_crc_is_not_compared(tmp_path: Path) -> None:
    from torch.serialization import set_crc32_options

    set_crc32_options(False)
    try:
        folder = write_stage0(tmp_path / "tag", {"a": torch.ones(100)})
    finally:
        set_crc32_options(True)
    assert verify(folder, deep=True).findings == []


def test_an_unreadable_file_is_named(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(zoo, "stage1-fp32-2ranks", tmp_path / "checkpoints")
    tag = examine(folder)
    # It is cut after its structure was read.
    (folder / RANK_1).write_bytes((folder / RANK_1).read_bytes()[:1000])
    found = read_contents(tag)
    assert list(found.unreadable | found.changed) == [folder / RANK_1]


@pytest.mark.parametrize("case", ["stage1-fp32-2ranks", "stage2-bf16-3ranks", "stage3-subgroups"])
def test_every_weight_and_both_moments_have_their_names(zoo: Path, case: str) -> None:
    tag = examine(zoo / case / "checkpoints" / TAG)
    sizes: dict[tuple[str, str], int] = {}
    for path, ranges in named_ranges(tag).items():
        ends = [0]
        for range_ in ranges:
            assert range_.begin >= ends[-1]
            assert range_.end <= path.stat().st_size
            ends.append(range_.end)
            if "optim" in path.name:
                key = range_.name, range_.what
                num_elements = (range_.end - range_.begin) // range_.dtype.size_bytes
                sizes[key] = sizes.get(key, 0) + num_elements
    assert isinstance(tag.weights, CheckpointMap)
    for tensor in tag.weights.tensors.values():
        if tensor.role is Role.TRAINED and tensor.num_elements:
            for what in ("weight", "exp_avg", "exp_avg_sq"):
                assert sizes[tensor.name, what] == tensor.num_elements


def stored(name: str, *parts: Part) -> StoredTensor:
    return StoredTensor(name, (4, 3), DTYPES["float32"], parts, Role.TRAINED)


def test_tensors_that_are_not_covered_once(zoo: Path) -> None:
    tag = examine(zoo / "stage1-fp32-2ranks" / "checkpoints" / TAG)
    weights = tag.weights
    assert isinstance(weights, CheckpointMap)
    assert list(coverage_problems(tag, weights)) == []
    path = tag.folder / RANK_1

    def problems(*tensors: StoredTensor) -> list[str]:
        tag.cells[0].tensors.update({tensor.name: tensor for tensor in tensors})  # type: ignore[attr-defined]
        changed = {**weights.tensors, **{tensor.name: tensor for tensor in tensors}}
        found = [
            message
            for _, message in coverage_problems(tag, CheckpointMap(**{**vars(weights), "tensors": changed}))
        ]
        for tensor in tensors:
            tag.cells[0].tensors.pop(tensor.name)  # type: ignore[attr-defined]
        return found

    up = weights.tensors["up.weight"].slices[-1]
    same = stored("same", Part((Slice(up.path, up.offset_bytes, 48),)))
    assert problems(same) == ["up.weight and same are said to lie in the same bytes"]
    beyond = stored("beyond", Part((Slice(path.with_name(MODEL), 10**6, 48),)))
    assert problems(beyond) == [
        f"beyond reaches to byte 1,000,048 of a file of {(tag.folder / MODEL).stat().st_size:,}"
    ]
    model = Slice(tag.folder / MODEL, 640, 24)
    half = block_in_order((2, 3), 0, (3, 1), 0, (3, 1))
    assert problems(stored("short", Part((model,)))) == ["short has 12 elements, and 6 are there"]
    twice = stored("twice", Part((model,), (half,)), Part((model,), (half,)))
    assert problems(twice) == ["elements of twice are there twice, or have no place in it"]
