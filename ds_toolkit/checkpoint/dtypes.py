"""Element types by torch's names, their sizes, and how a value of one becomes a value of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

_BFLOAT16_NAN = 0x7FC0


@dataclass(frozen=True)
class DType:
    """An element type: torch's name for it (`float32`) and the bytes of one element."""

    name: str
    size_bytes: int

    @property
    def is_convertible(self) -> bool:
        """Whether it is a floating type whose values can be turned into another's (8-bit floats are kept)."""
        return self.name in _CONVERTIBLE

    def __str__(self) -> str:
        return self.name


_CONVERTIBLE = ("float64", "float32", "float16", "bfloat16")
_SIZES = {
    1: (
        "uint8 int8 bool float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
        "float4_e2m1fn_x2"
    ),
    2: "float16 bfloat16 int16 uint16",
    4: "float32 int32 uint32 complex32",
    8: "float64 int64 uint64 complex64",
    16: "complex128",
}
DTYPES = {name: DType(name, size) for size, names in _SIZES.items() for name in names.split()}
FLOAT32 = DTYPES["float32"]
UINT8 = DTYPES["uint8"]

# Class names in torch's pickles (torch/storage.py, `_dtype_to_storage_type_map`).
STORAGE_DTYPES = {
    "DoubleStorage": DTYPES["float64"],
    "FloatStorage": FLOAT32,
    "HalfStorage": DTYPES["float16"],
    "BFloat16Storage": DTYPES["bfloat16"],
    "LongStorage": DTYPES["int64"],
    "IntStorage": DTYPES["int32"],
    "ShortStorage": DTYPES["int16"],
    "CharStorage": DTYPES["int8"],
    "ByteStorage": UINT8,
    "BoolStorage": DTYPES["bool"],
    "ComplexDoubleStorage": DTYPES["complex128"],
    "ComplexFloatStorage": DTYPES["complex64"],
    "UntypedStorage": UINT8,
}


def convert(raw: Array, source: DType, target: DType) -> Array:
    """The bytes of the same values in another floating type, rounded to the nearest even as torch does.

    Args:
        raw: uint8, one dimension, whole elements of `source`.

    Returns:
        uint8, one dimension; `raw` itself where nothing changes. Any NaN stays a NaN, its payload may change.
    """
    import numpy as np

    if source == target:
        return raw
    # torch goes through fp32 from every type, so fp64 is rounded twice on its way to 16 bits: so do we.
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if source.name == "bfloat16":
            single = raw.view(np.uint16).astype(np.uint32)
            np.left_shift(single, 16, out=single)
            full = single.view(np.float32)
        else:
            full = raw.view(source.name).astype(np.float32, copy=False)
        if target.name == "bfloat16":
            return _round_to_bfloat16(full).view(np.uint8)
        return full.astype(target.name, copy=False).view(np.uint8)


def _round_to_bfloat16(full: Array) -> Array:
    """uint16 bits of fp32 values: half a unit less a bit is added, a bit more where the kept part is odd."""
    import numpy as np

    bits = full.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    low = rounded.astype(np.uint16)
    low[np.isnan(full)] = _BFLOAT16_NAN
    return low
