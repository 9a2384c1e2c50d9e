"""Device helpers of the CuTe kernels: one PTX instruction, or one small idiom, each.

Shared memory is addressed by 32-bit numbers (``address``), global memory by 64-bit ones. Words
are ``Uint32``; a bf16 pair is one word, its first element in the low half. What has ``memory``
effects is never moved over another such helper; arithmetic may be moved, merged and dropped.
"""

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64, Uint16, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

LOG2_E = 1.4426950408889634
_LETTER = {Float32: "f", Uint16: "h"}
"""Constraint of a register by type; every other 32-bit type has ``r``."""


@dsl_user_op
def asm(
    code: str,
    constraints: str,
    operands: Sequence[Any] = (),
    results: Sequence[Any] = (),
    *,
    memory: bool = True,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """An inline PTX block: None, its one result, or a tuple of ``results`` (their types).

    ``constraints`` are LLVM's, outputs first, without the memory clobber, which ``memory`` adds.
    """
    if memory:
        constraints += ",~{memory}" if constraints else "~{memory}"
    types = [each.mlir_type for each in results]
    returned = None if not types else types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    value = llvm.inline_asm(
        returned,
        [each.ir_value(loc=loc, ip=ip) for each in operands],
        code,
        constraints,
        has_side_effects=memory,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if not results:
        return None
    if len(results) == 1:
        return results[0](value)
    parts = [llvm.extractvalue(each, value, [i], loc=loc, ip=ip) for i, each in enumerate(types)]
    return tuple(result(part) for result, part in zip(results, parts, strict=True))


def registers(count: int, first: int = 0) -> str:
    """``{$first,...}``: a vector operand of an asm block, or the one register."""
    names = ",".join(f"${first + i}" for i in range(count))
    return f"{{{names}}}" if count > 1 else names


def address(pointer: Any) -> Int32:
    """The address of a pointer into shared memory."""
    return Int32(pointer.toint())


# ---- Loads and stores of 1, 2 or 4 words (or a half word), naturally aligned.


def _load(space: str, place: str, at: Any, count: int, kind: Any) -> tuple[Any, ...]:
    vector = f".v{count}" if count > 1 else ""
    bits = "b16" if kind is Uint16 else "b32"
    outputs = ",".join([f"={_LETTER.get(kind, 'r')}"] * count)
    code = f"ld.{space}{vector}.{bits} {registers(count)}, [${count}];"
    found = asm(code, f"{outputs},{place}", (at,), (kind,) * count)
    return found if count > 1 else (found,)


def _store(space: str, place: str, at: Any, values: Sequence[Any]) -> None:
    count, kind = len(values), type(values[0])
    vector = f".v{count}" if count > 1 else ""
    bits = "b16" if kind is Uint16 else "b32"
    inputs = ",".join([_LETTER.get(kind, "r")] * count)
    asm(f"st.{space}{vector}.{bits} [$0], {registers(count, 1)};", f"{place},{inputs}", (at, *values))


def load_shared(at: Int32, count: int = 1, kind: Any = Uint32) -> tuple[Any, ...]:
    """``count`` values (1, 2 or 4) at a shared address."""
    return _load("shared", "r", at, count, kind)


def store_shared(at: Int32, values: Sequence[Any]) -> None:
    """Store 1, 2 or 4 values of one type at a shared address."""
    _store("shared", "r", at, values)


def load_global(at: Int64, count: int = 1, kind: Any = Uint32) -> tuple[Any, ...]:
    """``count`` values (1, 2 or 4) at a global address."""
    return _load("global", "l", at, count, kind)


def store_global(at: Int64, values: Sequence[Any]) -> None:
    """Store 1, 2 or 4 values of one type at a global address."""
    _store("global", "l", at, values)


# ---- bf16.


def pack_bf16(low: Float32, high: Float32) -> Uint32:
    """Two values rounded to bf16 (to nearest even; a NaN becomes 0x7fff) in one word."""
    return asm("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", (high, low), (Uint32,), memory=False)


def unpack_bf16(word: Uint32) -> tuple[Float32, Float32]:
    """The two bf16 values of a word, low half first."""
    code = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return asm(code, "=f,=f,r", (word,), (Float32, Float32), memory=False)


def widen_bf16(half: Uint16) -> Float32:
    """One bf16 value from its bits."""
    return asm("mov.b32 $0, {0, $1};", "=f,h", (half,), (Float32,), memory=False)


# ---- fp32 arithmetic.


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c with one rounding."""
    return asm("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", (a, b, c), (Float32,), memory=False)


def multiply(a: Float32, b: Float32) -> Float32:
    """a * b, never contracted into an fma."""
    return asm("mul.rn.f32 $0, $1, $2;", "=f,f,f", (a, b), (Float32,), memory=False)


def add(a: Float32, b: Float32) -> Float32:
    """a + b, never contracted into an fma."""
    return asm("add.rn.f32 $0, $1, $2;", "=f,f,f", (a, b), (Float32,), memory=False)


def exp2(x: Float32) -> Float32:
    """2 ** x, approximate (2 ulp); subnormal results are 0."""
    return asm("ex2.approx.ftz.f32 $0, $1;", "=f,f", (x,), (Float32,), memory=False)


def reciprocal(x: Float32) -> Float32:
    """1 / x, approximate (1 ulp); subnormal results are 0."""
    return asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", (x,), (Float32,), memory=False)


def reciprocal_root(x: Float32) -> Float32:
    """x ** -0.5, approximate (2 ulp)."""
    return asm("rsqrt.approx.f32 $0, $1;", "=f,f", (x,), (Float32,), memory=False)


def exponential(x: Float32) -> Float32:
    """e ** x, approximate: ``exp2`` of a rounded product, so good for small x."""
    return exp2(multiply(x, Float32(LOG2_E)))


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + e ** -x), approximate; 0 below about -87."""
    return reciprocal(add(exp2(multiply(x, Float32(-LOG2_E))), Float32(1.0)))


def warp_sum(x: Float32) -> Float32:
    """The sum over a warp's 32 lanes, the same bits in each; every lane must take part."""
    for distance in (16, 8, 4, 2, 1):
        code = "shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;"
        x = add(x, asm(code, "=f,f,r", (x, Int32(distance)), (Float32,)))
    return x


# ---- Barriers of a CTA.


def barrier(number: int = 0, threads: int = 0) -> None:
    """Wait until ``threads`` threads (0: all of the CTA) are at barrier ``number``."""
    asm(f"bar.sync {number}, {threads};" if threads else f"bar.sync {number};", "")


def barrier_warp() -> None:
    """Order the memory accesses of a warp's lanes."""
    asm("bar.warp.sync 0xffffffff;", "")


# ---- mbarriers: 8 aligned bytes of shared memory each.


def mbarrier_init(at: Int32, arrivals: int) -> None:
    """Make a barrier whose phase ends after ``arrivals`` arrivals and all expected bytes."""
    asm("mbarrier.init.shared::cta.b64 [$0], $1;", "r,r", (at, Int32(arrivals)))


def mbarrier_init_fence() -> None:
    """Show new mbarriers to the asynchronous proxy; then a CTA barrier shows them to the others."""
    asm("fence.mbarrier_init.release.cluster;", "")


def mbarrier_expect(at: Int32, size: Any) -> None:
    """Arrive, and let the phase wait for ``size`` bytes of copies."""
    asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "r,r", (at, Int32(size)))


def mbarrier_arrive(at: Int32) -> None:
    """Arrive once."""
    asm("mbarrier.arrive.shared::cta.b64 _, [$0];", "r", (at,))


def mbarrier_wait(at: Int32, parity: Int32) -> None:
    """Wait for the end of the phase of that parity: 0 for a barrier's first phase, 1 for its second."""
    code = (
        "{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; "
        "@done bra READY; bra AGAIN; READY: }"
    )
    asm(code, "r,r", (at, parity))


# ---- Bulk copies: addresses and sizes are multiples of 16 bytes; one thread issues.


def bulk_load(to: Int32, source: Int64, size: Any, mbarrier: Int32) -> None:
    """Copy ``size`` bytes from global to shared memory; they count toward the mbarrier's phase."""
    code = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    asm(code, "r,l,r,r", (to, source, Int32(size), mbarrier))


def bulk_store(to: Int64, source: Int32, size: Any) -> None:
    """Copy ``size`` bytes from shared to global memory, as part of the thread's open group.

    Whoever wrote the source must have passed ``fence_async`` and then a barrier with this thread.
    """
    asm("cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", "l,r,r", (to, source, Int32(size)))


def bulk_commit() -> None:
    """Close the thread's group of bulk stores."""
    asm("cp.async.bulk.commit_group;", "")


def bulk_wait_read(groups: int = 0) -> None:
    """Wait until all but the last ``groups`` groups of this thread have read their shared source."""
    asm(f"cp.async.bulk.wait_group.read {groups};", "")


def fence_async() -> None:
    """Show this thread's accesses of shared memory so far to later asynchronous copies and MMAs."""
    asm("fence.proxy.async.shared::cta;", "")


# ---- Dependent launches.


def wait_for_earlier_kernels() -> None:
    """Before this, read nothing that a kernel launched earlier writes, and write nothing that it reads."""
    asm("griddepcontrol.wait;", "")


def start_later_kernels() -> None:
    """Let the next kernel of the stream start its prologue once every CTA has called this or ended."""
    asm("griddepcontrol.launch_dependents;", "")
