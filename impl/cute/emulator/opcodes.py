"""PTX opcodes that are one instruction of ``isa``: what they lower to and the widths of their operands."""

from typing import NamedTuple

from impl.cute.emulator.isa import Op


class Plain(NamedTuple):
    """``opcode dst, sources``: widths in bytes; ``imm`` goes into the instruction as it is."""

    op: Op
    dst: int
    sources: tuple[int, ...]
    imm: int = 0


def _integers() -> dict[str, Plain]:
    table: dict[str, Plain] = {}
    for kind in ("s32", "u32", "b32"):
        table |= {f"add.{kind}": Plain(Op.ADD4, 4, (4, 4)), f"sub.{kind}": Plain(Op.SUB4, 4, (4, 4))}
        table |= {
            f"mul.lo.{kind}": Plain(Op.MUL4, 4, (4, 4)),
            f"mad.lo.{kind}": Plain(Op.MAD4, 4, (4, 4, 4)),
        }
    for kind in ("s64", "u64", "b64"):
        table |= {f"add.{kind}": Plain(Op.ADD8, 8, (8, 8)), f"sub.{kind}": Plain(Op.SUB8, 8, (8, 8))}
        table |= {
            f"mul.lo.{kind}": Plain(Op.MUL8, 8, (8, 8)),
            f"mad.lo.{kind}": Plain(Op.MAD8, 8, (8, 8, 8)),
        }
    table |= {
        "mul.hi.s32": Plain(Op.MULHI_S4, 4, (4, 4)),
        "mul.hi.u32": Plain(Op.MULHI_U4, 4, (4, 4)),
        "mul.wide.s32": Plain(Op.WIDE_S4, 8, (4, 4)),
        "mul.wide.u32": Plain(Op.WIDE_U4, 8, (4, 4)),
        "neg.s32": Plain(Op.NEG4, 4, (4,)),
        "neg.s64": Plain(Op.NEG8, 8, (8,)),
        "abs.s32": Plain(Op.ABS4, 4, (4,)),
        "div.s32": Plain(Op.DIV_S4, 4, (4, 4)),
        "div.u32": Plain(Op.DIV_U4, 4, (4, 4)),
        "rem.s32": Plain(Op.REM_S4, 4, (4, 4)),
        "rem.u32": Plain(Op.REM_U4, 4, (4, 4)),
        "min.s32": Plain(Op.MIN_S4, 4, (4, 4)),
        "max.s32": Plain(Op.MAX_S4, 4, (4, 4)),
        "min.u32": Plain(Op.MIN_U4, 4, (4, 4)),
        "max.u32": Plain(Op.MAX_U4, 4, (4, 4)),
        "min.s64": Plain(Op.MIN_S8, 8, (8, 8)),
        "max.s64": Plain(Op.MAX_S8, 8, (8, 8)),
        "shr.u32": Plain(Op.SHR_U4, 4, (4, 4)),
        "shr.b32": Plain(Op.SHR_U4, 4, (4, 4)),
        "shr.s32": Plain(Op.SHR_S4, 4, (4, 4)),
        "shr.u64": Plain(Op.SHR_U8, 8, (8, 4)),
        "shr.b64": Plain(Op.SHR_U8, 8, (8, 4)),
        "shr.s64": Plain(Op.SHR_S8, 8, (8, 4)),
        "shl.b32": Plain(Op.SHL4, 4, (4, 4)),
        "shl.b64": Plain(Op.SHL8, 8, (8, 4)),
        "shf.l.wrap.b32": Plain(Op.SHF_L, 4, (4, 4, 4)),
        "shf.r.wrap.b32": Plain(Op.SHF_R, 4, (4, 4, 4)),
        "prmt.b32": Plain(Op.PRMT, 4, (4, 4, 4)),
        "popc.b32": Plain(Op.POPC4, 4, (4,)),
        "clz.b32": Plain(Op.CLZ4, 4, (4,)),
        "brev.b32": Plain(Op.BREV4, 4, (4,)),
    }
    for kind, width in (("pred", 1), ("b16", 2), ("b32", 4), ("b64", 8)):
        for name in ("and", "or", "xor", "not"):
            sources = (width,) if name == "not" else (width, width)
            table[f"{name}.{kind}"] = Plain(Op[f"{name.upper()}{width}"], width, sources)
    for kind, width in (("b16", 2), ("u16", 2), ("s16", 2), ("b32", 4), ("u32", 4), ("s32", 4), ("f32", 4)):
        table[f"selp.{kind}"] = Plain(Op[f"SEL{width}"], width, (width, width, 1))
    for kind in ("b64", "u64", "s64", "f64"):
        table[f"selp.{kind}"] = Plain(Op.SEL8, 8, (8, 8, 1))
    return table


