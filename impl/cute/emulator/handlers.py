"""Lowering rules: per first word of an opcode, what its statements become.

Every opcode, modifier and operand must be understood whole; whatever is not raises an
``EmulatorError`` of kind unsupported with the statement and its line. Nothing is guessed.
"""

import re
from collections.abc import Callable

from impl.cute.emulator.isa import COMPARISONS, LANES, NONE, Op
from impl.cute.emulator.lowering import Lowering
from impl.cute.emulator.opcodes import IGNORED, NARROW, PLAIN, Narrow
from impl.cute.emulator.parse import WIDTHS, Address, Operand, Pair, Statement

Operands = tuple[Operand, ...]


def _mov(work: Lowering, mods: list[str], args: Operands) -> None:
    width = _only_width(work, mods)
    to, source = args
    if isinstance(source, tuple):
        part = width // len(source)
        listed = work.listed([work.read(x, part) for x in source])
        work.emit(Op.PACK, dst=work.write(to, width), size=part, **listed)
    elif isinstance(to, tuple):
        part = width // len(to)
        place = work.read(source, width)
        work.emit(Op.UNPACK, a=place, size=part, **work.listed([work.write(x, part) for x in to]))
    elif source in ("%clock", "%clock64", "%globaltimer"):
        work.emit(Op.CLOCK, dst=work.write(to, width), size=width)
    else:
        work.emit(Op[f"MOV{width}"], dst=work.write(to, width), a=work.read(source, width))


def _only_width(work: Lowering, mods: list[str]) -> int:
    if len(mods) != 1 or mods[0] not in WIDTHS:
        raise work.refuse("instruction")
    return WIDTHS[mods[0]]


def _cvta(work: Lowering, mods: list[str], args: Operands) -> None:
    if mods not in (["param", "u64"], ["to", "global", "u64"], ["global", "u64"]):
        raise work.refuse("address conversion")
    work.emit(Op.MOV8, dst=work.write(args[0], 8), a=work.read(args[1], 8))


_SETS = {
    "s32": Op.SET_S4,
    "u32": Op.SET_U4,
    "b32": Op.SET_U4,
    "s64": Op.SET_S8,
    "u64": Op.SET_U8,
    "b64": Op.SET_U8,
    "f32": Op.SET_F,
}


def _setp(work: Lowering, mods: list[str], args: Operands) -> None:
    comparison, *combine, kind = mods
    comparison = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(comparison, comparison)
    op = _SETS.get(kind)
    known = COMPARISONS if kind == "f32" else COMPARISONS[:6]
    narrow = kind in ("s16", "u16", "b16")
    if narrow:
        op = Op.SET_S4 if kind == "s16" else Op.SET_U4
    if op is None or comparison not in known or (combine and combine not in (["and"], ["or"], ["xor"])):
        raise work.refuse("comparison")
    width = WIDTHS[kind]
    first, second = (args[0].first, args[0].second) if isinstance(args[0], Pair) else (args[0], "_")
    read = (lambda x: _widened(work, x, kind == "s16")) if narrow else (lambda x: work.read(x, width))
    fields = {"a": read(args[1]), "b": read(args[2])}
    to = work.write(first, 1)
    result = to if not combine and to != NONE and second == "_" else work.temporary(1)
    work.emit(op, dst=result, imm=COMPARISONS.index(comparison), **fields)
    sides = [(first, result)]
    if second != "_":
        opposite = work.temporary(1)
        work.emit(Op.NOT1, dst=opposite, a=result)
        sides.append((second, opposite))
    for name, value in sides:
        place = work.write(name, 1)
        if place in (NONE, value):
            continue
        if combine:
            work.emit(Op[f"{combine[0].upper()}1"], dst=place, a=value, b=work.read(args[3], 1))
        else:
            work.emit(Op.MOV1, dst=place, a=value)


_HINTS = frozenset(("nc", "cg", "ca", "cs", "lu", "cv", "wb", "wt", "relaxed", "gpu", "cta", "sys", "weak"))


def _memory(work: Lowering, mods: list[str]) -> tuple[str, int, str]:
    """Space, count and type of a load or store."""
    *mods, kind = mods
    space, count = "", 1
    for mod in mods:
        if mod in ("global", "shared", "shared::cta", "param"):
            space = mod.partition("::")[0]
        elif mod in ("v2", "v4"):
            count = int(mod[1])
        elif mod not in _HINTS and not mod.startswith(("L1::", "L2::")):
            raise work.refuse(f"modifier .{mod}")
    if not space or kind not in WIDTHS or kind == "pred":
        raise work.refuse("state space or type")
    return space, count, kind


