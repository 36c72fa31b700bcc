from __future__ import annotations

import runpy
from pathlib import Path

from ds_toolkit.cli.catalogue import all_rules

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_the_docstrings_say() -> None:
    written = (DOCS / "rules.md").read_text()
    assert written == runpy.run_path(str(DOCS / "generate.py"))["rules_page"](), "run `make docs`"


def test_every_rule_has_its_chapter_with_examples() -> None:
    written = (DOCS / "rules.md").read_text()
    for rule in all_rules().values():
        chapter = written.partition(f"\n### {rule.code} {rule.name}\n")[2].partition("\n#")[0]
        assert rule.manual.splitlines()[0] in chapter
        assert chapter.count("\nBad") == len(rule.bad)
        assert chapter.count("\nGood") == len(rule.good)
