"""What holds for any text: rules of environment files and hostfiles never crash, and place what they find."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ds_toolkit.env.envfile import parse_env_text
from ds_toolkit.env.hostfile import parse_hostfile_text
from ds_toolkit.env.hostfile_rules import lint_hostfile
from ds_toolkit.env.launchers import Launcher
from ds_toolkit.env.rules import lint_env

TEXTS = st.text(max_size=40) | st.lists(
    st.sampled_from(
        [
            "NCCL_DEBUG",
            "NCCL_IB_HCA",
            "a",
            "slots",
            "=",
            " ",
            "\n",
            "\r",
            "$x",
            ",",
            "# ",
            "'",
            "1",
            "\x85",
            "%h",
        ]
    ),
    max_size=12,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.none() | st.sampled_from(list(Launcher)), st.none() | st.booleans())
def test_no_text_makes_the_rules_crash(text: str, launcher: Launcher | None, infiniband: bool | None) -> None:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for finding in [
        *lint_env(parse_env_text(text), launcher, infiniband),
        *lint_hostfile(parse_hostfile_text(text)),
    ]:
        assert finding.where.line is not None
        assert finding.where.column is not None
        assert 1 <= finding.where.line <= len(lines)
        assert 1 <= finding.where.column <= len(lines[finding.where.line - 1]) + 1
