"""Every plain PTX instruction as a function of one lane's bit patterns, written from the PTX manual.

Integers are Python's, fp32 is exact rational arithmetic rounded here. Nothing is shared with the
emulator but the opcodes' names.
"""

import math
from collections.abc import Callable
from fractions import Fraction

NAN = 0x7FFFFFFF
INF = 0x7F800000
Lane = Callable[..., int]


def signed(x: int, bits: int = 32) -> int:
    """A bit pattern as a two's complement number."""
    return x - (1 << bits) if x >> bits - 1 & 1 else x


def is_nan(x: int) -> bool:
    """Whether fp32 bits are a NaN."""
    return x & 0x7F800000 == INF and x & 0x7FFFFF != 0


def is_inf(x: int) -> bool:
    """Whether fp32 bits are an infinity."""
    return x & 0x7FFFFFFF == INF


def value(x: int) -> Fraction:
    """The number of finite fp32 bits."""
    exponent, mantissa = x >> 23 & 255, x & 0x7FFFFF
    magnitude = Fraction(mantissa | (0x800000 if exponent else 0)) * Fraction(2) ** (max(exponent, 1) - 150)
    return -magnitude if x >> 31 else magnitude


def bits(x: Fraction, mode: str = "rn", zero: int = 0) -> int:
    """fp32 bits of a rational, rounded; ``zero`` are the bits of an exact zero."""
    if x == 0:
        return zero
    sign, x = (0x80000000, -x) if x < 0 else (0, x)
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    if x < Fraction(2) ** exponent:
        exponent -= 1
    exponent = max(exponent, -126)
    scaled = x / Fraction(2) ** (exponent - 23)
    down = scaled.numerator // scaled.denominator
    rest = scaled - down
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down % 2 == 1),
        "rz": False,
        "rm": bool(sign) and rest > 0,
        "rp": not sign and rest > 0,
    }[mode]
    down += up
    if down >= 1 << 24:
        down, exponent = down // 2, exponent + 1
    if exponent > 127:
        largest = {"rn": False, "rz": True, "rm": not sign, "rp": bool(sign)}[mode]
        return sign | (0x7F7FFFFF if largest else INF)
    return sign | down if down < 1 << 23 else sign | (exponent + 127) << 23 | (down & 0x7FFFFF)


def flushed(x: int) -> int:
    """Subnormals as zero of the same sign."""
    return x & 0x80000000 if not x & 0x7F800000 else x


def add(x: int, y: int) -> int:
    """x + y."""
    if is_nan(x) or is_nan(y) or (is_inf(x) and is_inf(y) and x != y):
        return NAN
    if is_inf(x) or is_inf(y):
        return x if is_inf(x) else y
    both = x & y & 0x80000000 if not (value(x) or value(y)) else 0
    return bits(value(x) + value(y), zero=0x80000000 if both else 0)


def mul(x: int, y: int) -> int:
    """x * y."""
    sign = (x ^ y) & 0x80000000
    if is_nan(x) or is_nan(y):
        return NAN
    if is_inf(x) or is_inf(y):
        other = y if is_inf(x) else x
        return NAN if other & 0x7FFFFFFF == 0 else sign | INF
    return bits(value(x) * value(y), zero=sign)


def fma(x: int, y: int, z: int, mode: str = "rn") -> int:
    """x * y + z, rounded once."""
    if is_nan(x) or is_nan(y) or is_nan(z):
        return NAN
    sign = (x ^ y) & 0x80000000
    if is_inf(x) or is_inf(y):
        product = mul(x, y)
        return NAN if product == NAN or (is_inf(z) and z != product) else product
    if is_inf(z):
        return z
    product_value = value(x) * value(y)
    exact = product_value + value(z)
    if exact == 0:
        same = sign == z & 0x80000000
        zero = sign if same else (0x80000000 if mode == "rm" else 0)
        if product_value == 0 or same:
            return zero
        return 0x80000000 if mode == "rm" else 0
    return bits(exact, mode)


def div(x: int, y: int) -> int:
    """x / y, correctly rounded."""
    sign = (x ^ y) & 0x80000000
    if is_nan(x) or is_nan(y) or (is_inf(x) and is_inf(y)):
        return NAN
    if is_inf(x) or is_inf(y):
        return sign | INF if is_inf(x) else sign
    if value(y) == 0:
        return NAN if value(x) == 0 else sign | INF
    return bits(value(x) / value(y), zero=sign)


