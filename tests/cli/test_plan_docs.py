"""The tables of docs/plan.md are what the commands print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import jobs

PAGE = jobs.REPOSITORY / "docs" / "plan.md"
SESSION = re.compile(r"```console\n\$ ds-toolkit (?P<arguments>.*)\n(?P<output>(?:.*\n)*?)```\n")


def test_tables_are_what_the_commands_print() -> None:
    sessions = list(SESSION.finditer(PAGE.read_text()))
    assert len(sessions) == 4
    for session in sessions:
        done = subprocess.run(
            [sys.executable, "-m", "ds_toolkit", *shlex.split(session["arguments"])],
            env={**os.environ, "COLUMNS": "100", "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            text=True,
            check=True,
        )
        printed = [line.rstrip() for line in done.stdout.strip("\n").splitlines()]
        assert session["output"].splitlines() == printed, session["arguments"]
