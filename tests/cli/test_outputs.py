"""Every command that writes a file which a person named: a link is written through, the file's mode stays."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENT = {"PATH": "/nonexistent", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
CONFIG = ("gen-config", "--model", "1M", "--num-nodes", "1", "--gpus-per-node", "2", "--force", "-o")
LAUNCH = ("gen-launch", "--launcher", "pdsh", "--num-nodes", "1", "--gpus-per-node", "2", "--force")
PLOT = ("plan", "memory", "--model", "1M", "--gpus", "1", "--plot")
# The command up to the path; the file's name; how it begins before and after.
WRITERS = {
    "gen-config": (CONFIG, "c.json", "{}", "{\n"),
    "gen-env": (("gen-env", "-o"), "env", "A=1\n", "A=1\n"),
    "gen-launch": ((*LAUNCH, "-o"), "launch.sh", "", "#!/usr/bin/env bash\n"),
    "hostfile": ((*LAUNCH, "--hosts", "n1", "--hostfile"), "hosts", "", "n1 slots=2\n"),
    "schema": (("schema", "-o"), "s.json", "{}", '{\n  "$schema"'),
    "lint": (("lint", "--fix"), "c.json", '{"gradient_clipping": "1", "train_batch_size": 8}', '{"gradient_'),
    "plan": (PLOT, "p.svg", "", "<?xml"),
}


def run(*arguments: str, cwd: Path) -> None:
    command = [sys.executable, "-m", "ds_toolkit", *arguments]
    environment = {**ENVIRONMENT, "HOME": str(cwd)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("writer", WRITERS)
def test_a_link_is_written_through_and_the_mode_stays(writer: str, tmp_path: Path) -> None:
    command, name, before, after = WRITERS[writer]
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "target"
    target.write_text(before)
    target.chmod(0o640)
    (tmp_path / name).symlink_to("there/target")
    run(*command, name, cwd=tmp_path)
    assert (tmp_path / name).readlink() == Path("there/target")
    text = target.read_text()
    assert text != before
    assert text.startswith(after)
    # Who may read a script may run it.
    assert stat.S_IMODE(target.stat().st_mode) == (0o750 if writer == "gen-launch" else 0o640)
    assert list((tmp_path / "there").iterdir()) == [target]
