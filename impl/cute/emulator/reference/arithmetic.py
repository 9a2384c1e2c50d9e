"""Arithmetic on arrays: fp32 as the hardware rounds it, bf16, and the integer oddities.

Every NaN that an fp32 operation returns is 0x7fffffff.
"""

import numpy as np

F4, F8, I4, I8, U2, U4, U8 = np.float32, np.float64, np.int32, np.int64, np.uint16, np.uint32, np.uint64
NAN = U4(0x7FFFFFFF).view(F4)
SMALLEST_NORMAL = F4(2.0**-126)
ALL_ONES = 0xFFFFFFFF


def canonical(x: np.ndarray) -> np.ndarray:
    """The fp32 values with every NaN the one that the hardware returns."""
    return np.where(np.isnan(x), NAN, x)


def flush(x: np.ndarray) -> np.ndarray:
    """The fp32 values with subnormals made zero, sign kept (.ftz)."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(F4(0), x), x)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Bf16 bits as fp32, NaN payloads kept."""
    return (bits.astype(U4) << U4(16)).view(F4)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Fp32 to the bits of the nearest bf16, ties to even; NaN becomes 0x7fff."""
    bits = x.view(U4)
    rounded = (bits + U4(0x7FFF) + (bits >> U4(16) & U4(1))) >> U4(16)
    return np.where(np.isnan(x), U4(0x7FFF), rounded).astype(U2)


def _sum_rounded_to_odd(product: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``product + c`` in double; where inexact, the neighbour with an odd last bit.

    Rounding that once more, to fp32 in any direction, equals rounding the exact sum.
    """
    total = product + c
    rest = total - product
    error = (product - (total - rest)) + (c - rest)  # exact (Knuth's two-sum)
    even = total.view(U8) & U8(1) == 0
    beside = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    inexact: np.ndarray = (error != 0) & even & np.isfinite(total)
    result: np.ndarray = np.where(inexact, beside, total)
    return result


NEAREST, DOWN, TO_ZERO, UP = range(4)
"""Rounding directions, as ``FMA_F`` numbers them."""


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, direction: int = NEAREST) -> np.ndarray:
    """``a * b + c`` in fp32, rounded once in the given direction."""
    product, addend = a.astype(F8) * b.astype(F8), c.astype(F8)  # the product is exact in double
    exact = _sum_rounded_to_odd(product, addend)
    near = exact.astype(F4)
    if direction == NEAREST:
        return canonical(near)
    if direction == TO_ZERO:
        wrong, towards = np.abs(near.astype(F8)) > np.abs(exact), F4(0)
    elif direction == DOWN:
        wrong, towards = near.astype(F8) > exact, F4(-np.inf)
    else:
        wrong, towards = near.astype(F8) < exact, F4(np.inf)
    result = np.where(wrong, np.nextafter(near, towards), near)
    if direction == DOWN:  # x - x is -0, and so is every exact zero but +0 + +0
        both_positive = ~np.signbit(product) & ~np.signbit(addend)
        result = np.where((exact == 0) & ~both_positive, F4(-0.0), result)
    return canonical(result)


def minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Fp32 minimum: the number if one operand is NaN; -0 is below +0."""
    a_smaller = (a < b) | ((a == b) & np.signbit(a)) | np.isnan(b)
    return canonical(np.where(a_smaller, a, b))


def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Fp32 maximum: the number if one operand is NaN; -0 is below +0."""
    a_larger = (a > b) | ((a == b) & ~np.signbit(a)) | np.isnan(b)
    return canonical(np.where(a_larger, a, b))


def saturate(x: np.ndarray) -> np.ndarray:
    """Fp32 clamped to [0, 1]; NaN and -0 become +0."""
    return np.where(x > 0, np.minimum(x, F4(1)), F4(0))


def to_integer(x: np.ndarray, low: int, high: int) -> np.ndarray:
    """Fp32 toward zero, clamped to [low, high], NaN 0; int64."""
    return np.where(np.isnan(x), 0, np.clip(np.trunc(x.astype(F8)), low, high)).astype(I8)


def wide_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """8-byte product of 4-byte numbers of one sign."""
    wide = I8 if a.dtype.kind == "i" else U8
    result: np.ndarray = np.multiply(a, b, dtype=wide)
    return result


def high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Upper 4 bytes of the product of 4-byte numbers."""
    product = wide_product(a, b)
    result: np.ndarray = np.right_shift(product, product.dtype.type(32)).astype(a.dtype)
    return result


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Quotient of 4-byte numbers as int64, toward zero; all bits set for a zero divisor."""
    a, b = a.astype(I8), b.astype(I8)
    quotient = np.abs(a) // np.maximum(np.abs(b), 1)
    return np.where(b == 0, ALL_ONES, np.where((a < 0) != (b < 0), -quotient, quotient))


def remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Remainder of 4-byte numbers as int64, of the dividend's sign; the dividend for a zero divisor."""
    return np.where(b == 0, a, a.astype(I8) - divide(a, b) * b)


def shift_left(a: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """Unsigned ``a << amount``; zero from the width on."""
    return _shifted(a, amount, np.left_shift)


def shift_right(a: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """``a >> amount``, of the sign of ``a``'s dtype; the amount is clamped at the width."""
    return _shifted(a, amount, np.right_shift)


def _shifted(a: np.ndarray, amount: np.ndarray, shift: np.ufunc) -> np.ndarray:
    width = 8 * a.dtype.itemsize
    within: np.ndarray = shift(a, np.minimum(amount, U4(width - 1)).astype(a.dtype))
    if a.dtype.kind == "i":
        return within
    return np.where(np.less(amount, width), within, np.zeros_like(a))


def funnel_left(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """High word of (b:a) << (c & 31)."""
    return ((_joined(a, b) << (c & U4(31)).astype(U8)) >> U8(32)).astype(U4)


def funnel_right(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Low word of (b:a) >> (c & 31)."""
    return (_joined(a, b) >> (c & U4(31)).astype(U8)).astype(U4)


def _joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(U8) | high.astype(U8) << U8(32)


def permute_bytes(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Per nibble of the selector (lowest first) a byte of (b:a); bit 3: its sign in all its bits."""
    both, result = _joined(a, b), np.zeros_like(a)
    for i in range(4):
        nibble = (selector >> U4(4 * i)) & U4(15)
        byte = (both >> (U8(8) * (nibble & U4(7)).astype(U8))).astype(U4) & U4(0xFF)
        sign = np.where(byte & U4(0x80), U4(0xFF), U4(0))
        result |= np.where(nibble & U4(8), sign, byte) << U4(8 * i)
    return result


def count_leading_zeros(a: np.ndarray) -> np.ndarray:
    """Leading zero bits of 4-byte numbers, 32 for zero."""
    return U4(32) - np.frexp(a.astype(F8))[1].astype(U4)


def reverse_bits(a: np.ndarray) -> np.ndarray:
    """The 32 bits in the opposite order."""
    bits = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(U4).ravel()


def logic3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """Bitwise function of three words: bit ``a*4 + b*2 + c`` of the truth table."""
    result = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            terms = [x if row & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1))]
            result |= terms[0] & terms[1] & terms[2]
    return result


COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def compare(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The comparison of that name in ``isa.COMPARISONS``; integers have no NaN."""
    nan: np.ndarray = np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        result: np.ndarray = np.equal(nan, name == "nan")
        return result
    if name in COMPARE:
        return np.where(nan, False, COMPARE[name](a, b))
    return np.where(nan, True, COMPARE[name.removesuffix("u")](a, b))
