"""One file out of a checkpoint, or one clear error and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import mounts
import pytest
import safetensors.torch
import torch

from ds_toolkit.convert import copying, writing
from ds_toolkit.convert.consolidate import consolidate
from ds_toolkit.errors import ToolkitError

CASES = [
    "stage0-fp32-2ranks",
    "stage0-bf16-2ranks",
    "stage1-fp32-3ranks",
    "stage1-bf16-2ranks",
    "stage2-bf16-3ranks",
    "stage3-fp32-2ranks",
    "stage3-bf16-3ranks",
    "stage3-subgroups",
]
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TMPFS_BYTES = 2 * 2**20


@pytest.fixture
def checkpoint(zoo: Path) -> Path:
    return zoo / "stage2-bf16-2ranks" / "checkpoints"


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_live_engines(zoo: Path, tmp_path: Path, case: str, suffix: str, dtype: str) -> None:
    out = tmp_path / f"model{suffix}"
    done = consolidate(zoo / case / "checkpoints", out, dtype=dtype)
    truth = torch.load(zoo / case / "truth.pt")
    if suffix == ".bin":
        found = torch.load(out, weights_only=True, mmap=True)
    else:
        found = safetensors.torch.load_file(out)
        found["head.weight"] = found["embedding.weight"]
    assert set(found) == set(truth)
    for name, expected in truth.items():
        expected = expected.to(TORCH_DTYPES[dtype]) if expected.is_floating_point() else expected
        assert found[name].dtype == expected.dtype, name
        assert torch.equal(found[name], expected), name
    assert done.num_bytes == out.stat().st_size
    weights = {name for name in truth if "weight" in name or "bias" in name or name in ("scale", "empty")}
    assert done.num_parameters == sum(truth[name].numel() for name in weights - {"head.weight"})
    assert (done.num_tensors, done.aliases) == (len(truth) - 1, {"head.weight": "embedding.weight"})
    assert (done.stage, done.step, done.tag, done.notes) == (int(case[5]), 3, "global_step3", ())
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("pp2-stage1-bf16-2ranks", "fp32"),
        ("pp2-stage0-bf16-4ranks", "bf16"),
        ("moe-ep2-stage2-bf16-4ranks", "fp32"),
        ("moe-ep2-stage0-bf16-4ranks", "fp16"),
    ],
)
def test_pipelines_and_mixtures_of_experts(
    layouts_zoo: Path, tmp_path: Path, case: str, suffix: str, dtype: str
) -> None:
    out = tmp_path / f"model{suffix}"
    done = consolidate(layouts_zoo / case / "checkpoints", out, dtype=dtype)
    found = torch.load(out, weights_only=True) if suffix == ".bin" else safetensors.torch.load_file(out)
    truth = torch.load(layouts_zoo / case / "truth.pt")
    assert set(found) == set(truth)
    for name, expected in truth.items():
        expected = expected.to(TORCH_DTYPES[dtype]) if expected.is_floating_point() else expected
        assert found[name].dtype == expected.dtype, name
        assert torch.equal(found[name], expected), name
    notes = " ".join(done.notes)
    # DeepSpeed keeps the tied weight alone equal on all stages.
    assert notes.endswith("taken: tied_modules.embedding.shift") == case.startswith("pp2")


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
@pytest.mark.parametrize("case", ["stage2-bf16-3ranks", "stage3-bf16-2ranks"])
def test_universal_checkpoints(zoo: Path, tmp_path: Path, case: str, suffix: str) -> None:
    outputs = [tmp_path / f"{folder}{suffix}" for folder in ("checkpoints", "universal")]
    for out in outputs:
        consolidate(zoo / case / out.stem, out)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_zip_tools_accept_the_file(zoo: Path, tp_zoo: Path, tmp_path: Path) -> None:
    for case in (
        zoo / "stage2-bf16-2ranks",
        # A buffer that does not lie in row-major order, and tensors of two ranks' interleaved parts.
        zoo / "stage0-odd-fp32",
        tp_zoo / "tp2-stage0-fp32",
    ):
        out = tmp_path / f"{case.name}.pth"
        consolidate(case / "checkpoints", out)
        done = subprocess.run(
            [sys.executable, "-m", "zipfile", "-t", out],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout.strip()) == (0, "Done testing")


def test_the_same_names_as_upstream(checkpoint: Path, tmp_path: Path) -> None:
    consolidate(checkpoint, tmp_path / "model.bin")
    upstream = torch.load(checkpoint.parent / "upstream.pt")
    assert set(torch.load(tmp_path / "model.bin", weights_only=True)) == set(upstream)


def test_safetensors_need_no_torch(checkpoint: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from ds_toolkit.convert.consolidate import consolidate;"
        "consolidate(sys.argv[1], sys.argv[2]); assert not {'torch', 'deepspeed'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, str(checkpoint), str(tmp_path / "model.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def refused(checkpoint: Path, place: Path | str, **options: object) -> ToolkitError:
    out = Path(place)
    before = sorted(out.parent.iterdir()) if out.parent.is_dir() else None
    with pytest.raises(ToolkitError) as caught:
        consolidate(checkpoint, place, **options)  # type: ignore[arg-type]
    assert (sorted(out.parent.iterdir()) if out.parent.is_dir() else None) == before
    return caught.value


def test_outputs_that_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "there.bin").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model-00001-of-00002.safetensors").write_text("precious")
    for name, what in (
        ("there.bin", "the output exists"),
        ("folder", "the output's folder holds weights already"),
        ("there.bin/", "the output is a file, and its name ends in a slash"),
        ("missing/model.bin", "the output's folder does not exist"),
        ("model.gguf", "its name ends in `.gguf`"),
        ("model", "its name has no ending"),
    ):
        assert what in refused(checkpoint, f"{tmp_path}/{name}").what
    assert (tmp_path / "there.bin").read_text() == "precious"


def test_an_output_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "there.bin").touch()
    assert refused(tmp_path / "nowhere", tmp_path / "there.bin").what == "the output exists"


def test_a_dtype_that_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    assert "`int8` is no output dtype" in refused(checkpoint, tmp_path / "model.bin", dtype="int8").what


def test_force_replaces(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("old")
    consolidate(checkpoint, tmp_path / "model.bin", force=True)
    assert zipfile.is_zipfile(tmp_path / "model.bin")
    assert [path.name for path in tmp_path.iterdir()] == ["model.bin"]


def test_a_failed_replacement_leaves_the_old_file(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.bin").write_text("old")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "copy_ranges", interrupted)
    with pytest.raises(KeyboardInterrupt):
        consolidate(checkpoint, tmp_path / "model.bin", force=True)
    assert (tmp_path / "model.bin").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model.bin"]


@pytest.mark.parametrize("out", ["model.bin", "folder/"])
def test_progress_rises_to_the_end(checkpoint: Path, tmp_path: Path, out: str) -> None:
    reported: list[tuple[int, int]] = []
    consolidate(
        checkpoint,
        f"{tmp_path}/{out}",
        max_shard_size=500,
        progress=lambda done, total: reported.append((done, total)),
    )
    done = [done for done, _ in reported]
    assert done == sorted(done)
    assert {done[-1]} == {total for _, total in reported}
    assert done[-1] > 0


# Large ones.


def write_large(folder: Path, num_elements: int, num_tensors: int = 4) -> Path:
    """A stage 2 checkpoint of two ranks whose data is a hole in its files."""
    tag = folder / "checkpoints" / "global_step1"
    tag.mkdir(parents=True)
    names = [f"layer{index}.weight" for index in range(num_tensors)]
    each = num_elements // num_tensors
    with torch.serialization.skip_data():
        model = {
            "module": {name: torch.empty(1, dtype=torch.bfloat16) for name in names},
            "param_shapes": [{name: torch.Size([each]) for name in names}],
            "buffer_names": [],
            "shared_params": {},
            "global_steps": 1,
            "dp_world_size": 2,
            "mp_world_size": 1,
        }
        torch.save(model, tag / "mp_rank_00_model_states.pt")
        for rank in range(2):
            state = {
                "zero_stage": 2,
                "partition_count": [2],
                "single_partition_of_fp32_groups": [torch.empty(num_elements // 2)],
                "group_paddings": [0],
            }
            path = tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": state}, path)
    return folder / "checkpoints"


MEASURE = """
import sys
from pathlib import Path
from ds_toolkit.convert.consolidate import consolidate
done = consolidate(sys.argv[1], sys.argv[2], dtype=sys.argv[3])
status = Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), done.memory_bytes)
"""


def peak_bytes(checkpoint: Path, out: Path, dtype: str) -> tuple[int, int]:
    """Of a process of its own; and what it had expected."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(checkpoint), str(out), dtype],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    out.unlink()
    peak_kib, expected_bytes = map(int, done.stdout.split())
    return peak_kib * 1024, expected_bytes


