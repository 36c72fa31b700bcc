from __future__ import annotations

from ds_toolkit.findings import Finding, Severity, Where, has_errors


def test_a_place_reads_as_compilers_write_it() -> None:
    assert str(Where("a.json", "/fp16", 3, 5)) == "a.json:3:5 /fp16"
    assert str(Where("a.json")) == "a.json"
    assert str(Where(pointer="/fp16")) == "/fp16"


def test_only_errors_are_errors() -> None:
    warning, error = (Finding("DS001", severity, "m") for severity in (Severity.WARNING, Severity.ERROR))
    assert not has_errors([warning])
    assert has_errors([warning, error])