def sqrt(x: int) -> int:
    """The square root, correctly rounded."""
    if is_nan(x) or (x >> 31 and x & 0x7FFFFFFF):
        return NAN
    if is_inf(x) or value(x) == 0:
        return x
    # 200 binary digits are enough: a square root is never within 2**-50 of a tie unless exact.
    scaled = value(x) * (1 << 400)
    root = Fraction(math.isqrt(scaled.numerator // scaled.denominator), 1 << 200)
    if root * root != value(x):
        root += Fraction(1, 1 << 220)
    return bits(root)


def to_bf16(x: int) -> int:
    """fp32 to bf16, nearest even."""
    if is_nan(x):
        return 0x7FFF
    high, low = x >> 16, x & 0xFFFF
    return high + (low > 0x8000 or (low == 0x8000 and high & 1))


def smaller(x: int, y: int, sign: int) -> int:
    """min (sign 1) or max (sign -1)."""
    if is_nan(x) or is_nan(y):
        return NAN if is_nan(x) and is_nan(y) else (y if is_nan(x) else x)

    def key(b: int) -> int:
        return -(b & 0x7FFFFFFF) - 1 if b >> 31 else b

    return min(x, y, key=key) if sign > 0 else max(x, y, key=key)


def saturated(x: int) -> int:
    """Clamped to [0, 1]."""
    if is_nan(x) or x >> 31:
        return 0
    return min(x, 0x3F800000)


def to_integer(x: int, low: int, high: int) -> int:
    """fp32 to an integer, toward zero, saturating."""
    if is_nan(x):
        return 0
    if is_inf(x):
        return (low if x >> 31 else high) & 0xFFFFFFFF
    return max(low, min(high, int(value(x)))) & 0xFFFFFFFF


def truncated_division(x: int, y: int) -> int:
    """Signed division toward zero; by zero all bits are set."""
    if y == 0:
        return -1
    q = abs(x) // abs(y)
    return -q if (x < 0) != (y < 0) else q


def remainder(a: int, b: int) -> int:
    """Signed remainder of the division toward zero; by zero the dividend."""
    x, y = signed(a), signed(b)
    return (x - truncated_division(x, y) * y) & 0xFFFFFFFF if y else a


def pair(function: Lane) -> Lane:
    """The function on both fp32 halves of packed operands."""

    def both(*xs: int) -> int:
        low = function(*(x & 0xFFFFFFFF for x in xs))
        return low | function(*(x >> 32 for x in xs)) << 32

    return both


def prmt(a: int, b: int, c: int) -> int:
    """Bytes of b:a picked by four selectors; the top bit of one replicates the sign."""
    source = (b << 32 | a).to_bytes(8, "little")
    out = 0
    for i in range(4):
        selector = c >> 4 * i & 15
        byte = source[selector & 7]
        out |= (byte if selector < 8 else (0xFF if byte & 0x80 else 0)) << 8 * i
    return out


def _tables() -> dict[str, Lane]:
    m4, m8 = 0xFFFFFFFF, (1 << 64) - 1
    t: dict[str, Lane] = {}
    for kinds, mask in ((("s32", "u32", "b32"), m4), (("s64", "u64", "b64"), m8)):
        for kind in kinds:
            t[f"add.{kind}"] = lambda a, b, m=mask: a + b & m
            t[f"sub.{kind}"] = lambda a, b, m=mask: a - b & m
            t[f"mul.lo.{kind}"] = lambda a, b, m=mask: a * b & m
            t[f"mad.lo.{kind}"] = lambda a, b, c, m=mask: a * b + c & m
    for kind, width in (("pred", 1), ("b16", 16), ("b32", 32), ("b64", 64)):
        t[f"and.{kind}"] = lambda a, b: a & b
        t[f"or.{kind}"] = lambda a, b: a | b
        t[f"xor.{kind}"] = lambda a, b: a ^ b
        t[f"not.{kind}"] = lambda a, w=width: a ^ (1 << w) - 1
    for kind in ("b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"):
        t[f"selp.{kind}"] = lambda a, b, p: a if p else b
    t |= {
        "mul.hi.s32": lambda a, b: signed(a) * signed(b) >> 32 & m4,
        "mul.hi.u32": lambda a, b: a * b >> 32,
        "mul.wide.s32": lambda a, b: signed(a) * signed(b) & m8,
        "mul.wide.u32": lambda a, b: a * b,
        "neg.s32": lambda a: -a & m4,
        "neg.s64": lambda a: -a & m8,
        "abs.s32": lambda a: abs(signed(a)) & m4,
        "div.s32": lambda a, b: truncated_division(signed(a), signed(b)) & m4,
        "div.u32": lambda a, b: a // b if b else m4,
        "rem.s32": lambda a, b: (
            (signed(a) - truncated_division(signed(a), signed(b)) * signed(b)) & m4 if b else a
        ),
        "rem.u32": lambda a, b: a % b if b else a,
        "min.s32": lambda a, b: min(a, b, key=signed),
        "max.s32": lambda a, b: max(a, b, key=signed),
        "min.u32": min,
        "max.u32": max,
        "min.s64": lambda a, b: min(a, b, key=lambda x: signed(x, 64)),
        "max.s64": lambda a, b: max(a, b, key=lambda x: signed(x, 64)),
        "shl.b32": lambda a, n: a << n & m4 if n < 32 else 0,
        "shl.b64": lambda a, n: a << n & m8 if n < 64 else 0,
        "shr.u32": lambda a, n: a >> min(n, 32),
        "shr.b32": lambda a, n: a >> min(n, 32),
        "shr.u64": lambda a, n: a >> min(n, 64),
        "shr.b64": lambda a, n: a >> min(n, 64),
        "shr.s32": lambda a, n: signed(a) >> min(n, 32) & m4,
        "shr.s64": lambda a, n: signed(a, 64) >> min(n, 64) & m8,
        "shf.l.wrap.b32": lambda a, b, c: (b << 32 | a) << (c & 31) >> 32 & m4,
        "shf.r.wrap.b32": lambda a, b, c: (b << 32 | a) >> (c & 31) & m4,
        "prmt.b32": prmt,
        "popc.b32": lambda a: a.bit_count(),
        "clz.b32": lambda a: 32 - a.bit_length(),
        "brev.b32": lambda a: int(f"{a:032b}"[::-1], 2),
    }
    for rounding in ("", ".rn"):
        t[f"add{rounding}.f32"] = add
        t[f"sub{rounding}.f32"] = lambda a, b: add(a, b ^ 0x80000000) if not is_nan(b) else NAN
        t[f"mul{rounding}.f32"] = mul
        for name in ("add", "sub", "mul"):
            t[f"{name}{rounding}.ftz.f32"] = lambda a, b, f=t[f"{name}{rounding}.f32"]: flushed(
                f(flushed(a), flushed(b))
            )
    for mode in ("rn", "rm", "rz", "rp"):
        t[f"fma.{mode}.f32"] = lambda a, b, c, m=mode: fma(a, b, c, m)
    t |= {
        "fma.rn.ftz.f32": lambda a, b, c: flushed(fma(flushed(a), flushed(b), flushed(c))),
        "add.rn.f32.bf16": lambda a, b: add(a << 16, b),
        "neg.f32": lambda a: NAN if is_nan(a) else a ^ 0x80000000,
        "abs.f32": lambda a: NAN if is_nan(a) else a & 0x7FFFFFFF,
        "min.f32": lambda a, b: smaller(a, b, 1),
        "max.f32": lambda a, b: smaller(a, b, -1),
        "div.rn.f32": div,
        "sqrt.rn.f32": sqrt,
        "add.rn.f32x2": pair(add),
        "mul.rn.f32x2": pair(mul),
        "fma.rn.f32x2": pair(fma),
        "cvt.sat.f32.f32": saturated,
        "cvt.rn.f32.s32": lambda a: bits(Fraction(signed(a))),
        "cvt.rn.f32.u32": lambda a: bits(Fraction(a)),
        "cvt.rzi.s32.f32": lambda a: to_integer(a, -(1 << 31), (1 << 31) - 1),
        "cvt.rzi.u32.f32": lambda a: to_integer(a, 0, m4),
        "cvt.rn.bf16.f32": to_bf16,
        "cvt.rn.bf16x2.f32": lambda a, b: to_bf16(a) << 16 | to_bf16(b),
        "cvt.f32.bf16": lambda a: a << 16,
    }
    for wide, narrow in ((64, 32), (32, 16)):
        for to in "su":
            t[f"cvt.{to}{wide}.s{narrow}"] = lambda a, n=narrow, w=wide: signed(a, n) & (1 << w) - 1
            t[f"cvt.{to}{wide}.u{narrow}"] = lambda a: a
            for source in "su":
                t[f"cvt.{to}{narrow}.{source}{wide}"] = lambda a, n=narrow: a & (1 << n) - 1
    return t


def _sixteen() -> dict[str, Lane]:
    m2 = 0xFFFF
    t: dict[str, Lane] = {}
    for kind in ("s16", "u16"):

        def number(x: int, k: str = kind) -> int:
            return signed(x, 16) if k == "s16" else x

        t[f"add.{kind}"] = lambda a, b: a + b & m2
        t[f"sub.{kind}"] = lambda a, b: a - b & m2
        t[f"mul.lo.{kind}"] = lambda a, b: a * b & m2
        t[f"mad.lo.{kind}"] = lambda a, b, c: a * b + c & m2
        t[f"mul.wide.{kind}"] = lambda a, b, f=number: f(a) * f(b) & 0xFFFFFFFF
        t[f"min.{kind}"] = lambda a, b, f=number: min(a, b, key=f)
        t[f"max.{kind}"] = lambda a, b, f=number: max(a, b, key=f)
        t[f"shr.{kind}"] = lambda a, n, f=number: f(a) >> min(n, 16) & m2
    t["neg.s16"] = lambda a: -a & m2
    t["shl.b16"] = lambda a, n: a << n & m2 if n < 16 else 0
    t["shr.b16"] = lambda a, n: a >> min(n, 16)
    return t


DEFINITIONS = _tables()
"""Per opcode, the result's bits from the operands' bits."""
SIXTEEN = _sixteen()
"""The same for opcodes of 16 bits."""
APPROXIMATE = frozenset(
    ("div.full.f32", "div.approx.ftz.f32", "rcp.approx.ftz.f32", "ex2.approx.ftz.f32", "rsqrt.approx.f32")
)
"""Opcodes whose results the functions' own tests define."""
