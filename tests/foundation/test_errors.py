from __future__ import annotations

import pickle
from pathlib import Path

from ds_toolkit.errors import ToolkitError


def test_an_error_reads_as_what_where_why_fix() -> None:
    error = ToolkitError("it broke", where=Path("here.json"), why="one\ntwo", fix="mend it")
    assert str(error) == "it broke\n  where: here.json\n  why:   one\n         two\n  fix:   mend it"


def test_parts_that_are_not_known_are_not_printed() -> None:
    assert str(ToolkitError("it broke")) == "it broke"


def test_an_error_survives_the_way_to_another_process() -> None:
    error = ToolkitError("it broke", where="here", fix="mend it")
    for copy in (pickle.loads(pickle.dumps(error)), ToolkitError.from_dict(error.as_dict())):
        assert isinstance(copy, ToolkitError)
        assert copy.as_dict() == {"what": "it broke", "where": "here", "why": None, "fix": "mend it"}
