"""Instructions that compute each lane from its own registers."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from impl.cute.emulator.isa import COMPARISONS, Op
from impl.cute.emulator.reference import arithmetic as a
from impl.cute.emulator.reference.arithmetic import F4, I4, I8, U2, U4, U8, canonical, flush
from impl.cute.emulator.reference.instruction import Instruction
from impl.cute.emulator.reference.warp import Warp

P, I2 = np.uint8, np.int16
"""Dtypes of predicates (0 or 1) and signed halves."""
Kind = type[np.generic]


class Rule(NamedTuple):
    """``to = function(sources)``: dtypes of the destination and of the operands a, b, c.

    ``takes_imm``: the function's last argument is the instruction's ``imm``.
    """

    to: Kind
    sources: tuple[Kind, ...]
    function: Callable[..., np.ndarray]
    takes_imm: bool = False


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _select(x: np.ndarray, y: np.ndarray, predicate: np.ndarray) -> np.ndarray:
    return np.where(predicate != 0, x, y)


def _moves() -> dict[Op, Rule]:
    table = {
        Op.ZEXT_2_4: Rule(U4, (U2,), _same),
        Op.SEXT_2_4: Rule(I4, (I2,), _same),
        Op.ZEXT_4_8: Rule(U8, (U4,), _same),
        Op.SEXT_4_8: Rule(I8, (I4,), _same),
        Op.TRUNC_4_2: Rule(U2, (U4,), _same),
        Op.TRUNC_8_4: Rule(U4, (U8,), _same),
    }
    for width, kind in ((1, P), (2, U2), (4, U4), (8, U8)):
        table[Op[f"MOV{width}"]] = Rule(kind, (kind,), _same)
        table[Op[f"SEL{width}"]] = Rule(kind, (kind, kind, P), _select)
        table[Op[f"AND{width}"]] = Rule(kind, (kind, kind), np.bitwise_and)
        table[Op[f"OR{width}"]] = Rule(kind, (kind, kind), np.bitwise_or)
        table[Op[f"XOR{width}"]] = Rule(kind, (kind, kind), np.bitwise_xor)
        table[Op[f"NOT{width}"]] = Rule(kind, (kind,), np.bitwise_not)
    table[Op.NOT1] = Rule(P, (P,), lambda x: x == 0)
    return table


def _integers() -> dict[Op, Rule]:
    table: dict[Op, Rule] = {}
    four: dict[str, Kind] = {"S4": I4, "U4": U4}
    kinds: dict[str, Kind] = four | {"S8": I8, "U8": U8}
    for width, kind in ((4, kinds["U4"]), (8, kinds["U8"])):
        table[Op[f"ADD{width}"]] = Rule(kind, (kind, kind), np.add)
        table[Op[f"SUB{width}"]] = Rule(kind, (kind, kind), np.subtract)
        table[Op[f"MUL{width}"]] = Rule(kind, (kind, kind), np.multiply)
        table[Op[f"MAD{width}"]] = Rule(kind, (kind, kind, kind), lambda x, y, z: x * y + z)
        table[Op[f"NEG{width}"]] = Rule(kind, (kind,), np.negative)
        table[Op[f"SHL{width}"]] = Rule(kind, (kind, U4), a.shift_left)
    for name, signed in four.items():
        table[Op[f"MULHI_{name}"]] = Rule(signed, (signed, signed), a.high_product)
        table[Op[f"WIDE_{name}"]] = Rule(kinds[f"{name[0]}8"], (signed, signed), a.wide_product)
        table[Op[f"DIV_{name}"]] = Rule(U4, (signed, signed), a.divide)
        table[Op[f"REM_{name}"]] = Rule(U4, (signed, signed), a.remainder)
    for name, kind in kinds.items():
        table[Op[f"SHR_{name}"]] = Rule(kind, (kind, U4), a.shift_right)
        if name != "U8":
            table[Op[f"MIN_{name}"]] = Rule(kind, (kind, kind), np.minimum)
            table[Op[f"MAX_{name}"]] = Rule(kind, (kind, kind), np.maximum)
    return table | {
        Op.ABS4: Rule(I4, (I4,), np.abs),
        Op.LOP3: Rule(U4, (U4, U4, U4), a.logic3, takes_imm=True),
        Op.SHF_L: Rule(U4, (U4, U4, U4), a.funnel_left),
        Op.SHF_R: Rule(U4, (U4, U4, U4), a.funnel_right),
        Op.PRMT: Rule(U4, (U4, U4, U4), a.permute_bytes),
        Op.POPC4: Rule(U4, (U4,), np.bitwise_count),
        Op.CLZ4: Rule(U4, (U4,), a.count_leading_zeros),
        Op.BREV4: Rule(U4, (U4,), a.reverse_bits),
    }


def _compared(x: np.ndarray, y: np.ndarray, imm: int) -> np.ndarray:
    return a.compare(COMPARISONS[imm], x, y)


def _comparisons() -> dict[Op, Rule]:
    kinds: dict[Op, Kind] = {Op.SET_S4: I4, Op.SET_U4: U4, Op.SET_S8: I8, Op.SET_U8: U8, Op.SET_F: F4}
    return {op: Rule(P, (kind, kind), _compared, takes_imm=True) for op, kind in kinds.items()}


def _flushing(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """An fp32 function whose ``imm`` 1 flushes subnormal operands and results."""

    def run(*arguments: np.ndarray) -> np.ndarray:
        *operands, imm = arguments
        if not imm:
            return canonical(function(*operands))
        return canonical(flush(function(*(flush(x) for x in operands))))

    return run


def _paired(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """An fp32 function on both halves of 8-byte operands."""
    return lambda *operands: canonical(function(*(x.view(F4) for x in operands))).view(U8)


def _floats() -> dict[Op, Rule]:
    two: dict[Op, Callable[..., np.ndarray]] = {
        Op.ADD_F: np.add,
        Op.SUB_F: np.subtract,
        Op.MUL_F: np.multiply,
        Op.DIV_F: np.divide,
        Op.MIN_F: a.minimum,
        Op.MAX_F: a.maximum,
    }
    one = {Op.NEG_F: np.negative, Op.ABS_F: np.abs, Op.SQRT_F: np.sqrt}
    table = {op: Rule(F4, (F4, F4), _flushing(f), takes_imm=True) for op, f in two.items()}
    table |= {op: Rule(F4, (F4,), _flushing(f), takes_imm=True) for op, f in one.items()}
    return table | {
        Op.FMA_F: Rule(F4, (F4, F4, F4), a.fma, takes_imm=True),
        Op.FMA_FTZ: Rule(F4, (F4, F4, F4), lambda x, y, z: flush(a.fma(flush(x), flush(y), flush(z)))),
        Op.ADD_BF16_F: Rule(F4, (U2, F4), lambda x, y: canonical(a.from_bf16(x) + y)),
        Op.SAT_F: Rule(F4, (F4,), a.saturate),
        Op.ADD_F2: Rule(U8, (U8, U8), _paired(np.add)),
        Op.MUL_F2: Rule(U8, (U8, U8), _paired(np.multiply)),
        Op.FMA_F2: Rule(U8, (U8, U8, U8), _paired(a.fma)),
        Op.S4_TO_F: Rule(F4, (I4,), _same),
        Op.U4_TO_F: Rule(F4, (U4,), _same),
        Op.F_TO_S4: Rule(I4, (F4,), lambda x: a.to_integer(x, -(2**31), 2**31 - 1)),
        Op.F_TO_U4: Rule(U4, (F4,), lambda x: a.to_integer(x, 0, 2**32 - 1)),
        Op.F_TO_BF16: Rule(U2, (F4,), a.to_bf16),
        Op.F2_TO_BF16X2: Rule(
            U4, (F4, F4), lambda high, low: a.to_bf16(high).astype(U4) << U4(16) | a.to_bf16(low)
        ),
        Op.BF16_TO_F: Rule(U4, (U2,), lambda x: a.from_bf16(x).view(U4)),
    }


RULES = _moves() | _integers() | _comparisons() | _floats()
APPROXIMATE = {
    Op.EX2_APPROX_F: ("ex2", 1),
    Op.RSQRT_APPROX_F: ("rsqrt", 1),
    Op.RCP_APPROX_F: ("rcp", 1),
    Op.DIV_APPROX_F: ("div_approx", 2),
    Op.DIV_FULL_F: ("div_full", 2),
}
"""The launch's own functions: their names and operand counts."""