def _vector(operand: Operand) -> Operands:
    return operand if isinstance(operand, tuple) else (operand,)


def _ld(work: Lowering, mods: list[str], args: Operands) -> None:
    space, count, kind = _memory(work, mods)
    size, names = WIDTHS[kind], _vector(args[0])
    if len(names) != count:
        raise work.refuse("vector length")
    places, widened = [], []
    for name in names:
        held = size if name == "_" else work.entry.registers.get(str(name), 0)
        if held == size:
            places.append(work.write(name, size))
        elif (size, held) in ((2, 4), (4, 8)):
            places.append(work.temporary(size))
            sign = "S" if kind[0] == "s" else "Z"
            widened.append((Op[f"{sign}EXT_{size}_{held}"], work.write(name, held), places[-1]))
        else:
            raise work.refuse(f"load of {size} bytes into a register of {held}")
    if space == "param":
        start = work.parameter_offset(args[1])
        for i, place in enumerate(places):
            if place != NONE:
                work.emit(Op[f"MOV{size}"], dst=place, a=work.parameter(start + i * size, size))
    else:
        base, offset = work.address(args[1], 8 if space == "global" else 4)
        op = Op.LD_GLOBAL if space == "global" else Op.LD_SHARED
        work.emit(op, a=base, imm=offset, size=size, **work.listed(places))
    for op, to, place in widened:
        work.emit(op, dst=to, a=place)


def _st(work: Lowering, mods: list[str], args: Operands) -> None:
    space, count, kind = _memory(work, mods)
    size, values = WIDTHS[kind], _vector(args[1])
    if len(values) != count or space == "param":
        raise work.refuse("store")
    places = [work.read(value, size) for value in values]
    base, offset = work.address(args[0], 8 if space == "global" else 4)
    op = Op.ST_GLOBAL if space == "global" else Op.ST_SHARED
    work.emit(op, a=base, imm=offset, size=size, **work.listed(places))


_ATOMIC = frozenset(("relaxed", "acq_rel", "acquire", "release", "gpu", "cta", "sys", "global"))


def _atom(work: Lowering, mods: list[str], args: Operands, *, returns: bool = True) -> None:
    kinds = [m for m in mods if m in ("add", "exch", "cas")]
    rest = (
        set(mods) - set(kinds) - {"relaxed", "acq_rel", "acquire", "release", "gpu", "cta", "sys", "global"}
    )
    if "global" not in mods or len(kinds) != 1 or rest not in ({"u32"}, {"s32"}, {"b32"}):
        raise work.refuse("atomic")
    to = work.write(args[0], 4) if returns else NONE
    memory, *values = args[1:] if returns else args
    base, offset = work.address(memory, 8)
    fields = dict(zip("bc", (work.read(value, 4) for value in values), strict=False))
    work.emit(Op[f"ATOM_{kinds[0].upper()}"], dst=to, a=base, imm=offset, **fields)


def _red(work: Lowering, mods: list[str], args: Operands) -> None:
    _atom(work, mods, args, returns=False)


def _whole_warp(work: Lowering, mask: Operand) -> None:
    if work.literal(mask) & 0xFFFFFFFF != 0xFFFFFFFF:
        raise work.refuse("a collective of part of a warp")


def _shfl(work: Lowering, mods: list[str], args: Operands) -> None:
    if len(mods) != 3 or mods[0] != "sync" or mods[2] not in ("b32", "f32"):
        raise work.refuse("shuffle")
    op = {"bfly": Op.SHFL_BFLY, "idx": Op.SHFL_IDX, "up": Op.SHFL_UP, "down": Op.SHFL_DOWN}.get(mods[1])
    if op is None or work.literal(args[3]) != (0 if op == Op.SHFL_UP else 31):
        raise work.refuse("shuffle within parts of a warp")
    _whole_warp(work, args[4])
    first, second = (args[0].first, args[0].second) if isinstance(args[0], Pair) else (args[0], "_")
    a, b = work.read(args[1], 4), work.read(args[2], 4)
    work.emit(op, dst=work.write(first, 4), dst2=work.write(second, 1), a=a, b=b)


