from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_toolkit.errors import ToolkitError
from ds_toolkit.units import (
    format_bytes,
    format_count,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_memory_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GB", 80 * 10**9),
        ("80 GiB", 80 * 2**30),
        ("512mib", 512 * 2**20),
        ("1.5TB", 1_500_000_000_000),
        ("17", 17),
        ("17B", 17),
        (" 2kb ", 2000),
    ],
)
def test_a_size_is_decimal_unless_its_unit_has_an_i(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "count"), [("7B", 7 * 10**9), ("1M", 10**6), ("350m", 350 * 10**6), ("12", 12)]
)
def test_a_count_has_powers_of_a_thousand(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10min", 600), ("1.5h", 5400), ("2 d", 172800)])
def test_a_duration_needs_its_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_bytes, "80 gigs"),
        (parse_bytes, "-1GB"),
        (parse_bytes, ""),
        (parse_count, "7GB"),
        (parse_count, "1e6"),
        (parse_seconds, "600"),
        (parse_seconds, "10 minutes"),
    ],
)
def test_what_is_not_understood_is_refused_with_an_example(parse, text) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ToolkitError) as caught:
        parse(text)
    assert f"`{text}`" in caught.value.what
    assert caught.value.fix is not None


@pytest.mark.parametrize(
    ("text", "why", "fix"),
    [
        ("80", "a number without a unit is bytes", "did you mean 80GB?"),
        (" 1.5 ", "a number without a unit is bytes", "did you mean 1.5GB?"),
        ("80B", None, "did you mean 80GB?"),
        ("512 kb", None, "did you mean 512GB?"),
        ("1048575", "a number without a unit is bytes", "did you mean 1048575GB?"),
        ("0", "a number without a unit is bytes", "write it as 80GB, 512MiB or 1TB"),
    ],
)
def test_a_memory_of_a_few_bytes_is_a_forgotten_unit(text: str, why: str | None, fix: str) -> None:
    with pytest.raises(ToolkitError) as caught:
        parse_memory_bytes(text, "GPU memory")
    assert caught.value.what.startswith("the GPU memory is ")
    assert (caught.value.why, caught.value.fix) == (why, fix)
    assert parse_memory_bytes("1MiB", "GPU memory") == parse_memory_bytes("1048576", "GPU memory") == 2**20


@settings(deadline=None)
@given(st.integers(0, 10**17))
def test_a_printed_size_reads_back_within_its_digits(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.06)


def test_printed_numbers_carry_their_unit() -> None:
    assert format_bytes(999) == "999 B"
    assert format_bytes(80e9) == "80.0 GB"
    assert format_count(7_240_000_000) == "7.2B"
    assert format_count(12) == "12"
    assert [format_seconds(seconds) for seconds in (0.85, 12.34, 245, 12_000)] == [
        "850 ms",
        "12.3 s",
        "4 min 5 s",
        "3 h 20 min",
    ]
