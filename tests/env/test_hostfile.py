from __future__ import annotations

from pathlib import Path

import pytest

from ds_toolkit.env.hostfile import parse_hostfile_text, read_hostfile
from ds_toolkit.env.hostfile_rules import lint_hostfile
from ds_toolkit.errors import ToolkitError


def test_hosts_and_slots_in_their_order() -> None:
    hostfile = parse_hostfile_text("# ours\n\nb slots=2\r\n  user@a   slots=4 # note\n", "h")
    assert hostfile.slots == {"b": 2, "user@a": 4}
    assert [line.number for line in hostfile.lines] == [3, 4]
    assert [finding.code for finding in lint_hostfile(hostfile)] == ["DS756"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a slots=1\na slots=1\n", "`a` stands twice"),
        ("a slots=1\nb:2\n", "`b:2` cannot be read"),
        ("a slots=many", "cannot be read"),
        ("", "names no host"),
    ],
)
def test_what_the_launcher_refuses_is_refused(text: str, says: str) -> None:
    with pytest.raises(ToolkitError) as caught:
        _ = parse_hostfile_text(text, "h").slots
    assert says in str(caught.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="cannot be read"):
        read_hostfile(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff slots=1")
    with pytest.raises(ToolkitError, match="not text"):
        read_hostfile(tmp_path / "binary")
    (tmp_path / "hosts").write_text("a slots=1\n")
    assert read_hostfile(tmp_path / "hosts").slots == {"a": 1}