def _floats() -> dict[str, Plain]:
    table: dict[str, Plain] = {}
    for name in ("add", "sub", "mul"):
        op = Op[f"{name.upper()}_F"]
        for rounding in ("", ".rn"):
            table[f"{name}{rounding}.f32"] = Plain(op, 4, (4, 4))
            table[f"{name}{rounding}.ftz.f32"] = Plain(op, 4, (4, 4), 1)
    for imm, rounding in enumerate(("rn", "rm", "rz", "rp")):
        table[f"fma.{rounding}.f32"] = Plain(Op.FMA_F, 4, (4, 4, 4), imm)
    for name in ("min", "max"):
        table[f"{name}.f32"] = Plain(Op[f"{name.upper()}_F"], 4, (4, 4))
    table |= {
        "fma.rn.ftz.f32": Plain(Op.FMA_FTZ, 4, (4, 4, 4)),
        "add.rn.f32.bf16": Plain(Op.ADD_BF16_F, 4, (2, 4)),
        "neg.f32": Plain(Op.NEG_F, 4, (4,)),
        "abs.f32": Plain(Op.ABS_F, 4, (4,)),
        "div.rn.f32": Plain(Op.DIV_F, 4, (4, 4)),
        "div.full.f32": Plain(Op.DIV_FULL_F, 4, (4, 4)),
        "div.approx.ftz.f32": Plain(Op.DIV_APPROX_F, 4, (4, 4)),
        "rcp.approx.ftz.f32": Plain(Op.RCP_APPROX_F, 4, (4,)),
        "ex2.approx.ftz.f32": Plain(Op.EX2_APPROX_F, 4, (4,)),
        "rsqrt.approx.f32": Plain(Op.RSQRT_APPROX_F, 4, (4,)),
        "sqrt.rn.f32": Plain(Op.SQRT_F, 4, (4,)),
        "add.rn.f32x2": Plain(Op.ADD_F2, 8, (8, 8)),
        "mul.rn.f32x2": Plain(Op.MUL_F2, 8, (8, 8)),
        "fma.rn.f32x2": Plain(Op.FMA_F2, 8, (8, 8, 8)),
    }
    return table


def _conversions() -> dict[str, Plain]:
    table = {
        "cvt.sat.f32.f32": Plain(Op.SAT_F, 4, (4,)),
        "cvt.rn.f32.s32": Plain(Op.S4_TO_F, 4, (4,)),
        "cvt.rn.f32.u32": Plain(Op.U4_TO_F, 4, (4,)),
        "cvt.rzi.s32.f32": Plain(Op.F_TO_S4, 4, (4,)),
        "cvt.rzi.u32.f32": Plain(Op.F_TO_U4, 4, (4,)),
        "cvt.rn.bf16.f32": Plain(Op.F_TO_BF16, 2, (4,)),
        "cvt.rn.bf16x2.f32": Plain(Op.F2_TO_BF16X2, 4, (4, 4)),
        "cvt.f32.bf16": Plain(Op.BF16_TO_F, 4, (2,)),
    }
    for wide, narrow in (("64", "32"), ("32", "16")):
        for sign, op in (("s", "SEXT"), ("u", "ZEXT")):
            for to in ("s", "u"):
                n, w = int(narrow) // 8, int(wide) // 8
                table[f"cvt.{to}{wide}.{sign}{narrow}"] = Plain(Op[f"{op}_{n}_{w}"], w, (n,))
                for source in ("s", "u"):
                    table[f"cvt.{to}{narrow}.{source}{wide}"] = Plain(Op[f"TRUNC_{w}_{n}"], n, (w,))
    return table


PLAIN = _integers() | _floats() | _conversions()
"""Every opcode that is one instruction, by its full text."""


class Narrow(NamedTuple):
    """A 16-bit opcode done in 32 bits: operands are widened, the result is cut to ``dst`` bytes."""

    op: Op
    signed: bool
    sources: int
    dst: int = 2


def _narrow() -> dict[str, Narrow]:
    table: dict[str, Narrow] = {}
    for kind in ("s16", "u16"):
        signed, sign = kind == "s16", kind[0].upper()
        for name, op in (("add", Op.ADD4), ("sub", Op.SUB4), ("mul.lo", Op.MUL4)):
            table[f"{name}.{kind}"] = Narrow(op, signed, 2)
        table |= {
            f"mad.lo.{kind}": Narrow(Op.MAD4, signed, 3),
            f"mul.wide.{kind}": Narrow(Op.MUL4, signed, 2, 4),
            f"min.{kind}": Narrow(Op[f"MIN_{sign}4"], signed, 2),
            f"max.{kind}": Narrow(Op[f"MAX_{sign}4"], signed, 2),
            f"shr.{kind}": Narrow(Op[f"SHR_{sign}4"], signed, 1),
        }
    table["neg.s16"] = Narrow(Op.NEG4, True, 1)
    table["shl.b16"] = Narrow(Op.SHL4, False, 1)
    table["shr.b16"] = Narrow(Op.SHR_U4, False, 1)
    return table


NARROW = _narrow()
"""Opcodes of 16 bits; a shift's amount is 32 bits wide and not among ``sources``."""

IGNORED = frozenset(
    (
        "griddepcontrol.launch_dependents",
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned",
        "fence.acq_rel.cta",
        "fence.acq_rel.gpu",
        "fence.sc.cta",
        "membar.cta",
        "membar.gl",
        "nanosleep.u32",
        "prefetch.global.L2",
        "prefetch.global.L1",
        "prefetch.tensormap",
        "prefetch.param.tensormap",
        "cp.async.bulk.prefetch.L2.global",
        "setmaxnreg.inc.sync.aligned.u32",
        "setmaxnreg.dec.sync.aligned.u32",
    )
)
"""Opcodes that change when things happen on hardware, and nothing that the emulator models."""