def _elect(work: Lowering, mods: list[str], args: Operands) -> None:
    if mods != ["sync"] or not isinstance(args[0], Pair):
        raise work.refuse("election")
    _whole_warp(work, args[1])
    work.emit(Op.ELECT, dst=work.write(args[0].first, 4), dst2=work.write(args[0].second, 1))


_VOTES = {"sync.any.pred": Op.VOTE_ANY, "sync.all.pred": Op.VOTE_ALL, "sync.ballot.b32": Op.BALLOT}


def _vote(work: Lowering, mods: list[str], args: Operands) -> None:
    op = _VOTES.get(".".join(mods))
    if op is None:
        raise work.refuse("vote")
    _whole_warp(work, args[2])
    work.emit(op, dst=work.write(args[0], 4 if op == Op.BALLOT else 1), a=work.read(args[1], 1))


def _bar(work: Lowering, mods: list[str], args: Operands) -> None:
    if mods == ["warp", "sync"]:
        _whole_warp(work, args[0])
        work.emit(Op.BAR_WARP)
        return
    if mods and mods[0] == "cta":
        mods = mods[1:]
    op = {"sync": Op.BAR_SYNC, "arrive": Op.BAR_ARRIVE}.get(mods[0]) if mods else None
    if op is None or mods[1:] not in ([], ["aligned"]):
        raise work.refuse("barrier")
    count = work.literal(args[1]) if len(args) > 1 else 0
    if count % LANES:
        raise work.refuse("a barrier of part of a warp")
    work.emit(op, imm=work.literal(args[0]), count=count)


_SCOPES = frozenset(("acquire", "release", "relaxed", "cta", "cluster", "shared", "shared::cta", "b64"))


def _mbarrier(work: Lowering, mods: list[str], args: Operands) -> None:
    what = [m for m in mods if m not in _SCOPES]
    if "b64" not in mods:
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


def _fence(work: Lowering, mods: list[str], args: Operands) -> None:
    if mods[:2] != ["proxy", "async"] or mods[2:] not in ([], ["shared::cta"], ["global"]):
        raise work.refuse("fence")
    if mods[2:] != ["global"]:
        work.emit(Op.FENCE_PROXY)


def _griddepcontrol(work: Lowering, mods: list[str], args: Operands) -> None:
    if mods != ["wait"]:
        raise work.refuse("grid dependency control")
    work.emit(Op.DEPENDENCY_WAIT)


_TENSOR = re.compile(
    r"async\.bulk\.tensor\.(\d)d\.shared::(?:cluster|cta)\.global(?:\.tile)?"
    r"\.mbarrier::complete_tx::bytes"
)


def _cp(work: Lowering, mods: list[str], args: Operands) -> None:
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


def _matrix(work: Lowering, mods: list[str], args: Operands) -> None:
    transposed = "trans" in mods
    rest = [m for m in mods if m != "trans"]
    count = {"x1": 1, "x2": 2, "x4": 4}.get(rest[3]) if len(rest) == 6 else None
    shape = rest[:3] == ["sync", "aligned", "m8n8"] and rest[5] == "b16"
    if count is None or not shape or rest[4] not in ("shared", "shared::cta"):
        raise work.refuse("matrix fragment")
    load = work.now is not None and work.now.opcode.startswith("ldmatrix")
    fragments, memory = (args[0], args[1]) if load else (args[1], args[0])
    places = [work.write(x, 4) if load else work.read(x, 4) for x in _vector(fragments)]
    if len(places) != count:
        raise work.refuse("vector length")
    base, offset = work.address(memory, 4)
    op = Op.LDMATRIX if load else Op.STMATRIX
    work.emit(op, a=base, imm=offset, size=int(transposed), **work.listed(places))


def _tcgen05(work: Lowering, mods: list[str], args: Operands) -> None:
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
        places = [work.write(x, 4) for x in _vector(args[0])]
        if len(places) != int(found.group(1)):
            raise work.refuse("vector length")
        base, offset = work.address(args[1], 4)
        work.emit(Op.TC_LOAD, a=base, imm=offset, **work.listed(places))
    else:
        raise work.refuse("tensor core instruction")


