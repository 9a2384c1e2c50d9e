"""bf16 held as uint16 bit patterns: conversions and the exact fused multiply-add.

Only numpy. Triton's interpreter keeps a bf16 tensor as its 16-bit patterns; everything here either
opens such an array to fp32 (exact) or rounds to it once, to nearest even, as the hardware does.
"""

import numpy as np
from numpy.typing import ArrayLike

# What PTX's cvt.rn.bf16.f32 answers for every NaN.
CANONICAL_NAN = np.uint16(0x7FFF)


def widen(patterns: np.ndarray) -> np.ndarray:
    """Open bf16 patterns (uint16, any shape) to the fp32 numbers they stand for; exact for all 65,536."""
    return (np.asarray(patterns, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(numbers: ArrayLike, toward_zero: bool = False) -> np.ndarray:
    """Round numbers of any numpy type to bf16 patterns (uint16, same shape), once.

    Integers and booleans pass through fp32, as the compiled conversion does. A NaN becomes 0x7FFF,
    subnormal numbers are kept. ``toward_zero`` truncates instead of rounding to nearest even.
    """
    given = np.asarray(numbers)
    single = to_odd_fp32(given) if given.dtype == np.float64 else given.astype(np.float32)
    bits = single.view(np.uint32)
    # 0x7FFF plus the lowest kept bit carries exactly when nearest even goes up.
    carry = np.uint32(0) if toward_zero else np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    patterns = ((bits + carry) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(single), CANONICAL_NAN, patterns)


def to_odd_fp32(numbers: np.ndarray) -> np.ndarray:
    """Round fp64 to fp32 so that a later rounding to at most 22 bits equals one rounding from fp64.

    Round to odd (Boldo and Melquiond, "When double rounding is odd", 2005): an inexact result keeps its
    last bit set, so it can never sit on a tie that the number itself does not sit on.
    """
    single = numbers.astype(np.float32)
    wide = single.astype(np.float64)
    finite = np.isfinite(numbers)
    away = finite & (np.abs(wide) > np.abs(numbers))
    # Lowering the pattern by one steps toward zero, also from infinity to the largest number.
    bits = single.view(np.uint32) - away.astype(np.uint32)
    inexact = finite & (wide != numbers)
    rounded: np.ndarray = (bits | inexact.astype(np.uint32)).view(np.float32)
    return rounded


def fma_fp64_to_odd(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """X * y + z in fp64, rounded to odd, for operands that fp32 can hold (any floating numpy type).

    The product of two 24-bit numbers is exact in fp64; the sum's error is recovered exactly (Knuth's
    two-sum) and forces the last bit. One further rounding to fp32, fp16 or bf16 then equals a single one.
    """
    product = np.multiply(x, y, dtype=np.float64)
    addend = np.asarray(z, np.float64)
    total = np.asarray(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    inexact = np.isfinite(total) & (error != 0)
    bits = total.view(np.int64)
    grew = inexact & ((error < 0) == (total > 0))
    bits = bits - grew.astype(np.int64)
    rounded: np.ndarray = (bits | inexact.astype(np.int64)).view(np.float64)
    return rounded
