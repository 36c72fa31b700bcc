"""CRCs of parts joined are the CRC of the whole."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from ds_toolkit.checkpoint.crc32 import combined


@given(st.binary(max_size=500), st.binary(max_size=500))
def test_two_parts(first: bytes, second: bytes) -> None:
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_a_long_second_part() -> None:
    first, second = b"abc", bytes(5_000_011)
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
