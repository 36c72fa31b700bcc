"""CRC-32 of a whole from the CRC-32 of its parts, so that parts can be read in any order."""

from __future__ import annotations

from functools import lru_cache

# CRC-32's polynomial, x^32 left out, the lowest power in the highest bit (as zlib keeps it).
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def combined(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two byte strings joined, of which only the CRCs and the second's length are known.

    Appending n bytes multiplies the first CRC, as a polynomial over GF(2), by x^(8n) modulo CRC-32's
    polynomial; this is the arithmetic of zlib's `crc32_combine` (crc32.c).
    """
    return _multiply(_power_of_x(8 * second_bytes), first) ^ second


def _multiply(left: int, right: int) -> int:
    product = 0
    while left:
        if left & _ONE:
            product ^= right
        left = (left << 1) & 0xFFFFFFFF
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _power_of_x(exponent: int) -> int:
    # By squaring; x itself is the bit below the highest.
    result, base = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            result = _multiply(base, result)
        base = _multiply(base, base)
        exponent >>= 1
    return result
