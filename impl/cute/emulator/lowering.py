"""What every lowering rule uses: the register file's layout, operands, emitting instructions."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from impl.cute.emulator.errors import EmulatorError, unsupported
from impl.cute.emulator.isa import CONVERGED, LANES, NONE, PARAM_BASE, SHARED_BASE, SPECIALS, Op
from impl.cute.emulator.parse import Address, Entry, Not, Operand, Statement

_COLLECTIVE = frozenset(
    (
        Op.SHFL_BFLY, Op.SHFL_IDX, Op.SHFL_UP, Op.SHFL_DOWN, Op.ELECT, Op.VOTE_ANY, Op.VOTE_ALL, Op.BALLOT,
        Op.BAR_WARP, Op.BAR_SYNC, Op.BAR_ARRIVE, Op.LDMATRIX, Op.STMATRIX, Op.TC_ALLOC, Op.TC_DEALLOC,
        Op.TC_LOAD, Op.TC_WAIT_LOAD, Op.WG_FENCE, Op.WG_MMA, Op.WG_COMMIT, Op.WG_WAIT,
    )
)  # fmt: skip
_ALIGN = 64
"""Byte alignment of a register in the register file."""


Operands = tuple[Operand, ...]


@dataclass
class Files:
    """The register file's layout: names and constants to byte offsets."""

    size: int = 0
    places: dict[str, int] = field(default_factory=dict)
    constants: dict[tuple[int, int], int] = field(default_factory=dict)
    parameters: dict[tuple[int, int], int] = field(default_factory=dict)
    specials: dict[str, int] = field(default_factory=dict)
    predicates: list[int] = field(default_factory=list)

    def take(self, width: int) -> int:
        """A new register of ``width`` bytes a lane."""
        at = self.size
        self.size += -(-LANES * width // _ALIGN) * _ALIGN
        if width == 1:
            self.predicates.append(at)
        return at


class Lowering:
    """One kernel being lowered: the code so far, and the statement at hand."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.files = Files()
        self.code: list[dict[str, int]] = []
        self.operands: list[int] = []
        self.branches: list[tuple[int, str]] = []
        self.now: Statement | None = None
        self._offsets = {p.name: p for p in entry.parameters}
        for name, width in entry.registers.items():
            self.files.places[name] = self.files.take(width)

    @contextmanager
    def at(self, statement: Statement) -> Iterator[None]:
        """Lower one statement: its line and guard go into every instruction emitted meanwhile."""
        self.now = statement
        try:
            yield
        finally:
            self.now = None

    def emit(self, op: Op, **fields: int) -> None:
        """Append an instruction under the current statement's guard."""
        now = self.now
        guard = self.read(now.guard[0], 1) if now and now.guard else NONE
        record = {"op": int(op), "line": now.line if now else 0, "guard": guard}
        record["negate"] = int(bool(now and now.guard and now.guard[1]))
        for name in ("dst", "dst2", "a", "b", "c"):
            record[name] = fields.pop(name, NONE)
        record["flags"] = CONVERGED if op in _COLLECTIVE else 0
        self.code.append(record | fields)

    def refuse(self, what: str) -> EmulatorError:
        """The error for the current statement."""
        now = self.now
        return unsupported(what, now.line if now else 0, now.text if now else "")

    def temporary(self, width: int) -> int:
        """A register of the lowering's own."""
        return self.files.take(width)

    def listed(self, offsets: list[int]) -> dict[str, int]:
        """The fields that name an operand list."""
        at = len(self.operands)
        self.operands += offsets
        return {"list": at, "count": len(offsets)}

    def constant(self, value: int, width: int) -> int:
        """The place of a constant in all lanes."""
        key = (int(value != 0) if width == 1 else value & ((1 << 8 * width) - 1), width)
        if key not in self.files.constants:
            self.files.constants[key] = self.files.take(width)
        return self.files.constants[key]

    def read(self, operand: Operand, width: int) -> int:
        """The place of a source operand of ``width`` bytes a lane."""
        if isinstance(operand, Not):
            if width != 1:
                raise self.refuse(f"negated operand !{operand.name}")
            to = self.temporary(1)
            now, guard = self.now, None
            if now is not None:
                guard, now.guard = now.guard, None
            self.emit(Op.NOT1, dst=to, a=self.read(operand.name, 1))
            if now is not None:
                now.guard = guard
            return to
        if not isinstance(operand, str):
            raise self.refuse(f"operand {operand}")
        if operand in self.entry.registers:
            return self._narrowed(operand, width)
        if operand in SPECIALS:
            return self._special(operand, width)
        number = self._number(operand)
        if number is None:
            raise self.refuse(f"operand {operand}")
        return self.constant(number, width)

    def _narrowed(self, name: str, width: int) -> int:
        held, place = self.entry.registers[name], self.files.places[name]
        if held == width:
            return place
        if (held, width) in ((8, 4), (4, 2)):
            to = self.temporary(width)
            self.emit(Op[f"TRUNC_{held}_{width}"], dst=to, a=place)
            return to
        raise self.refuse(f"{held}-byte register {name} as a {width}-byte operand")

    def _special(self, name: str, width: int) -> int:
        if width != 4:
            raise self.refuse(f"{name} as a {width}-byte operand")
        if name not in self.files.specials:
            self.files.specials[name] = self.files.take(4)
        return self.files.specials[name]

    def _number(self, text: str) -> int | None:
        if text in self._offsets:
            return PARAM_BASE + self._offsets[text].offset
        if text in self.entry.shared:
            return SHARED_BASE
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return int(text[2:], 16)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0|[1-9]\d*)U?", text):
            return int(text.rstrip("U"), 0)
        return {"WARP_SZ": LANES}.get(text)

    def literal(self, operand: Operand) -> int:
        """An operand that must be an integer in the text."""
        number = self._number(operand) if isinstance(operand, str) else None
        if number is None:
            raise self.refuse(f"operand {operand} where a number is needed")
        return number

    def write(self, operand: Operand, width: int) -> int:
        """The place of a destination of exactly ``width`` bytes, or NONE for an underscore."""
        if operand == "_":
            return NONE
        if not isinstance(operand, str) or self.entry.registers.get(operand) != width:
            raise self.refuse(f"destination {operand} for {width} bytes")
        return self.files.places[operand]

    def address(self, operand: Operand, width: int) -> tuple[int, int]:
        """Place of an address's base and its offset."""
        if not isinstance(operand, Address) or operand.coordinates is not None:
            raise self.refuse(f"address {operand}")
        return self.read(operand.base, width), operand.offset

    def computed(self, operand: Operand, width: int) -> int:
        """Place of a whole address, its offset added."""
        base, offset = self.address(operand, width)
        if not offset:
            return base
        to = self.temporary(width)
        self.emit(Op.ADD8 if width == 8 else Op.ADD4, dst=to, a=base, b=self.constant(offset, width))
        return to

    def parameter(self, offset: int, size: int) -> int:
        """Place of a parameter's bytes."""
        if (offset, size) not in self.files.parameters:
            self.files.parameters[offset, size] = self.files.take(size)
        return self.files.parameters[offset, size]

    def parameter_offset(self, operand: Operand) -> int:
        """Offset in the parameter block that an address names."""
        if not isinstance(operand, Address) or operand.base not in self._offsets:
            raise self.refuse(f"parameter {operand}")
        if not 0 <= operand.offset < self._offsets[operand.base].size:
            raise self.refuse(f"{operand.offset} bytes into a parameter")
        return self._offsets[operand.base].offset + operand.offset

    def branch(self, label: str) -> None:
        """A branch to a label, under the guard."""
        self.branches.append((len(self.code), label))
        self.emit(Op.BRA)


def vector(operand: Operand) -> Operands:
    """The elements of a vector operand, or the operand alone."""
    return operand if isinstance(operand, tuple) else (operand,)
