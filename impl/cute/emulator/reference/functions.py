"""The approximate functions, in the three modes of ``Launch.functions``.

``exact-sm90`` reads Hopper's tables (see ``mufu``). ``rounded`` is correct rounding. ``perturbed``
moves a normal result of that by at most as many steps of the last place as Hopper was measured
to be off, by a hash of the operands and the seed.
"""

import numpy as np

from impl.cute.emulator.launch import Functions
from impl.cute.emulator.mufu import tables
from impl.cute.emulator.reference.arithmetic import (
    F4,
    F8,
    I4,
    I8,
    NAN,
    SMALLEST_NORMAL,
    U4,
    U8,
    canonical,
    flush,
)
from impl.cute.emulator.reference.splitmix import GOLDEN, finalise

STEPS = {"ex2": 2, "rsqrt": 2, "rcp": 1, "div_approx": 2, "div_full": 2}
"""Largest measured distance from the correctly rounded result, in fp32 steps."""
_INFINITY, _NAN, _SIGN, _FRACTION, _ONE = 0x7F800000, 0x7FFFFFFF, 0x80000000, 0x7FFFFF, 0x3F800000


def _coefficients() -> list[float]:
    """Taylor coefficients of 2^f to the 13th power, each from the one before by a product and a quotient."""
    found = [1.0]
    for i in range(1, 14):
        found.append(found[-1] * 0.6931471805599453 / i)
    return found


_EX2 = _coefficients()


