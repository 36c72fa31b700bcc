"""Every kind of damage, done to copies of checkpoints that DeepSpeed wrote, is found under its own code."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_damage import (
    MODEL,
    RANK_1,
    TAG,
    base_state,
    copied,
    flip,
    rewrite,
    set_optimizer_step,
    write_manifest,
    zero_state,
)

import ds_toolkit
from ds_toolkit.checkpoint.examination import verify
from ds_toolkit.checkpoint.examining.summary import summarize
from ds_toolkit.checkpoint.ziparchive import read_members
from ds_toolkit.cli.catalogue import rules_of_checkpoints
from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import Finding, Severity

WHOLE = [
    "stage0-fp32-2ranks",
    "stage0-bf16-2ranks",
    "stage1-bf16-3ranks",
    "stage1-bf16optimizer",
    "stage1-no-frozen",
    "stage2-fp32-3ranks",
    "stage2-roundrobin",
    "stage2-oldformat",
    "stage3-oldformat",
    "stage3-fp32-2ranks",
    # DeepSpeed pads the last rank's parts with what its memory held: that may be NaN and is no finding.
    "stage3-bf16-3ranks",
    "stage3-subgroups",
]
STAGE_1 = "stage1-fp32-2ranks"
STAGE_3 = "stage3-fp32-2ranks"


@pytest.mark.parametrize("case", WHOLE)
def test_a_whole_checkpoint_is_clean(zoo: Path, case: str) -> None:
    result = verify(zoo / case / "checkpoints", deep=True)
    assert result.findings == []
    (tag,) = result.tags
    assert (tag.step, tag.is_whole, tag.has_manifest, tag.is_deep) == (3, True, False, True)
    assert tag.num_files == len(list(tag.folder.glob("*.pt")))


@pytest.mark.parametrize(
    "case", ["pp2-stage1-bf16-2ranks", "pp2-stage0-bf16-4ranks", "moe-ep2-stage1-fp32-4ranks"]
)
def test_pipelines_and_mixtures_of_experts_are_clean(layouts_zoo: Path, case: str) -> None:
    result = verify(layouts_zoo / case / "checkpoints", deep=True)
    assert result.findings == []
    assert result.tags[0].is_whole


@pytest.mark.parametrize("case", ["stage1-fp32-2ranks", "stage1-bf16optimizer", "stage3-bf16-2ranks"])
def test_every_file_of_a_universal_checkpoint_is_examined(zoo: Path, tmp_path: Path, case: str) -> None:
    result = verify(zoo / case / "universal", deep=True)
    assert result.findings == []
    folder = shutil.copytree(zoo / case / "universal" / TAG, tmp_path / TAG)
    assert result.tags[0].num_files == len(list(folder.rglob("*.pt")))
    weight, moment = folder / "zero/up.weight/fp32.pt", folder / "zero/up.bias/exp_avg.pt"
    cut, gone = folder / "zero/norm.bias/exp_avg_sq.pt", folder / "zero/norm.bias/fp32.pt"

    def set_nan(path: Path) -> None:
        root = torch.load(path, weights_only=False)
        values = root["param"] if isinstance(root, dict) else root
        values.detach().view(-1)[1] = math.nan
        torch.save(root, path)

    set_nan(weight)
    flip(moment, storage_offset(moment, "0"))
    found = {(one.code, one.where.file): one.message for one in verify(folder, deep=True).findings}
    assert set(found) == {("DS913", str(weight)), ("DS903", str(moment))}
    assert found["DS913", str(weight)] == "up.weight holds 1 NaN values (float32)"
    cut.write_bytes(cut.read_bytes()[:-100])
    assert [(one.code, one.where.file) for one in verify(folder).findings] == [("DS902", str(cut))]
    shutil.copy(zoo / case / "universal" / TAG / "zero/norm.bias/exp_avg_sq.pt", cut)
    gone.unlink()
    assert [(one.code, one.where.file) for one in verify(folder).findings] == [("DS905", str(gone))]


def test_parts_that_nothing_tells_how_to_join_are_no_damage(tp_zoo: Path) -> None:
    folder = tp_zoo / "megatron" / "checkpoints"
    (finding,) = verify(folder, tag="silent", deep=True).findings
    assert (finding.code, finding.severity) == ("DS911", Severity.WARNING)
    assert finding.message.endswith("parts: the checkpoint does not record how its tensors are split")
    row = summarize(folder / "silent")
    assert (row.is_whole, row.problems, row.dp_world_size, row.tp_world_size) == (None, (), 2, 2)
    assert row.notes[0].endswith("the checkpoint does not record how its tensors are split")
    assert verify(folder, tag="told", deep=True).findings == []


def storage_offset(path: Path, key: str) -> int:
    """Where the data of a storage begins in a shard."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        (member,) = (
            member for name, member in read_members(descriptor).items() if name.endswith(f"/data/{key}")
        )
    finally:
        os.close(descriptor)
    return member.data_offset


