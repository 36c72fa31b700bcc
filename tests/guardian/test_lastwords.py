"""Real processes that die, and what their guardian makes of their slots."""

from __future__ import annotations

from pathlib import Path

import fake_rank

from ds_toolkit.checkpoint.incident import Incident, incidents
from ds_toolkit.checkpoint.manifest import Manifest
from ds_toolkit.checkpoint.verify import verify_crcs


def the_incident(directory: Path) -> Incident:
    (incident,) = incidents(directory)
    return incident


def check_step(directory: Path, tag: str, step: int, kind: str = "last-words") -> None:
    """The tag is whole, and every byte is of that step."""
    manifest = Manifest.read(directory / tag)
    assert (manifest.step, manifest.kind) == (step, kind)
    assert verify_crcs(directory / tag, manifest.files) == []
    for file in manifest.files:
        assert (directory / tag / file.name).read_bytes() == fake_rank.content(file.name, step)
    assert (directory / "latest").read_text() == tag


def test_a_killed_rank_costs_nothing_that_all_had(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, "0000abcd"), root) as job:
        job.write(6)
        job.write(7)
        job.ranks[0].write(8)
        job.ranks[1].kill()
        heard = job.ranks[0].hear(15)
        assert (heard["event"], heard["tag"]) == ("done", "global_step7")
        check_step(tmp_path, "global_step7", 7)
        assert job.ranks[0].look()["frozen"]
        job.ranks[0].kill()
        fake_rank.await_end(*job.guardian)
        assert not job.arena.folder.exists()
    incident = the_incident(tmp_path)
    assert [(end.rank, end.how) for end in incident.ended] == [(1, "died")]
    assert [(place.step, place.whole_step) for place in incident.ranks] == [(8, 8), (7, 7)]
    assert (incident.outcome, incident.tag, incident.last_step) == ("complete", "global_step7", 7)
    assert incident.was_caught
    assert incident.seconds is not None
    assert incident.seconds < 2