class Rounded:
    """Each function correctly rounded."""

    def ex2(self, x: np.ndarray) -> np.ndarray:
        """ex2.approx.ftz: 2^x by a fixed sequence of double operations."""
        x = flush(x).astype(F8)
        whole = np.rint(np.clip(np.nan_to_num(x), -200, 200))
        fraction = np.clip(np.nan_to_num(x), -200, 200) - whole
        power = np.full(x.shape, _EX2[-1])
        for coefficient in _EX2[-2::-1]:
            power = power * fraction + coefficient
        result = flush(np.ldexp(power, whole.astype(I4)).astype(F4))
        result = np.where(x >= 128, F4(np.inf), np.where(x < -150, F4(0), result))
        return np.where(np.isnan(x), NAN, result)

    def rsqrt(self, x: np.ndarray) -> np.ndarray:
        """rsqrt.approx: subnormals kept, a zero gives the infinity of its sign."""
        root = np.where(x == 0, np.copysign(F8(np.inf), x), 1 / np.sqrt(x.astype(F8)))
        return canonical(root.astype(F4))

    def rcp(self, x: np.ndarray) -> np.ndarray:
        """rcp.approx.ftz."""
        return canonical(flush((1 / flush(x).astype(F8)).astype(F4)))

    def div_approx(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """div.approx.ftz."""
        return canonical(flush(flush(a) / flush(b)))

    def div_full(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """div.full."""
        return canonical(a / b)


class Perturbed(Rounded):
    """Each function off by up to ``STEPS`` from the correctly rounded one."""

    def __init__(self, seed: int) -> None:
        self._seed = (seed * GOLDEN) & 0xFFFF_FFFF_FFFF_FFFF

    def ex2(self, x: np.ndarray) -> np.ndarray:
        """ex2.approx.ftz."""
        return self._moved("ex2", super().ex2(x), x)

    def rsqrt(self, x: np.ndarray) -> np.ndarray:
        """rsqrt.approx."""
        return self._moved("rsqrt", super().rsqrt(x), x)

    def rcp(self, x: np.ndarray) -> np.ndarray:
        """rcp.approx.ftz."""
        return self._moved("rcp", super().rcp(x), x)

    def div_approx(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """div.approx.ftz."""
        return self._moved("div_approx", super().div_approx(a, b), a, b)

    def div_full(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """div.full."""
        return self._moved("div_full", super().div_full(a, b), a, b)

    def _moved(self, name: str, result: np.ndarray, x: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
        """The bits of a normal result plus ``hash % (2k + 1) - k``, unless that is not normal."""
        key = x.view(U4).astype(U8) ^ U8(self._seed)
        if b is not None:
            key ^= b.view(U4).astype(U8) << U8(32)
        steps = STEPS[name]
        offset = (finalise(key + U8(GOLDEN)) % U8(2 * steps + 1)).astype(I8) - steps
        moved = (result.view(U4).astype(I8) + offset).astype(U4)
        return np.where(_normal(result.view(U4)) & _normal(moved), moved, result.view(U4)).view(F4)


def _normal(bits: np.ndarray) -> np.ndarray:
    exponent = bits >> U4(23) & U4(255)
    return (exponent > 0) & (exponent < 255)


class ExactHopper:
    """Each function with the bits that an H200 gives."""

    def ex2(self, x: np.ndarray) -> np.ndarray:
        """ex2.approx.ftz."""
        negative, exponent, fraction = _parts(x)
        shift = np.clip(exponent - 127, -40, 7)
        significand = fraction | 1 << 23
        fixed = np.where(
            shift >= 0, significand << np.maximum(shift, 0), significand >> np.maximum(-shift, 0)
        )
        complement = np.where(fixed & _FRACTION, ~fixed, -fixed)
        fixed = np.where(negative, complement, fixed)
        power = fixed >> 23
        result = tables().ex2[fixed & _FRACTION] + ((power + 127) << 23)
        result = np.where(power < -126, 0, np.where(power > 127, _INFINITY, result))
        result = np.where(exponent - 127 > 7, np.where(negative, 0, _INFINITY), result)
        result = np.where(exponent == 0, _ONE, result)
        return _fp32(np.where(np.isnan(x), _NAN, result))

    def rsqrt(self, x: np.ndarray) -> np.ndarray:
        """rsqrt.approx: the table's function, with subnormals scaled into its range."""
        subnormal = np.abs(x) < SMALLEST_NORMAL
        scaled = self._rsq(np.where(subnormal, x * F4(2.0**24), x))
        return canonical(np.where(subnormal, scaled * F4(2.0**12), scaled))

    def _rsq(self, x: np.ndarray) -> np.ndarray:
        negative, exponent, fraction = _parts(x)
        odd = (exponent - 127) & 1
        halved = (exponent - 127 - odd) >> 1
        result = tables().rsq[odd << 23 | fraction] - (halved << 23)
        result = np.where(exponent == 255, 0, result)
        result = np.where(negative, _NAN, result)
        result = np.where(exponent == 0, _INFINITY | np.where(negative, _SIGN, 0), result)
        return _fp32(np.where(np.isnan(x), _NAN, result))

    def rcp(self, x: np.ndarray) -> np.ndarray:
        """rcp.approx.ftz."""
        negative, exponent, fraction = _parts(x)
        table = tables().rcp[fraction].astype(I8)
        power = (table >> 23) - (exponent - 127)
        result = np.where(power > 0, table & _FRACTION | power << 23, 0)
        result = np.where(exponent == 0, _INFINITY, np.where(exponent == 255, 0, result))
        result |= np.where(negative, _SIGN, 0)
        return _fp32(np.where(np.isnan(x), _NAN, result))

    def div_approx(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """div.approx.ftz."""
        return canonical(flush(flush(a) * self.rcp(b)))

    def div_full(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """div.full: both operands scaled so that the reciprocal is normal."""
        scale = np.where(np.abs(b) > F4(2.0**126), F4(0.25), F4(1))
        scale = np.where(np.abs(b) < SMALLEST_NORMAL, F4(2.0**24), scale)
        return canonical((a * scale) * self.rcp(b * scale))


def _parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whether negative, exponent field and fraction bits, as int64."""
    bits = x.view(U4).astype(I8)
    return bits >> 31 == 1, bits >> 23 & 255, bits & _FRACTION


def _fp32(bits: np.ndarray) -> np.ndarray:
    return bits.astype(U4).view(F4)


def chosen(functions: Functions, seed: int) -> Rounded | ExactHopper:
    """The functions of a launch."""
    if functions == "exact-sm90":
        return ExactHopper()
    return Perturbed(seed) if functions == "perturbed" else Rounded()
