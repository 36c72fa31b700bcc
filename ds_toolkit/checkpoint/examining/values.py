"""Values that are no numbers, counted in raw bytes of every floating type that torch stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_toolkit.checkpoint.dtypes import DType

if TYPE_CHECKING:
    import numpy as np

# Unsigned type of the size, and the bits of the exponent: all of them set is NaN or infinite, and infinite
# where no bit below them is (IEEE 754; float8_e5m2 follows it).
_EXPONENT_BITS = {
    "float64": ("<u8", 0x7FF0000000000000),
    "float32": ("<u4", 0x7F800000),
    "float16": ("<u2", 0x7C00),
    "bfloat16": ("<u2", 0x7F80),
    "float8_e5m2": ("u1", 0x7C),
}
# These have one NaN, given with the bits that count, and no infinity (OCP 8-bit floating point; `fnuz`:
# Noune et al., arXiv:2206.02915).
_ONE_NAN = {
    "float8_e4m3fn": (0x7F, 0x7F),
    "float8_e4m3fnuz": (0xFF, 0x80),
    "float8_e5m2fnuz": (0xFF, 0x80),
    "float8_e8m0fnu": (0xFF, 0xFF),
}
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}


def can_be_counted(dtype: DType) -> bool:
    """Whether the type has values that are no numbers."""
    return _real(dtype) in _EXPONENT_BITS or dtype.name in _ONE_NAN


def count_not_finite(raw: bytes | memoryview, dtype: DType) -> tuple[int, int]:
    """NaN and infinite values among whole elements of a type (of complex ones, their parts are counted)."""
    import numpy as np

    if dtype.name in _ONE_NAN:
        counted, nan = _ONE_NAN[dtype.name]
        return int(np.count_nonzero((np.frombuffer(raw, np.uint8) & counted) == nan)), 0
    unsigned, exponent = _EXPONENT_BITS[_real(dtype)]
    bits = np.frombuffer(raw, unsigned)
    exponents = bits & exponent
    # As a rule there are none, which one comparison of the highest tells.
    if bits.size == 0 or int(exponents.max()) != exponent:
        return 0, 0
    suspects = bits[exponents == exponent]
    sign = 1 << (bits.itemsize * 8 - 1)
    num_infinite = int(np.count_nonzero((suspects & (sign - 1)) == exponent))
    return int(suspects.size) - num_infinite, num_infinite


def are_finite(bits: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    """For each element, given as unsigned bits of a type with an exponent, whether it is a number."""
    _, exponent = _EXPONENT_BITS[dtype.name]
    finite: np.ndarray[Any, Any] = (bits & exponent) != exponent
    return finite


def _real(dtype: DType) -> str:
    return _PARTS.get(dtype.name, dtype.name)