def _by_rule(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    rule = RULES[ins.op]
    places = (ins.a, ins.b, ins.c)
    operands = [warp.read(place, kind) for place, kind in zip(places, rule.sources, strict=False)]
    value = rule.function(*operands, ins.imm) if rule.takes_imm else rule.function(*operands)
    warp.write(ins.dst, value.astype(rule.to), mask)


def _approximate(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    name, count = APPROXIMATE[ins.op]
    operands = [warp.read(place, F4) for place in (ins.a, ins.b)[:count]]
    warp.write(ins.dst, getattr(warp.machine.functions, name)(*operands), mask)


def _pack(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    parts = np.concatenate([warp.rows(part, ins.size) for part in ins.operands], axis=1)
    warp.rows(ins.dst, ins.size * ins.count)[mask] = parts[mask]


def _unpack(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    whole = warp.rows(ins.a, ins.size * ins.count).copy()
    for i, part in enumerate(ins.operands):
        if part >= 0:
            warp.rows(part, ins.size)[mask] = whole[mask, i * ins.size : (i + 1) * ins.size]


def _clock(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    kind = U8 if ins.size == 8 else U4
    warp.write(ins.dst, np.full(32, warp.executed, kind), mask)


HANDLERS = dict.fromkeys(RULES, _by_rule) | dict.fromkeys(APPROXIMATE, _approximate)
HANDLERS |= {Op.PACK: _pack, Op.UNPACK: _unpack, Op.CLOCK: _clock}
