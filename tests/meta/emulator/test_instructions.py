"""Every instruction that is a function of its lane, against its scalar definition, in both engines."""

import itertools

import numpy as np
import pytest

from impl.cute.emulator.isa import Op
from impl.cute.emulator.opcodes import NARROW, PLAIN, Plain
from tests.meta.emulator.ptx import ENGINES, aligned, engine_or_skip, execute, kernel
from tests.meta.emulator.scalar import APPROXIMATE, DEFINITIONS, SIXTEEN

FLOATS = (
    0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFA00001,
    0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F7FFFFF,
    0x3F800001, 0x4B000000, 0x4B7FFFFF, 0x4F000000, 0xCF000000, 0x4EFFFFFF, 0x3F008000, 0x3F018000,
    0x3F00FFFF, 0x3F808000, 0x40490FDB,
)  # fmt: skip
INTEGERS = (
    0, 1, 2, 3, 5, 31, 32, 33, 63, 64, 65, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000,
    0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0x55555555, 0xAAAAAAAA,
)  # fmt: skip
WIDE = (1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0x100000001, 0xFFFFFFFF00000000)
TYPES = {1: "pred", 2: "b16", 4: "b32", 8: "b64"}
LANES = 2048


def specials(width: int, floats: bool) -> list[int]:
    """Bit patterns worth combining, for an operand of so many bytes."""
    if width == 1:
        return [0, 1]
    if not floats:
        return [x & ((1 << 8 * width) - 1) for x in (*INTEGERS, *(WIDE if width == 8 else ()))]
    if width == 8:
        return [a | b << 32 for a, b in itertools.product(FLOATS[::4], FLOATS[::3])]
    return [x >> 16 if width == 2 else x for x in FLOATS]


def inputs(opcode: str, plain: Plain) -> list[np.ndarray]:
    """Operands: combinations of the special values, then random ones."""
    floats = "f32" in opcode
    rng = np.random.default_rng(hash_of(opcode))
    combined = list(itertools.product(*(specials(width, floats) for width in plain.sources)))
    rng.shuffle(combined)
    combined = combined[: LANES // 2]
    columns = []
    for i, width in enumerate(plain.sources):
        column = rng.integers(0, 1 << 64, LANES, dtype=np.uint64)
        column &= np.uint64(1 if width == 1 else (1 << 8 * width) - 1)
        if floats and width == 4:  # exponents near each other, so that sums round and cancel
            close = rng.integers(0x3E000000, 0x41000000, LANES) | rng.integers(0, 2, LANES) << 31
            column = np.where(rng.random(LANES) < 0.6, close.astype(np.uint64), column)
        column[: len(combined)] = [int(row[i]) for row in combined]
        columns.append(column)
    return columns


def sixteen(opcode: str) -> Plain:
    """Widths of the operands of a 16-bit opcode."""
    narrow = NARROW[opcode]
    shift = narrow.op in (Op.SHL4, Op.SHR_S4, Op.SHR_U4)
    return Plain(narrow.op, narrow.dst, (2,) * narrow.sources + (4,) * shift)


def hash_of(text: str) -> int:
    """A number that does not change between runs."""
    return int.from_bytes(text.encode()[-7:], "little")


def body_of(opcode: str, plain: Plain) -> str:
    """Load the operands (8 bytes each), apply the instruction, store its result (8 bytes)."""
    lines = ["    mad.lo.s32 %r0, %cta, 1024, %tid;", "    mul.wide.u32 %d0, %r0, 8;"]
    names = []
    for i, width in enumerate(plain.sources):
        lines += [f"    add.s64 %d1, %buf{i}, %d0;", f"    ld.global.b64 %d{2 + i}, [%d1];"]
        name = {1: f"%p{i}", 2: f"%h{i}", 4: f"%r{1 + i}", 8: f"%d{2 + i}"}[width]
        if width < 8:
            lines.append(f"    cvt.u32.u64 %r{1 + i}, %d{2 + i};")
        if width == 2:
            lines.append(f"    cvt.u16.u32 %h{i}, %r{1 + i};")
        if width == 1:
            lines.append(f"    setp.ne.b32 %p{i}, %r{1 + i}, 0;")
        names.append(name)
    to = {1: "%p7", 2: "%h7", 4: "%r9", 8: "%d9"}[plain.dst]
    lines.append(f"    {opcode} {to}, {', '.join(names)};")
    if plain.dst == 1:
        lines.append("    selp.b32 %r9, 1, 0, %p7;")
    if plain.dst == 2:
        lines.append("    cvt.u32.u16 %r9, %h7;")
    if plain.dst < 8:
        lines.append("    cvt.u64.u32 %d9, %r9;")
    lines += [f"    add.s64 %d1, %buf{len(names)}, %d0;", "    st.global.b64 [%d1], %d9;"]
    return "\n".join(lines)


def test_every_plain_instruction_has_a_scalar_definition() -> None:
    assert set(DEFINITIONS) | APPROXIMATE == set(PLAIN)
    assert set(SIXTEEN) == set(NARROW)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("opcode", sorted(DEFINITIONS | SIXTEEN))
def test_instruction(opcode: str, engine: str) -> None:
    engine_or_skip(engine)
    plain = PLAIN.get(opcode) or sixteen(opcode)
    columns = inputs(opcode, plain)
    arrays = [aligned(column) for column in columns] + [aligned(np.zeros(LANES, np.uint64))]
    text = kernel(body_of(opcode, plain), buffers=len(arrays), threads=1024)
    execute(text, arrays, engine, grid=2, threads=1024)
    wanted = [(DEFINITIONS | SIXTEEN)[opcode](*(int(c[i]) for c in columns)) for i in range(LANES)]
    wrong = [i for i in range(LANES) if int(arrays[-1][i]) != wanted[i]]
    assert not wrong, [
        (f"{[hex(int(c[i])) for c in columns]}", hex(int(arrays[-1][i])), hex(wanted[i])) for i in wrong[:4]
    ]