def _wgmma(work: Lowering, mods: list[str], args: Operands) -> None:
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
        places = [work.write(x, 4) for x in _vector(accumulators)]
        if n % 8 or len(places) != n // 2 or [work.literal(x) for x in rest] != [1, 1, 0, 0]:
            raise work.refuse("shape, sign or transposition of a warpgroup product")
        if isinstance(a, tuple):
            raise work.refuse("a warpgroup product with A in registers")
        listed = [work.read(a, 8), work.read(b, 8), work.read(accumulate, 1), *places]
        work.emit(Op.WG_MMA, imm=n, **work.listed(listed))
    else:
        raise work.refuse("warpgroup instruction")


def _lop3(work: Lowering, mods: list[str], args: Operands) -> None:
    if mods != ["b32"] or len(args) != 5:
        raise work.refuse("logic operation")
    a, b, c = (work.read(x, 4) for x in args[1:4])
    work.emit(Op.LOP3, dst=work.write(args[0], 4), a=a, b=b, c=c, imm=work.literal(args[4]))


def _bra(work: Lowering, mods: list[str], args: Operands) -> None:
    if mods not in ([], ["uni"]):
        raise work.refuse("branch")
    assert work.now is not None
    work.branch(work.now.label)


def _end(work: Lowering, mods: list[str], args: Operands) -> None:
    if mods or args:
        raise work.refuse("end of the kernel")
    work.emit(Op.EXIT)


def _trap(work: Lowering, mods: list[str], args: Operands) -> None:
    if mods or args:
        raise work.refuse("trap")
    work.emit(Op.TRAP)


def _activemask(work: Lowering, mods: list[str], args: Operands) -> None:
    raise work.refuse("activemask (it depends on how lanes are scheduled)")


HANDLERS: dict[str, Callable[[Lowering, list[str], Operands], None]] = {
    "mov": _mov,
    "cvta": _cvta,
    "setp": _setp,
    "ld": _ld,
    "st": _st,
    "atom": _atom,
    "red": _red,
    "shfl": _shfl,
    "elect": _elect,
    "vote": _vote,
    "bar": _bar,
    "barrier": _bar,
    "mbarrier": _mbarrier,
    "fence": _fence,
    "griddepcontrol": _griddepcontrol,
    "cp": _cp,
    "ldmatrix": _matrix,
    "stmatrix": _matrix,
    "tcgen05": _tcgen05,
    "wgmma": _wgmma,
    "lop3": _lop3,
    "bra": _bra,
    "ret": _end,
    "exit": _end,
    "trap": _trap,
    "activemask": _activemask,
}
"""Per first word of an opcode, what lowers it."""


def _sixteen_bits(work: Lowering, narrow: Narrow, args: Operands) -> None:
    places = [_widened(work, x, narrow.signed) for x in args[1 : 1 + narrow.sources]]
    places += [work.read(x, 4) for x in args[1 + narrow.sources :]]
    if len(places) > 3:
        raise work.refuse("number of operands")
    result = work.temporary(4) if narrow.dst == 2 else work.write(args[0], 4)
    work.emit(narrow.op, dst=result, **dict(zip("abc", places, strict=False)))
    if narrow.dst == 2:
        work.emit(Op.TRUNC_4_2, dst=work.write(args[0], 2), a=result)


def _widened(work: Lowering, operand: Operand, signed: bool) -> int:
    to = work.temporary(4)
    work.emit(Op.SEXT_2_4 if signed else Op.ZEXT_2_4, dst=to, a=work.read(operand, 2))
    return to


def lower_statement(work: Lowering, statement: Statement) -> None:
    """Emit the instructions of a statement."""
    if statement.opcode in IGNORED:
        return
    plain = PLAIN.get(statement.opcode)
    if plain is not None and len(statement.operands) == 1 + len(plain.sources):
        places = [work.read(x, w) for x, w in zip(statement.operands[1:], plain.sources, strict=True)]
        fields = dict(zip("abc", places, strict=False))
        work.emit(plain.op, dst=work.write(statement.operands[0], plain.dst), imm=plain.imm, **fields)
        return
    if statement.opcode in NARROW:
        _sixteen_bits(work, NARROW[statement.opcode], statement.operands)
        return
    name, *modifiers = statement.opcode.split(".")
    handler = HANDLERS.get(name)
    if handler is None:
        raise work.refuse("instruction")
    handler(work, modifiers, statement.operands)
