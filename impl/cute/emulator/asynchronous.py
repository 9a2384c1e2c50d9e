"""Lowering rules of what runs beside the warps: mbarriers, copies, tensor cores, and their fences."""

import re

from impl.cute.emulator.isa import NONE, Op
from impl.cute.emulator.lowering import Lowering, Operands, vector
from impl.cute.emulator.parse import Address

_SCOPES = frozenset(("acquire", "release", "relaxed", "cta", "cluster", "shared", "shared::cta", "b64"))


def mbarrier(work: Lowering, mods: list[str], args: Operands) -> None:
    """Barriers in shared memory."""
    what = [m for m in mods if m not in _SCOPES]
    if "b64" not in mods or ("relaxed" in mods and what != ["expect_tx"]):
        raise work.refuse("mbarrier")
    match what:
        case ["init"]:
            base, offset = work.address(args[0], 4)
            work.emit(Op.MBAR_INIT, a=base, imm=offset, b=work.read(args[1], 4))
        case ["inval"]:
            base, offset = work.address(args[0], 4)
            work.emit(Op.MBAR_INVAL, a=base, imm=offset)
        case ["arrive"] | ["arrive", "expect_tx"]:
            base, offset = work.address(args[1], 4)
            extra = work.read(args[2], 4) if len(args) > 2 else NONE
            fields = {"c": extra} if "expect_tx" in what else {"b": extra}
            work.emit(Op.MBAR_ARRIVE, dst=work.write(args[0], 8), a=base, imm=offset, **fields)
        case ["expect_tx"]:
            base, offset = work.address(args[0], 4)
            work.emit(Op.MBAR_EXPECT, a=base, imm=offset, c=work.read(args[1], 4))
        case ["try_wait" | "test_wait", "parity"]:
            base, offset = work.address(args[1], 4)
            op = Op.MBAR_TRY_WAIT if what[0] == "try_wait" else Op.MBAR_TEST_WAIT
            work.emit(op, dst=work.write(args[0], 1), a=base, imm=offset, b=work.read(args[2], 4))
        case _:
            raise work.refuse("mbarrier")


def fence(work: Lowering, mods: list[str], args: Operands) -> None:
    """The proxy fence: generic writes become visible to asynchronous reads; that of new mbarriers."""
    if mods == ["mbarrier_init", "release", "cluster"]:
        work.emit(Op.FENCE_MBARRIER)
        return
    if mods[:2] != ["proxy", "async"] or mods[2:] not in ([], ["shared::cta"], ["global"]):
        raise work.refuse("fence")
    if mods[2:] != ["global"]:
        work.emit(Op.FENCE_PROXY)


def griddepcontrol(work: Lowering, mods: list[str], args: Operands) -> None:
    """The wait for the kernels that the launch depends on."""
    if mods != ["wait"]:
        raise work.refuse("grid dependency control")
    work.emit(Op.DEPENDENCY_WAIT)


_TENSOR = re.compile(
    r"async\.bulk\.tensor\.(\d)d\.shared::(?:cluster|cta)\.global(?:\.tile)?"
    r"\.mbarrier::complete_tx::bytes"
)


def copy(work: Lowering, mods: list[str], args: Operands) -> None:
    """Bulk and tensor copies, and those of Ampere."""
    name = ".".join(mods)
    hint = name.endswith(".L2::cache_hint")
    name = name.removesuffix(".L2::cache_hint")
    if name == "async.bulk.commit_group":
        work.emit(Op.BULK_COMMIT)
    elif name in ("async.bulk.wait_group", "async.bulk.wait_group.read"):
        work.emit(Op.BULK_WAIT, imm=work.literal(args[0]), count=int(name.endswith(".read")))
    elif (
        re.fullmatch(r"async\.bulk\.shared::(cluster|cta)\.global\.mbarrier::complete_tx::bytes", name)
        and len(args) == 4 + hint
    ):
        listed = [work.computed(args[0], 4), work.computed(args[1], 8)]
        listed += [work.read(args[2], 4), work.computed(args[3], 4)]
        work.emit(Op.BULK_LOAD, **work.listed(listed))
    elif name == "async.bulk.global.shared::cta.bulk_group" and len(args) == 3 + hint:
        listed = [work.computed(args[0], 8), work.computed(args[1], 4), work.read(args[2], 4)]
        work.emit(Op.BULK_STORE, **work.listed(listed))
    elif found := re.fullmatch(
        r"async\.bulk\.tensor\.(\d)d\.shared::(?:cluster|cta)\.global(?:\.tile)?\.mbarrier::complete_tx::bytes",
        name,
    ):
        _tensor_load(work, int(found.group(1)), args, 3 + hint)
    elif found := re.fullmatch(r"async\.(ca|cg)\.shared(?:::cta)?\.global(?:\.L2::\d+B)?", name):
        size = work.literal(args[2])
        bytes_ = work.read(args[3], 4) if len(args) > 3 else NONE
        if size not in (4, 8, 16) or hint or (found.group(1) == "cg" and size != 16):
            raise work.refuse("copy size")
        listed = [work.computed(args[0], 4), work.computed(args[1], 8), bytes_]
        work.emit(Op.CP_ASYNC, size=size, **work.listed(listed))
    elif name == "async.commit_group":
        work.emit(Op.CP_ASYNC_COMMIT)
    elif name in ("async.wait_group", "async.wait_all"):
        if name == "async.wait_all":
            work.emit(Op.CP_ASYNC_COMMIT)
        work.emit(Op.CP_ASYNC_WAIT, imm=work.literal(args[0]) if args else 0)
    else:
        raise work.refuse("copy")


