"""Whether two stored tensors seem to hold the same values, judged by a few kilobytes of each."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ds_toolkit.checkpoint.reading import read_slice
from ds_toolkit.checkpoint.shards import Slice
from ds_toolkit.checkpoint.tensors import StoredTensor

_NUM_WINDOWS = 8
_WINDOW_ELEMENTS = 128
_INFINITIES = {"bfloat16": 0x7F80, "float16": 0x7C00}
_NANS = {"bfloat16": 0x7FC0, "float16": 0x7E00}


def seem_equal(full: StoredTensor, other: StoredTensor) -> bool:
    """Whether `other` holds the values of `full`, rounded to its own dtype, wherever both are looked at.

    Windows are spread evenly from the first element to the last; tensors of up to 1,024 elements are compared
    whole. Tensors of other sizes, those whose elements lie scattered, and dtypes whose rounding is not known
    never seem equal.
    """
    if full.num_elements != other.num_elements or not full.is_plain or not other.is_plain:
        return False
    for start, count in _windows(full.num_elements):
        expected = _rounded(_read(full, start, count), full.dtype.name, other.dtype.name)
        if expected != _with_one_nan(_read(other, start, count), full.dtype.name, other.dtype.name):
            return False
    return True


def _windows(num_elements: int) -> Sequence[tuple[int, int]]:
    if num_elements <= _NUM_WINDOWS * _WINDOW_ELEMENTS:
        return [(0, num_elements)] if num_elements else []
    last = num_elements - _WINDOW_ELEMENTS
    return [(last * index // (_NUM_WINDOWS - 1), _WINDOW_ELEMENTS) for index in range(_NUM_WINDOWS)]


def _read(tensor: StoredTensor, start: int, count: int) -> bytes:
    item_bytes = tensor.dtype.size_bytes
    skipped_bytes, wanted_bytes = start * item_bytes, count * item_bytes
    data = b""
    for place in tensor.slices:
        if skipped_bytes < place.num_bytes and wanted_bytes:
            part = min(place.num_bytes - skipped_bytes, wanted_bytes)
            data += read_slice(Slice(place.path, place.offset_bytes + skipped_bytes, part))
            wanted_bytes -= part
            skipped_bytes = 0
        else:
            skipped_bytes = max(skipped_bytes - place.num_bytes, 0)
    return data


def _rounded(data: bytes, dtype: str, wanted: str) -> bytes | None:
    """The values in another dtype, to nearest, ties to even, as torch rounds; None if that is not known."""
    if dtype == wanted:
        return data
    if dtype != "float32" or wanted not in ("bfloat16", "float16"):
        return None
    count = len(data) // 4
    if wanted == "bfloat16":
        words = struct.unpack(f"<{count}I", data)
        return struct.pack(f"<{count}H", *map(_upper_half, words))
    return b"".join(map(_half, struct.unpack(f"<{count}f", data)))


def _with_one_nan(data: bytes, full: str, dtype: str) -> bytes:
    """16-bit values in which each NaN is the one that `_rounded` gives: torch gives several."""
    if full == dtype or dtype not in _INFINITIES:
        return data
    infinity, count = _INFINITIES[dtype], len(data) // 2
    words = struct.unpack(f"<{count}H", data)
    return struct.pack(f"<{count}H", *(_NANS[dtype] if word & 0x7FFF > infinity else word for word in words))


def _upper_half(word: int) -> int:
    if word & 0x7FFFFFFF > 0x7F800000:
        return _NANS["bfloat16"]
    return word + 0x7FFF + (word >> 16 & 1) >> 16


def _half(value: float) -> bytes:
    if value != value:
        return struct.pack("<H", _NANS["float16"])
    try:
        return struct.pack("<e", value)
    except OverflowError:
        return struct.pack("<e", float("inf") if value > 0 else float("-inf"))
