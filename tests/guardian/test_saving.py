"""Periodic checkpoints, copied by a real guardian out of slots of real processes."""

from __future__ import annotations

from pathlib import Path

import fake_rank

from ds_toolkit.checkpoint.manifest import Manifest
from ds_toolkit.checkpoint.newest import survey
from ds_toolkit.checkpoint.verify import verify_crcs

NAMES = [
    "ds_toolkit_rank_00000.pt",
    "ds_toolkit_rank_00001.pt",
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "zero_pp_rank_1_mp_rank_00_optim_states.pt",
]


def check_tag(directory: Path, tag: str, step: int) -> Manifest:
    """Every byte of a tag is right, and so is what its manifest says of it."""
    manifest = Manifest.read(directory / tag)
    assert manifest.step == step
    assert sorted(file.name for file in manifest.files) == NAMES
    assert sorted(path.name for path in (directory / tag).iterdir()) == sorted([*NAMES, "manifest.json"])
    for name in NAMES:
        assert (directory / tag / name).read_bytes() == fake_rank.content(name, step)
    assert verify_crcs(directory / tag, manifest.files) == []
    return manifest


def test_all_ranks_ask_and_it_is_committed(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, "0000abcd"), root) as job:
        job.write(4)
        job.save("0000001a", "global_step5", 5)
        for heard in job.hear():
            assert heard["event"] == "saved"
            assert (heard["tag"], heard["step"]) == ("global_step5", 5)
            assert heard["total_bytes"] == len(NAMES) * fake_rank.SHARD_BYTES
            assert heard["write_seconds"] > 0
        assert all(rank.look()["wanted"] == [0, 0, 0] for rank in job.ranks)
    manifest = check_tag(tmp_path, "global_step5", 5)
    assert (manifest.kind, manifest.versions) == ("periodic", {"torch": "none"})
    assert {file.name: file.rank for file in manifest.files}["mp_rank_00_model_states.pt"] == 0
    assert (tmp_path / "latest").read_text() == "global_step5"
    assert [candidate.step for candidate in survey(tmp_path)[0]] == [5]
