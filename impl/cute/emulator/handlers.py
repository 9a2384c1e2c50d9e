"""Lowering rules: per first word of an opcode, what its statements become.

Every opcode, modifier and operand must be understood whole; whatever is not raises an
``EmulatorError`` of kind unsupported with the statement and its line. Nothing is guessed.
"""

from collections.abc import Callable

from impl.cute.emulator import asynchronous
from impl.cute.emulator.isa import COMPARISONS, LANES, NONE, Op
from impl.cute.emulator.lowering import Lowering, Operands, vector
from impl.cute.emulator.opcodes import IGNORED, NARROW, PLAIN, Narrow
from impl.cute.emulator.parse import WIDTHS, Operand, Pair, Statement


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
    if combine:  # a destination may be the operand that the result is combined with
        other = work.temporary(1)
        work.emit(Op.MOV1, dst=other, a=work.read(args[3], 1))
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
            work.emit(Op[f"{combine[0].upper()}1"], dst=place, a=value, b=other)
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


def _ld(work: Lowering, mods: list[str], args: Operands) -> None:
    space, count, kind = _memory(work, mods)
    size, names = WIDTHS[kind], vector(args[0])
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
    size, values = WIDTHS[kind], vector(args[1])
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
    if len(values) != (2 if kinds[0] == "cas" else 1):
        raise work.refuse("number of operands")
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
    "mbarrier": asynchronous.mbarrier,
    "fence": asynchronous.fence,
    "griddepcontrol": asynchronous.griddepcontrol,
    "cp": asynchronous.copy,
    "ldmatrix": asynchronous.matrix,
    "stmatrix": asynchronous.matrix,
    "tcgen05": asynchronous.tcgen05,
    "wgmma": asynchronous.wgmma,
    "lop3": _lop3,
    "bra": _bra,
    "ret": _end,
    "exit": _end,
    "trap": _trap,
    "activemask": _activemask,
}
"""Per first word of an opcode, what lowers it."""


def _sixteen_bits(work: Lowering, narrow: Narrow, args: Operands) -> None:
    shift = narrow.op in (Op.SHL4, Op.SHR_S4, Op.SHR_U4)
    if len(args) != 1 + narrow.sources + shift:
        raise work.refuse("number of operands")
    places = [_widened(work, x, narrow.signed) for x in args[1 : 1 + narrow.sources]]
    places += [work.read(x, 4) for x in args[1 + narrow.sources :]]
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
