from __future__ import annotations

import runpy
from pathlib import Path

from ds_toolkit.env.variables import REPLACED, VARIABLES

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_the_table_says() -> None:
    written = (DOCS / "variables.md").read_text()
    assert written == runpy.run_path(str(DOCS / "generate.py"))["variables_page"](), "run `make docs`"


def test_every_variable_has_its_row_with_its_version() -> None:
    rows = {
        line.split("`")[1]: line for line in (DOCS / "variables.md").read_text().splitlines() if "| `" in line
    }
    assert rows.keys() == VARIABLES.keys() | REPLACED.keys()
    for name, variable in VARIABLES.items():
        assert variable.meaning in rows[name]
        assert rows[name].endswith(f"| {variable.since or '-'} |")
    for old, new in REPLACED.items():
        assert f"`{new.name}`" in rows[old]
        assert new.together in rows[old]