def flip_weight(path: Path) -> None:
    """The lowest bit of a weight: neither its shape nor its being a number changes."""
    keys = {"optim": "1", "model": "0"}
    flip(path, storage_offset(path, keys["optim" if "optim" in path.name else "model"]))


def set_value(places: Callable[[dict[str, Any]], torch.Tensor], value: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        rewrite(path, lambda root: places(root).view(-1)[:1].fill_(value))

    return damage


def change(do: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda path: rewrite(path, do)


def update(**values: object) -> Callable[[Path], None]:
    return change(lambda root: root.update(values))


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"!")


def damage_directory(path: Path) -> None:
    flip(path, path.read_bytes().index(b"PK\x01\x02"))


def commit_at_another_step(path: Path) -> None:
    rewrite(path, lambda root: root.update(global_steps=2))
    write_manifest(path.parent)


def drop_last_shape(root: dict[str, Any]) -> None:
    root["param_shapes"][-1].popitem()


def other_shape(root: dict[str, Any]) -> None:
    root["param_shapes"][0]["down.bias"] = torch.Size([9])


def master(root: dict[str, Any]) -> torch.Tensor:
    return zero_state(root)["single_partition_of_fp32_groups"][1]


def stage3_master(root: dict[str, Any]) -> torch.Tensor:
    # The first element is padding: `scale` has but one.
    return zero_state(root)["fp32_flat_groups"][0][1:]


def moment(root: dict[str, Any]) -> torch.Tensor:
    return base_state(root)["state"][1]["exp_avg_sq"]


def stage0_moment(root: dict[str, Any]) -> torch.Tensor:
    return root["optimizer"]["state"][6]["exp_avg"]


def module(name: str) -> Callable[[dict[str, Any]], torch.Tensor]:
    return lambda root: root["module"][name]


def cut(num_bytes: int) -> Callable[[Path], None]:
    """Keep so many bytes; a negative number leaves so many out."""
    return lambda path: path.write_bytes(path.read_bytes()[:num_bytes])


def touch_later(path: Path) -> None:
    status = path.stat()
    os.utime(path, (status.st_atime, status.st_mtime + 7200))


def scale_masters(root: dict[str, Any]) -> None:
    for group in zero_state(root)["single_partition_of_fp32_groups"]:
        group.mul_(1.5)


def set_learning_rate(root: dict[str, Any]) -> None:
    base_state(root)["param_groups"][0]["lr"] = 0.5


@dataclass(frozen=True)
class Damage:
    """What is done to a file of a case, and the one code under which it must be found there."""

    code: str
    what: str
    case: str
    file: str
    do: Callable[[Path], object]
    deep: bool = False
    manifest: bool = False


RANK_0 = RANK_1.replace("rank_1", "rank_0")
BF16_RANK_1 = f"bf16_{RANK_1}"
MODEL_1 = f"zero_pp_rank_1_{MODEL}"
BF16 = "stage1-bf16-2ranks"
STAGE_0 = "stage0-fp32-2ranks"
OLDER = change(set_optimizer_step(2))
DAMAGES = [
    Damage("DS901", "a shard", STAGE_1, RANK_1, Path.unlink),
    Damage("DS901", "the model", STAGE_1, MODEL, Path.unlink),
    Damage("DS901", "rank 0 in bf16", BF16, f"bf16_{RANK_0}", Path.unlink),
    Damage("DS901", "a model of stage 3", STAGE_3, MODEL_1, Path.unlink),
    Damage("DS901", "a shard of stage 3", STAGE_3, RANK_1, Path.unlink),
    Damage("DS901", "of a committed tag", STAGE_1, RANK_1, Path.unlink, manifest=True),
    Damage("DS902", "empty", STAGE_1, RANK_1, cut(0)),
    Damage("DS902", "the first header alone", STAGE_1, RANK_1, cut(64)),
    Damage("DS902", "half", STAGE_1, RANK_1, cut(3000)),
    Damage("DS902", "no end record", STAGE_1, RANK_1, cut(-22)),
    Damage("DS902", "a byte short", STAGE_1, MODEL, cut(-1)),
    Damage("DS902", "committed, a byte short", STAGE_1, MODEL, cut(-1), manifest=True),
    Damage("DS902", "committed, a byte long", STAGE_1, MODEL, append, manifest=True),
    Damage("DS902", "committed, a note longer", STAGE_1, MODEL, update(note="n" * 99), manifest=True),
    Damage("DS903", "a weight", STAGE_1, RANK_1, flip_weight, deep=True),
    Damage("DS903", "a weight of stage 3", STAGE_3, RANK_1, flip_weight, deep=True),
    Damage("DS903", "of a committed tag", STAGE_1, MODEL, flip_weight, deep=True, manifest=True),
    Damage("DS904", "text", STAGE_1, RANK_1, lambda path: path.write_text("not a shard")),
    Damage("DS904", "another pickle", STAGE_1, RANK_1, lambda path: torch.save({"a": 1}, path)),
    Damage("DS904", "directory of the archive", STAGE_1, RANK_1, damage_directory),
    Damage(
        "DS905", "another shape", STAGE_1, RANK_1, lambda path: change(other_shape)(path.with_name(MODEL))
    ),
    Damage("DS908", "optimizer states", STAGE_1, RANK_1, OLDER),
    Damage("DS908", "optimizer states of rank 0", STAGE_1, RANK_0, OLDER),
    Damage("DS908", "optimizer states of stage 3", STAGE_3, RANK_1, OLDER),
    Damage("DS908", "a model of stage 3", STAGE_3, MODEL_1, update(global_steps=2)),
    Damage("DS908", "not the manifest's", STAGE_1, MODEL, commit_at_another_step),
    Damage("DS909", "learning rate", STAGE_1, RANK_1, change(set_learning_rate)),
    Damage("DS909", "batch size", STAGE_3, MODEL_1, update(ds_config={"train_batch_size": 3})),
    Damage("DS909", "ZeRO", STAGE_1, RANK_1, update(ds_config={"zero_optimization": {"stage": 2}})),
    Damage("DS909", "samples", STAGE_3, MODEL_1, update(global_samples=24)),
    Damage("DS909", "version", STAGE_1, RANK_1, update(ds_version="0.1")),
    Damage("DS910", "two hours later", STAGE_1, RANK_1, touch_later),
    Damage("DS911", "", STAGE_1, "", lambda path: update(autoep_layers=[1])(path / MODEL)),
    Damage("DS912", "a shard", BF16, BF16_RANK_1, change(scale_masters), deep=True),
    Damage("DS913", "a weight of stage 3", STAGE_3, RANK_1, set_value(stage3_master, math.nan), deep=True),
    Damage("DS913", "a weight", STAGE_1, RANK_1, set_value(master, math.inf), deep=True),
    Damage("DS913", "a moment", STAGE_1, RANK_1, set_value(moment, math.nan), deep=True),
    Damage("DS913", "a moment of stage 0", STAGE_0, MODEL, set_value(stage0_moment, math.nan), deep=True),
    Damage(
        "DS913", "a frozen bf16 weight", BF16, MODEL, set_value(module("frozen.weight"), -math.inf), deep=True
    ),
    Damage("DS913", "a bf16 weight", BF16, MODEL, set_value(module("up.weight"), math.nan), deep=True),
    Damage("DS913", "a buffer", STAGE_1, MODEL, set_value(module("norm.running_var"), math.nan), deep=True),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: f"{damage.code} {damage.what}".strip())
def test_damage_is_found_under_its_own_code(zoo: Path, tmp_path: Path, damage: Damage) -> None:
    folder = copied(zoo, damage.case, tmp_path / "checkpoints")
    if damage.manifest:
        write_manifest(folder)
    damage.do(folder / damage.file)
    (finding,) = verify(tmp_path / "checkpoints", deep=damage.deep).findings
    assert (finding.code, finding.where.file) == (damage.code, str(folder / damage.file))
    assert finding.severity is rules_of_checkpoints()[damage.code].severity
    if damage.deep:
        assert verify(folder).findings == []


def test_there_is_damage_for_every_rule() -> None:
    elsewhere = {"DS906", "DS907", "DS914", "DS915"}
    assert {damage.code for damage in DAMAGES} | elsewhere == set(rules_of_checkpoints())
    assert all(rule.bad and rule.good for rule in rules_of_checkpoints().values())


def only(findings: list[Finding], code: str) -> Finding:
    (finding,) = findings
    assert finding.code == code
    return finding


def test_an_extra_shard_of_a_larger_world(zoo: Path, tmp_path: Path) -> None:
    folder = copied(zoo, "stage2-fp32-2ranks", tmp_path / "checkpoints")
    name = RANK_1.replace("rank_1", "rank_2")
    shutil.copy2(zoo / "stage2-fp32-3ranks" / "checkpoints" / TAG / name, folder / name)
    finding = only(verify(folder).findings, "DS907")
    assert finding.where.file == str(folder / name)
    assert "world size is 2" in finding.message
    (folder / name).unlink()
    write_manifest(folder, left_out=RANK_1)
    assert only(verify(folder).findings, "DS907").message == "the manifest does not list it"


def test_a_shard_of_a_larger_world_in_place_of_one_of_its_own(zoo: Path, tmp_path: Path) -> None:
    folder = copied(zoo, "stage2-fp32-2ranks", tmp_path / "checkpoints")
    shutil.copy2(zoo / "stage2-fp32-3ranks" / "checkpoints" / TAG / RANK_1, folder / RANK_1)
    finding = only(verify(folder).findings, "DS909")
    assert "data-parallel world size is 3 here and 2 in" in finding.message


def test_a_shard_of_another_stage(zoo: Path, tmp_path: Path) -> None:
    folder = copied(zoo, STAGE_1, tmp_path / "checkpoints")
    shutil.copy2(zoo / "stage2-fp32-2ranks" / "checkpoints" / TAG / RANK_1, folder / RANK_1)
    assert "ZeRO stage in the config is 2 here and 1 in" in only(verify(folder).findings, "DS909").message


@pytest.mark.parametrize("file", [BF16_RANK_1, MODEL])
def test_a_shard_of_a_run_that_differs_in_its_seed_only(zoo: Path, tmp_path: Path, file: str) -> None:
    folder = copied(zoo, BF16, tmp_path / "checkpoints")
    assert verify(zoo / "stage1-bf16-otherseed" / "checkpoints", deep=True).findings == []
    shutil.copy2(zoo / "stage1-bf16-otherseed" / "checkpoints" / TAG / file, folder / file)
    assert verify(folder).findings == []
    assert only(verify(folder, deep=True).findings, "DS912").where.file == str(folder / file)


def test_a_weight_that_the_shapes_leave_out(zoo: Path, tmp_path: Path) -> None:
    # BF16_Optimizer keeps its padding, so that sizes alone do not tell.
    folder = copied(zoo, "stage1-bf16optimizer", tmp_path / "checkpoints")
    rewrite(folder / MODEL, drop_last_shape)
    assert "belong to no tensor" in only(verify(folder).findings, "DS905").message


@pytest.mark.parametrize("offset_bytes", range(40, 700, 60))
def test_a_flipped_bit_in_the_manifest(zoo: Path, tmp_path: Path, offset_bytes: int) -> None:
    folder = copied(zoo, STAGE_1, tmp_path / "checkpoints")
    write_manifest(folder)
    assert verify(folder, deep=True).findings == []
    flip(folder / "manifest.json", offset_bytes)
    assert only(verify(folder).findings, "DS904").where.file == str(folder / "manifest.json")


@pytest.mark.parametrize(("case", "file"), [(BF16, BF16_RANK_1), (STAGE_3, MODEL_1)])
def test_whatever_stands_anywhere_in_a_shard_there_are_findings_and_no_crash(
    zoo: Path, tmp_path: Path, case: str, file: str
) -> None:
    folder = copied(zoo, case, tmp_path / "checkpoints")
    root = torch.load(folder / file, weights_only=False)
    sections = [root, *(value for value in root.values() if isinstance(value, dict))]
    for section in sections:
        for key, kept in list(section.items()):
            for value in (math.nan, [5], 2**61):
                section[key] = value
                torch.save(root, folder / file)
                assert all(finding.code[:3] == "DS9" for finding in verify(folder, deep=True).findings)
                assert summarize(folder).tag == TAG
            section[key] = kept


def test_all_that_is_wrong_with_a_tag_is_said_at_once(zoo: Path, tmp_path: Path) -> None:
    folder = copied(zoo, "stage3-fp32-3ranks", tmp_path / "checkpoints")
    (folder / RANK_0).unlink()
    cut(500)(folder / RANK_1)
    OLDER(folder / RANK_1.replace("rank_1", "rank_2"))
    (folder / MODEL_1).write_text("")
    shutil.copy2(folder / f"zero_pp_rank_0_{MODEL}", folder / f"zero_pp_rank_3_{MODEL}")
    (tmp_path / "checkpoints" / "latest").write_text("global_step4")
    found = {
        (finding.code, Path(finding.where.file or "").name) for finding in verify(folder.parent).findings
    }
    # One step alone is no majority: the model states decide that it is the odd one.
    assert found == {
        ("DS901", RANK_0),
        ("DS902", RANK_1),
        ("DS902", MODEL_1),
        ("DS906", "latest"),
        ("DS907", f"zero_pp_rank_3_{MODEL}"),
    }


def test_values_in_padding_are_no_finding_and_infinite_ones_in_buffers_a_note(
    zoo: Path, tmp_path: Path
) -> None:
    folder = copied(zoo, STAGE_3, tmp_path / "checkpoints")

    def poison_padding(root: dict[str, Any]) -> None:
        # `scale` has one element: rank 1 has nothing of it but padding.
        zero_state(root)["fp32_flat_groups"][0][0] = math.nan

    rewrite(folder / RANK_1, poison_padding)
    assert verify(folder, deep=True).findings == []
    rewrite(
        folder / f"zero_pp_rank_0_{MODEL}", lambda root: root["module"]["norm.running_mean"].fill_(-math.inf)
    )
    finding = only(verify(folder, deep=True).findings, "DS913")
    assert (finding.severity, finding.fix) == (Severity.INFO, None)
    assert finding.message == "norm.running_mean holds 11 infinite values (float32)"


def test_odd_values_are_counted_by_tensor_over_all_shards(zoo: Path, tmp_path: Path) -> None:
    folder = copied(zoo, STAGE_3, tmp_path / "checkpoints")
    for name in (RANK_0, RANK_1):
        rewrite(
            folder / name,
            lambda root: zero_state(root)["optimizer_state_dict"]["state"][1]["exp_avg"].fill_(math.nan),
        )
    messages = {finding.message for finding in verify(folder, deep=True).findings}
    assert messages == {
        "exp_avg of embedding.weight holds 91 NaN values (float32) and 1 more files",
        "exp_avg of up.weight holds 77 NaN values (float32) and 1 more files",
        "exp_avg of down.weight holds 35 NaN values (float32) and 1 more files",
    }


def test_latest(zoo: Path, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    folder = copied(zoo, STAGE_1, directory)
    older = shutil.copytree(folder, directory / "global_step2")
    update(global_steps=2)(older / MODEL)
    result = verify(directory)
    assert (result.findings, [tag.folder.name for tag in result.tags]) == ([], ["global_step2", TAG])
    latest = directory / "latest"
    latest.write_text("global_step2")
    finding = only(verify(directory).findings, "DS914")
    assert (finding.severity, finding.where.file) == (Severity.WARNING, str(latest))
    for lost in ("global_step4", "", "../checkpoints/global_step3", "a\0b"):
        latest.write_text(lost)
        assert only(verify(directory).findings, "DS906").fix == f"write {TAG} into it"
    # The newest one is broken: it is right that `latest` names the one before.
    latest.write_text("global_step2")
    (folder / RANK_1).unlink()
    assert only(verify(directory).findings, "DS901").where.file == str(folder / RANK_1)
    latest.unlink()
    assert only(verify(directory).findings, "DS901")


def test_an_unfinished_save_is_mentioned(zoo: Path, tmp_path: Path) -> None:
    copied(zoo, STAGE_0, tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / ".global_step9.0123abcd.partial").mkdir()
    assert only(verify(tmp_path / "checkpoints").findings, "DS915").severity is Severity.INFO


def test_one_tag_of_many(zoo: Path, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    folder = copied(zoo, STAGE_0, directory)
    broken = shutil.copytree(folder, directory / "global_step10")
    write_manifest(broken)
    (broken / MODEL).unlink()
    assert only(verify(directory).findings, "DS901")
    assert only(verify(directory, tag="global_step10").findings, "DS901")
    assert verify(directory, tag=TAG).findings == verify(folder).findings == []
    for bad in ("global_step7", "..", "a\0b"):
        with pytest.raises(ToolkitError, match="there is no tag"):
            verify(directory, tag=bad)
    with pytest.raises(ToolkitError, match="does not exist"):
        verify(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ToolkitError, match="there is no checkpoint"):
        verify(tmp_path / "empty")


def test_the_public_door(zoo: Path, tmp_path: Path) -> None:
    folder = copied(zoo, STAGE_1, tmp_path / "checkpoints")
    flip_weight(folder / RANK_1)
    assert ds_toolkit.verify_checkpoint(str(folder)) == []
    assert only(ds_toolkit.verify_checkpoint(folder.parent, tag=TAG, deep=True), "DS903")


def test_progress_reaches_the_end(zoo: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    verify(zoo / STAGE_1 / "checkpoints", deep=True, progress=lambda *told: seen.append(told))
    assert seen
    assert {tag for tag, _, _ in seen} == {TAG}
    done = [done_bytes for _, done_bytes, _ in seen]
    assert done == sorted(done)
