"""Which tensors go into the output, and what is said where that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from ds_toolkit import ToolkitError, consolidate, open_checkpoint
from ds_toolkit.checkpoint.layout import find_tag_folder
from ds_toolkit.checkpoint.weights import read_weights
from ds_toolkit.convert.consolidate import Consolidated
from ds_toolkit.convert.selection import Choice, select

FROZEN = {"frozen.weight", "frozen.bias"}


@pytest.fixture
def checkpoint(zoo: Path) -> Path:
    return zoo / "stage2-fp32-2ranks" / "checkpoints"


def written(checkpoint: Path, out: Path, **options: object) -> tuple[dict[str, torch.Tensor], Consolidated]:
    done = consolidate(checkpoint, out, force=True, **options)  # type: ignore[arg-type]
    return torch.load(out, weights_only=True), done


def refused(checkpoint: Path, out: Path, **options: object) -> ToolkitError:
    with pytest.raises(ToolkitError) as caught:
        consolidate(checkpoint, out, **options)  # type: ignore[arg-type]
    assert not out.exists()
    return caught.value


def assert_true(found: dict[str, torch.Tensor], case: Path, names: set[str]) -> None:
    truth = torch.load(case / "truth.pt")
    assert set(found) == names
    for name in names:
        assert torch.equal(found[name], truth[name]), name


def test_globs(checkpoint: Path, tmp_path: Path) -> None:
    found, done = written(checkpoint, tmp_path / "a.bin", only=["up.*", "*.running_mean"])
    assert_true(found, checkpoint.parent, {"up.weight", "up.bias", "norm.running_mean"})
    assert (done.num_tensors, done.num_parameters) == (3, 88)
    found, _ = written(checkpoint, tmp_path / "a.bin", only="up.bias")
    assert set(found) == {"up.bias"}


def test_an_alias_alone_becomes_the_tensor(checkpoint: Path, tmp_path: Path) -> None:
    found, done = written(checkpoint, tmp_path / "a.bin", only=["head.*"])
    assert_true(found, checkpoint.parent, {"head.weight"})
    assert done.aliases == {}
    consolidate(checkpoint, tmp_path / "a.safetensors", only=["head.*"])
    assert set(safetensors.torch.load_file(tmp_path / "a.safetensors")) == {"head.weight"}


@pytest.mark.parametrize(
    ("glob", "near"), [("embeding.weight", "embedding.weight"), ("ups.*", "up.weight"), ("xyz", "scale")]
)
def test_a_glob_that_matches_nothing_names_what_is_near(
    checkpoint: Path, tmp_path: Path, glob: str, near: str
) -> None:
    error = refused(checkpoint, tmp_path / "a.bin", only=["up.*", glob])
    assert error.what == f"no tensor matches `{glob}`"
    assert near in str(error.why)


@pytest.mark.parametrize("case", ["stage1-fp32-2ranks", "stage2-fp32-2ranks", "stage3-fp32-2ranks"])
def test_frozen_weights_are_left_out(zoo: Path, tmp_path: Path, case: str) -> None:
    found, _ = written(zoo / case / "checkpoints", tmp_path / "a.bin", exclude_frozen=True)
    truth = torch.load(zoo / case / "truth.pt")
    # DeepSpeed counts a parameter without elements as frozen.
    assert_true(found, zoo / case, set(truth) - FROZEN - {"empty"})


def test_stage_0_does_not_know_what_is_frozen(zoo: Path, tmp_path: Path) -> None:
    checkpoint = zoo / "stage0-fp32-2ranks" / "checkpoints"
    error = refused(checkpoint, tmp_path / "a.bin", exclude_frozen=True)
    assert error.what == "which weights are frozen is not known"


def test_a_prefix_goes(checkpoint: Path, tmp_path: Path) -> None:
    found, done = written(
        checkpoint, tmp_path / "a.bin", strip_prefix="embedding.", only=["embedding.*", "head*"]
    )
    assert set(found) == {"weight", "head.weight"}
    assert done.aliases == {"head.weight": "weight"}
    # Globs fit the name in the checkpoint or the one in the output.
    found, _ = written(checkpoint, tmp_path / "a.bin", strip_prefix="up.", only=["weight"])
    assert set(found) == {"weight"}


def test_prefixes_that_do_not_fit(checkpoint: Path, tmp_path: Path) -> None:
    error = refused(checkpoint, tmp_path / "a.bin", strip_prefix="module.")
    assert error.what == "no name begins with `module.`"
    assert "scale" in str(error.why)
    error = refused(checkpoint, tmp_path / "a.bin", strip_prefix="scale")
    assert "scale is the prefix itself" in str(error.why)


def test_names_that_would_collide(tmp_path: Path) -> None:
    folder = tmp_path / "tag"
    folder.mkdir()
    module = {"module.a": torch.zeros(2), "a": torch.ones(2)}
    state = {"module": module, "buffer_names": [], "global_steps": 1, "dp_world_size": 1, "mp_world_size": 1}
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    error = refused(folder, tmp_path / "a.bin", strip_prefix="module.")
    assert error.what == "without `module.` a name would be `a`"
    assert error.why == "it is what module.a and a would be called"


# What was not saved.


@pytest.fixture
def base(zoo: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """All weights of some other training: none has the value that a checkpoint would have."""
    truth = torch.load(zoo / "stage2-fp32-2ranks" / "truth.pt")
    return {name: value.clone() + 1 if value.is_floating_point() else value for name, value in truth.items()}


@pytest.mark.parametrize("form", ["safetensors", "bin", "folder"])
@pytest.mark.parametrize("case", ["stage1-no-frozen", "stage2-no-frozen-tied", "stage3-no-frozen-tied"])
def test_a_base_fills_what_was_not_saved(
    zoo: Path, tmp_path: Path, base: dict[str, torch.Tensor], case: str, form: str
) -> None:
    path = tmp_path / {"safetensors": "base.safetensors", "bin": "base.bin", "folder": "base"}[form]
    if form == "safetensors":
        safetensors.torch.save_file(
            {name: value for name, value in base.items() if name != "head.weight"}, path
        )
    elif form == "bin":
        torch.save({**base, "head.weight": base["embedding.weight"]}, path)
    else:
        from huggingface_hub import save_torch_state_dict

        path.mkdir()
        tied = {**base, "head.weight": base["embedding.weight"]}
        save_torch_state_dict(tied, path, max_shard_size="0.5KB", metadata={})
    checkpoint = zoo / case / "checkpoints"
    out = tmp_path / "out.bin"
    found, done = written(checkpoint, out, base=path)
    truth = torch.load(zoo / case / "truth.pt")
    kept = set(read_weights(find_tag_folder(checkpoint)).names)
    assert set(found) == set(base) | kept
    for name, value in found.items():
        assert torch.equal(value, truth[name] if name in kept else base[name]), name
    assert done.num_from_base == len(set(found) - kept) > 0
    assert done.missing == ()
    assert done.aliases.get("head.weight", done.aliases.get("embedding.weight")) is not None
    assert not [note for note in done.notes if "frozen" in note or "missing" in note]


def test_a_base_in_other_precision_is_converted(
    zoo: Path, tmp_path: Path, base: dict[str, torch.Tensor]
) -> None:
    torch.save({"frozen.bias": base["frozen.bias"].bfloat16()}, tmp_path / "base.pt")
    checkpoint = zoo / "stage3-no-frozen-tied" / "checkpoints"
    found, done = written(checkpoint, tmp_path / "out.bin", base=tmp_path / "base.pt", dtype="fp16")
    assert torch.equal(found["frozen.bias"], base["frozen.bias"].bfloat16().half())
    # Of what is not there the tied names are known.
    assert done.missing == ("embedding.weight", "head.weight")


def test_what_was_not_saved_is_told_as_far_as_it_is_known(zoo: Path, tmp_path: Path) -> None:
    told = {}
    for case in ("stage1-no-frozen", "stage2-no-frozen-tied", "stage3-no-frozen-tied", "stage3-fp32-2ranks"):
        _, done = written(zoo / case / "checkpoints", tmp_path / "out.bin")
        told[case] = (any("saved without frozen weights" in note for note in done.notes), done.missing)
    assert told == {
        "stage1-no-frozen": (False, ()),
        "stage2-no-frozen-tied": (True, ()),
        "stage3-no-frozen-tied": (True, ("embedding.weight", "head.weight")),
        "stage3-fp32-2ranks": (False, ()),
    }


def test_of_tied_frozen_weights_stage_2_saves_one_name(zoo: Path, tmp_path: Path) -> None:
    # DeepSpeed removes the name that `named_parameters` gives; the other one stays, and its data.
    found, done = written(zoo / "stage2-no-frozen-tied" / "checkpoints", tmp_path / "out.bin")
    truth = torch.load(zoo / "stage2-no-frozen-tied" / "truth.pt")
    assert torch.equal(found["embedding.weight"], truth["embedding.weight"])
    assert done.aliases == {"embedding.weight": "head.weight"}


def test_names_tied_in_the_base_follow_the_trained_one(zoo: Path) -> None:
    from ds_toolkit.checkpoint.tensors import Role
    from ds_toolkit.convert.weight_files import WeightFiles

    weights = read_weights(find_tag_folder(zoo / "stage2-fp32-2ranks" / "checkpoints"))
    old = weights.tensors["frozen.weight"]
    base = WeightFiles({"lm": old}, {"up.weight": "lm"}, ("lm", "up.weight"))
    selected = select(weights, Choice(), base)
    assert selected.tensors["up.weight"].role is Role.TRAINED
    assert selected.aliases["lm"] == "up.weight"
    assert selected.from_base == ("lm",)


def test_a_base_that_has_nothing_to_give(checkpoint: Path, tmp_path: Path) -> None:
    torch.save({"up.bias": torch.zeros(11)}, tmp_path / "base.bin")
    found, done = written(checkpoint, tmp_path / "out.bin", base=tmp_path / "base.bin")
    assert_true(found, checkpoint.parent, set(found))
    assert done.notes == ("the base held nothing that the checkpoint lacks",)
    assert (
        "left out and taken"
        in refused(checkpoint, tmp_path / "b.bin", base=tmp_path / "base.bin", exclude_frozen=True).what
    )


def test_a_damaged_base_is_found(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "base.bin"
    torch.save({"more": torch.arange(1000.0)}, path)
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(500.0, 510.0).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    error = refused(checkpoint, tmp_path / "out.bin", base=path)
    assert (error.what, error.where) == ("a shard has changed since it was saved", str(path))
    assert set(open_checkpoint(path)) == {"more"}
