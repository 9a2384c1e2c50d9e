"""A program's instructions as Python objects."""

from dataclasses import dataclass

import numpy as np

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.isa import CONVERGED, LEADER, Op
from impl.cute.emulator.program import Program


@dataclass(frozen=True, eq=False, slots=True)
class Instruction:
    """One instruction (fields as in ``isa.INSTRUCTION``), its operand list resolved, with its source text."""

    op: Op
    line: int
    guard: int
    negate: int
    dst: int
    dst2: int
    a: int
    b: int
    c: int
    size: int
    count: int
    operands: tuple[int, ...]
    target: int
    leader: bool
    converged: bool
    imm: int
    source: str

    def located(
        self, error: EmulatorError, cta: tuple[int, int, int] | None, warp: int | None
    ) -> EmulatorError:
        """The error, said to have happened here; one that has a place keeps it."""
        if error.cta is not None:
            return error
        return EmulatorError(error.kind, error.text, self.line, self.source, cta, warp)


_LISTED = frozenset(
    (
        Op.PACK, Op.UNPACK, Op.LD_GLOBAL, Op.ST_GLOBAL, Op.LD_SHARED, Op.ST_SHARED, Op.BULK_LOAD,
        Op.BULK_STORE, Op.TMA_LOAD, Op.CP_ASYNC, Op.LDMATRIX, Op.STMATRIX, Op.TC_MMA, Op.TC_LOAD, Op.WG_MMA,
    )
)  # fmt: skip


def instructions(program: Program) -> list[Instruction]:
    """The instructions of a program."""
    operands = np.asarray(program.operands).tolist()
    return [_instruction(record, operands, program.source) for record in program.instructions]


def _instruction(record: np.void, operands: list[int], source: dict[int, str]) -> Instruction:
    field = {name: int(record[name]) for name in record.dtype.names or ()}
    op, flags, first = Op(field["op"]), field["flags"], field["list"]
    listed = tuple(operands[first : first + field["count"]]) if op in _LISTED else ()
    names = ("line", "guard", "negate", "dst", "dst2", "a", "b", "c", "size", "count", "target", "imm")
    return Instruction(
        op=op,
        operands=listed,
        leader=bool(flags & LEADER),
        converged=bool(flags & CONVERGED),
        source=source.get(field["line"], ""),
        **{name: field[name] for name in names},
    )
