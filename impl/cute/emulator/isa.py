"""The emulator's own instructions, to which PTX is lowered and which both engines execute.

A warp's register file is a byte array. Every register is 32 lanes of 1 byte (predicates, 0 or
1), 2, 4 or 8 bytes; constants, special registers and parameters have places in it too, so an
operand is nothing but a byte offset. Names end in the width of the operands in bytes, with S
or U where the sign matters and F for fp32.
"""

from enum import IntEnum, auto

import numpy as np

LANES = 32
SHARED_BASE = 1024
"""Shared-window address of a CTA's first byte of dynamic shared memory."""
PARAM_BASE = 0x7E00_0000_0000
"""Address of the first byte of the kernel's parameters."""
NONE = -1
"""An operand that is not there."""

LEADER, CONVERGED = 1, 2
"""Flags: lanes may join here; all live lanes of the warp must be here."""


class Op(IntEnum):
    """Operations, with their fields of ``INSTRUCTION``.

    Unless said otherwise ``dst = f(a, b, c)`` lane by lane. ``list`` means the ``count`` entries
    of the program's operand list from ``list`` on.
    """

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return count

    # moves and conversions
    MOV1 = auto()
    MOV2 = auto()
    MOV4 = auto()
    MOV8 = auto()
    ZEXT_2_4 = auto()
    SEXT_2_4 = auto()
    ZEXT_4_8 = auto()
    SEXT_4_8 = auto()
    TRUNC_4_2 = auto()
    TRUNC_8_4 = auto()
    PACK = auto()  # dst of size * count bytes: the list's elements of ``size`` bytes, first one lowest
    UNPACK = auto()  # the list (NONE: dropped) gets the elements of ``size`` bytes of a
    SEL1 = auto()  # c (predicate) ? a : b
    SEL2 = auto()
    SEL4 = auto()
    SEL8 = auto()
    # integers
    ADD4 = auto()
    SUB4 = auto()
    MUL4 = auto()
    MAD4 = auto()
    MULHI_S4 = auto()
    MULHI_U4 = auto()
    ADD8 = auto()
    SUB8 = auto()
    MUL8 = auto()
    MAD8 = auto()
    WIDE_S4 = auto()  # 8-byte product of two 4-byte numbers
    WIDE_U4 = auto()
    NEG4 = auto()
    NEG8 = auto()
    ABS4 = auto()
    DIV_S4 = auto()  # toward zero; by zero: all bits set
    DIV_U4 = auto()
    REM_S4 = auto()
    REM_U4 = auto()
    MIN_S4 = auto()
    MAX_S4 = auto()
    MIN_U4 = auto()
    MAX_U4 = auto()
    MIN_S8 = auto()
    MAX_S8 = auto()
    AND1 = auto()
    OR1 = auto()
    XOR1 = auto()
    NOT1 = auto()
    AND2 = auto()
    OR2 = auto()
    XOR2 = auto()
    NOT2 = auto()
    AND4 = auto()
    OR4 = auto()
    XOR4 = auto()
    NOT4 = auto()
    AND8 = auto()
    OR8 = auto()
    XOR8 = auto()
    NOT8 = auto()
    LOP3 = auto()  # imm: the truth table
    SHL4 = auto()  # the amount b is 4 bytes, unsigned, clamped at the width
    SHL8 = auto()
    SHR_U4 = auto()
    SHR_S4 = auto()
    SHR_U8 = auto()
    SHR_S8 = auto()
    SHF_L = auto()  # funnel shift with wrapping amount: high word of (b:a) << (c & 31)
    SHF_R = auto()  # low word of (b:a) >> (c & 31)
    PRMT = auto()  # bytes of (b:a) picked by the nibbles of c, default mode
    POPC4 = auto()
    CLZ4 = auto()
    BREV4 = auto()
    SET_S4 = auto()  # predicate dst = a ? b; imm: index into COMPARISONS
    SET_U4 = auto()
    SET_S8 = auto()
    SET_U8 = auto()
    SET_F = auto()
    # fp32; every NaN result is 0x7fffffff
    ADD_F = auto()  # imm 1: flush subnormal operands and result to zero (sign kept), likewise below
    SUB_F = auto()
    MUL_F = auto()
    FMA_F = auto()  # imm: 0 nearest, 1 toward -inf, 2 toward zero, 3 toward +inf
    FMA_FTZ = auto()  # nearest, operands and result flushed
    ADD_BF16_F = auto()  # a is bf16 (2 bytes), b and dst fp32
    NEG_F = auto()
    ABS_F = auto()
    MIN_F = auto()  # the number if one operand is NaN; -0 < +0
    MAX_F = auto()
    DIV_F = auto()  # correctly rounded
    DIV_FULL_F = auto()  # div.full
    DIV_APPROX_F = auto()  # div.approx.ftz
    RCP_APPROX_F = auto()  # rcp.approx.ftz
    EX2_APPROX_F = auto()  # ex2.approx.ftz
    RSQRT_APPROX_F = auto()  # rsqrt.approx
    SQRT_F = auto()  # correctly rounded
    SAT_F = auto()  # clamp to [0, 1]; NaN and -0 become +0
    ADD_F2 = auto()  # two packed fp32 in 8 bytes, nearest
    MUL_F2 = auto()
    FMA_F2 = auto()
    S4_TO_F = auto()  # nearest
    U4_TO_F = auto()
    F_TO_S4 = auto()  # toward zero, saturating, NaN 0
    F_TO_U4 = auto()
    F_TO_BF16 = auto()  # nearest even, NaN 0x7fff
    F2_TO_BF16X2 = auto()  # a becomes the high half
    BF16_TO_F = auto()  # bits << 16, NaN payloads kept
    # memory; the address is a + imm (8 bytes for global, 4 for shared), wrapping
    LD_GLOBAL = auto()  # the list (NONE: dropped) gets ``count`` elements of ``size`` bytes
    ST_GLOBAL = auto()
    LD_SHARED = auto()
    ST_SHARED = auto()
    ATOM_ADD = auto()  # global, 4 bytes: dst (or NONE) = old value, memory += b
    ATOM_EXCH = auto()
    ATOM_CAS = auto()  # b: compare, c: new value
    # within a warp
    SHFL_BFLY = auto()  # b: lane operand (4 bytes); dst2: predicate or NONE
    SHFL_IDX = auto()
    SHFL_UP = auto()
    SHFL_DOWN = auto()
    ELECT = auto()  # dst (or NONE): the lowest live lane's number, dst2: predicate, true in it
    VOTE_ANY = auto()  # predicates
    VOTE_ALL = auto()
    BALLOT = auto()  # dst: 4 bytes
    BAR_WARP = auto()
    # within a CTA
    BAR_SYNC = auto()  # imm: barrier number; count: threads, 0: all of the CTA
    BAR_ARRIVE = auto()
    MBAR_INIT = auto()  # address a + imm, b: count
    MBAR_INVAL = auto()
    MBAR_ARRIVE = auto()  # b: arrivals or NONE (one); c: bytes to expect or NONE; dst: state or NONE
    MBAR_EXPECT = auto()  # c: bytes
    MBAR_TRY_WAIT = auto()  # suspends until the phase of parity b (4 bytes) is complete; dst true
    MBAR_TEST_WAIT = auto()  # dst: whether it is complete, at once
    FENCE_PROXY = auto()  # fence.proxy.async
    FENCE_MBARRIER = auto()  # fence.mbarrier_init
    DEPENDENCY_WAIT = auto()  # griddepcontrol.wait
    # asynchronous copies; addresses are operands without an offset
    BULK_LOAD = auto()  # list: shared, global (8), bytes, mbarrier
    BULK_STORE = auto()  # list: global (8), shared, bytes
    BULK_COMMIT = auto()
    BULK_WAIT = auto()  # imm: groups that may be pending; count 1: only their reads must be done
    TMA_LOAD = auto()  # list: shared, tensor map (8), mbarrier, coordinates
    CP_ASYNC = auto()  # list: shared, global (8), source bytes or NONE; size: 4, 8 or 16
    CP_ASYNC_COMMIT = auto()
    CP_ASYNC_WAIT = auto()  # imm: groups that may be pending
    LDMATRIX = auto()  # list: 1, 2 or 4 destinations; address a + imm; size 1: transposed
    STMATRIX = auto()
    # tensor memory and tensor cores
    TC_ALLOC = auto()  # address a + imm of shared memory gets the address; count: columns
    TC_DEALLOC = auto()  # a: tensor-memory address; count: columns
    TC_MMA = auto()  # list: accumulator, descriptor a (8), descriptor b (8), idesc, predicate: accumulate
    TC_COMMIT = auto()  # a + imm: mbarrier
    TC_LOAD = auto()  # 32x32b: the list gets ``count`` columns from tensor-memory address a + imm
    TC_WAIT_LOAD = auto()
    TC_FENCE_BEFORE = auto()
    TC_FENCE_AFTER = auto()
    WG_FENCE = auto()
    WG_MMA = auto()  # list: descriptor a (8), descriptor b (8), predicate: accumulate, accumulators; imm: N
    WG_COMMIT = auto()
    WG_WAIT = auto()  # imm: groups that may be pending
    # control
    BRA = auto()  # to the instruction ``target``
    EXIT = auto()
    TRAP = auto()
    CLOCK = auto()  # dst (``size`` bytes): instructions that the warp has executed
    NOP = auto()  # what matters to hardware only


COMPARISONS = (
    "eq", "ne", "lt", "le", "gt", "ge",  # ordered: false if an operand is NaN
    "equ", "neu", "ltu", "leu", "gtu", "geu",  # true if an operand is NaN
    "num", "nan",
)  # fmt: skip
"""Comparisons of SET_*; integers know the first six."""

INSTRUCTION = np.dtype(
    [
        ("op", "i4"),
        ("line", "i4"),
        ("guard", "i4"),  # predicate register or NONE
        ("negate", "i4"),  # 1: lanes where the guard is false take part
        ("dst", "i4"),
        ("dst2", "i4"),
        ("a", "i4"),
        ("b", "i4"),
        ("c", "i4"),
        ("size", "i4"),
        ("count", "i4"),
        ("list", "i4"),
        ("target", "i4"),
        ("flags", "i4"),
        ("imm", "i8"),
    ]
)
"""One instruction; fields that an operation does not name are NONE or 0."""

SPECIALS = (
    "%tid.x", "%tid.y", "%tid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z",
    "%nctaid.x", "%nctaid.y", "%nctaid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%laneid", "%warpid",
)  # fmt: skip
"""Special registers, 4 bytes a lane, which an engine fills when a warp starts."""