def _tensor_load(work: Lowering, rank: int, args: Operands, count: int) -> None:
    source = args[1]
    if not isinstance(source, Address) or source.coordinates is None or source.offset or len(args) != count:
        raise work.refuse("tensor copy")
    if len(source.coordinates) != rank:
        raise work.refuse(f"{len(source.coordinates)} coordinates of rank {rank}")
    listed = [work.computed(args[0], 4), work.read(source.base, 8), work.computed(args[2], 4)]
    listed += [work.read(x, 4) for x in source.coordinates]
    work.emit(Op.TMA_LOAD, **work.listed(listed))


def matrix(work: Lowering, mods: list[str], args: Operands) -> None:
    """``ldmatrix`` and ``stmatrix``: 8 x 8 fragments of 16-bit elements."""
    transposed = "trans" in mods
    rest = [m for m in mods if m != "trans"]
    count = {"x1": 1, "x2": 2, "x4": 4}.get(rest[3]) if len(rest) == 6 else None
    shape = rest[:3] == ["sync", "aligned", "m8n8"] and rest[5] == "b16"
    if count is None or not shape or rest[4] not in ("shared", "shared::cta"):
        raise work.refuse("matrix fragment")
    load = work.now is not None and work.now.opcode.startswith("ldmatrix")
    fragments, memory = (args[0], args[1]) if load else (args[1], args[0])
    places = [work.write(x, 4) if load else work.read(x, 4) for x in vector(fragments)]
    if len(places) != count:
        raise work.refuse("vector length")
    base, offset = work.address(memory, 4)
    op = Op.LDMATRIX if load else Op.STMATRIX
    work.emit(op, a=base, imm=offset, size=int(transposed), **work.listed(places))


def tcgen05(work: Lowering, mods: list[str], args: Operands) -> None:
    """Tensor memory and the products into it."""
    name = ".".join(mods)
    if name == "fence::before_thread_sync":
        work.emit(Op.TC_FENCE_BEFORE)
    elif name == "fence::after_thread_sync":
        work.emit(Op.TC_FENCE_AFTER)
    elif name == "wait::ld.sync.aligned":
        work.emit(Op.TC_WAIT_LOAD)
    elif name == "alloc.cta_group::1.sync.aligned.shared::cta.b32":
        base, offset = work.address(args[0], 4)
        work.emit(Op.TC_ALLOC, a=base, imm=offset, count=work.literal(args[1]))
    elif name == "dealloc.cta_group::1.sync.aligned.b32":
        work.emit(Op.TC_DEALLOC, a=work.read(args[0], 4), count=work.literal(args[1]))
    elif name == "mma.cta_group::1.kind::f16" and len(args) == 5:
        listed = [work.computed(args[0], 4), work.read(args[1], 8), work.read(args[2], 8)]
        listed += [work.read(args[3], 4), work.read(args[4], 1)]
        work.emit(Op.TC_MMA, **work.listed(listed))
    elif re.fullmatch(
        r"commit\.cta_group::1\.mbarrier::arrive::one(\.shared::cluster|\.shared::cta)?\.b64", name
    ):
        base, offset = work.address(args[0], 4)
        work.emit(Op.TC_COMMIT, a=base, imm=offset)
    elif found := re.fullmatch(r"ld\.sync\.aligned\.32x32b\.x(\d+)\.b32", name):
        places = [work.write(x, 4) for x in vector(args[0])]
        if len(places) != int(found.group(1)):
            raise work.refuse("vector length")
        base, offset = work.address(args[1], 4)
        work.emit(Op.TC_LOAD, a=base, imm=offset, **work.listed(places))
    else:
        raise work.refuse("tensor core instruction")


def wgmma(work: Lowering, mods: list[str], args: Operands) -> None:
    """Products of a warpgroup."""
    name = ".".join(mods)
    if name == "fence.sync.aligned":
        work.emit(Op.WG_FENCE)
    elif name == "commit_group.sync.aligned":
        work.emit(Op.WG_COMMIT)
    elif name == "wait_group.sync.aligned":
        work.emit(Op.WG_WAIT, imm=work.literal(args[0]))
    elif found := re.fullmatch(r"mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", name):
        n = int(found.group(1))
        accumulators, a, b, accumulate, *rest = args
        places = [work.write(x, 4) for x in vector(accumulators)]
        if n % 8 or len(places) != n // 2 or [work.literal(x) for x in rest] != [1, 1, 0, 0]:
            raise work.refuse("shape, sign or transposition of a warpgroup product")
        if isinstance(a, tuple):
            raise work.refuse("a warpgroup product with A in registers")
        listed = [work.read(a, 8), work.read(b, 8), work.read(accumulate, 1), *places]
        work.emit(Op.WG_MMA, imm=n, **work.listed(listed))
    else:
        raise work.refuse("warpgroup instruction")
