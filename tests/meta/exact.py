"""Rounding of exact rationals to the formats of the contract, written from IEEE 754 alone."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath


@dataclass(frozen=True)
class Format:
    """A binary format: digits of the significand and the exponents of its normal numbers."""

    digits: int
    least: int
    most: int

    def rounded(self, x: Fraction) -> Fraction:
        """``x`` to nearest, ties to even, with gradual underflow; ``OverflowError`` past the range."""
        if x == 0:
            return x
        step = Fraction(2) ** (max(exponent(x), self.least) - self.digits + 1)
        result = round(x / step) * step  # Python rounds halves of a Fraction to even
        if abs(result) >= Fraction(2) ** (self.most + 1):
            raise OverflowError(f"{float(x)} is past the range")
        return result


FORMATS = {
    "bfloat16": Format(8, -126, 127),
    "float16": Format(11, -14, 15),
    "float32": Format(24, -126, 127),
}


def exponent(x: Fraction) -> int:
    """The integer e with 2**e <= |x| < 2**(e + 1); x is not 0."""
    x = abs(x)
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if x >= Fraction(2) ** e else e - 1


def real(x: Fraction) -> Any:
    """The same number in mpmath's working precision."""
    return mpmath.mpf(x.numerator) / x.denominator
