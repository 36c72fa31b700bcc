from __future__ import annotations

import re
import runpy
from pathlib import Path

from ds_toolkit.cli.catalogue import rule_of
from ds_toolkit.doctor.signatures import SIGNATURES

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_the_signatures_say() -> None:
    written = (DOCS / "diagnose.md").read_text()
    assert written == runpy.run_path(str(DOCS / "generate.py"))["diagnose_page"](), "run `make docs`"


def test_every_failure_has_its_chapter_and_its_manual() -> None:
    written = (DOCS / "diagnose.md").read_text()
    for signature in SIGNATURES:
        assert f"\n### {signature.code} {signature.name}\n" in written
        assert rule_of(signature.code).manual == signature.manual


def test_the_page_knows_the_exit_codes() -> None:
    from ds_toolkit.doctor.exit_codes import exit_of

    written = " ".join((DOCS / "diagnose.md").read_text().split())
    for codes, name in re.findall(r"(-\d+, \d+, \d+) (SIG\w+)", written):
        assert {exit_of(int(code)).signal for code in codes.split(", ")} == {name}
    assert len(re.findall(r"(-\d+, \d+, \d+) (SIG\w+)", written)) == 4