@pytest.mark.parametrize(
    ("suffix", "dtype"), [(".safetensors", "fp32"), (".safetensors", "bf16"), (".bin", "fp32")]
)
def test_memory_does_not_grow_with_the_model(tmp_path: Path, suffix: str, dtype: str) -> None:
    small = write_large(tmp_path / "small", 2**20)
    large = write_large(tmp_path / "large", 40 * 2**20)
    out = tmp_path / f"model{suffix}"
    (peak, expected), (peak_of_small, _) = (peak_bytes(folder, out, dtype) for folder in (large, small))
    growth = peak - peak_of_small
    assert growth < 40 * 2**20, f"{growth} bytes more for 160 MB of weights than for 4 MB"
    assert 0.3 * expected < peak < 1.3 * expected


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with mounts.tmpfs(tmp_path / "disk", str(TMPFS_BYTES)) as folder:
        yield folder


OUTPUTS = ["model.bin", "model.safetensors", "folder/", "."]


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_disk_too_small_is_noticed_before_writing(tmp_path: Path, small_disk: Path, name: str) -> None:
    checkpoint = write_large(tmp_path, 2**20)
    error = refused(checkpoint, f"{small_disk}/{name}", max_shard_size=2**20)
    assert error.where == str(small_disk)
    assert error.what == "the disk is too full for the output"
    assert error.why == "the output needs 4.2 MB, and 2.1 MB are free"


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_disk_that_fills_up_meanwhile(
    tmp_path: Path, small_disk: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is free before the copy says nothing about what is free during it.
    monkeypatch.setattr(writing, "free_space_bytes", lambda folder: 2**40)
    checkpoint = write_large(tmp_path, 2**20)
    error = refused(checkpoint, f"{small_disk}/{name}")
    assert (error.what, error.where) == ("the disk is too full for the output", str(small_disk))
    assert str(error.why).startswith("the output needs 4.2 MB, and ")
    assert copying.free_space_bytes(small_disk) == TMPFS_BYTES


def test_a_link_as_output_is_written_through(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "weights"
    target.write_text("old")
    target.chmod(0o640)
    (tmp_path / "model.safetensors").symlink_to("there/weights")
    consolidate(checkpoint, tmp_path / "model.safetensors", force=True)
    assert (tmp_path / "model.safetensors").readlink() == Path("there/weights")
    assert target.stat().st_mode & 0o777 == 0o640
    assert safetensors.torch.load_file(target)
    (tmp_path / "lost.bin").symlink_to("nowhere/weights")
    with pytest.raises(ToolkitError, match="folder does not exist"):
        consolidate(checkpoint, tmp_path / "lost.bin")


def test_a_link_into_the_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "checkpoints"
    shutil.copytree(checkpoint, copy)
    tag = (copy / "latest").read_text()
    (tmp_path / "model.bin").symlink_to(copy / tag / "model.bin")
    with pytest.raises(ToolkitError, match="inside the checkpoint"):
        consolidate(copy, tmp_path / "model.bin")
    assert not (copy / tag / "model.bin").exists()


def test_a_link_to_a_folder_stays(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "out").symlink_to("there")
    (tmp_path / "new").symlink_to("made")
    for out in ("out", "new/"):
        consolidate(checkpoint, f"{tmp_path}/{out}")
    for name in ("there", "made"):
        assert [path.name for path in (tmp_path / name).iterdir()] == ["model.safetensors"]
