"""Programs: a kernel lowered to the instructions of ``isa``, as both engines execute it."""

from dataclasses import dataclass

import numpy as np

from impl.cute.emulator.handlers import lower_statement
from impl.cute.emulator.isa import INSTRUCTION, LANES, LEADER, Op
from impl.cute.emulator.lowering import Lowering
from impl.cute.emulator.parse import Entry, parse
from impl.cute.emulator.tensormap import BYTES


@dataclass(frozen=True, eq=False)
class Program:
    """A lowered kernel.

    ``image`` is a warp's register file at its start: poison, false predicates, constants.
    ``parameters`` are (offset in the parameter block, size, offset in the register file) of what
    an engine broadcasts into it, ``specials`` likewise the places of special registers.
    ``source`` maps lines to statements, ``tensor_maps`` are the offsets of 128-byte parameters.
    """

    name: str
    target: str
    instructions: np.ndarray
    operands: np.ndarray
    image: np.ndarray
    specials: dict[str, int]
    parameters: tuple[tuple[int, int, int], ...]
    signature: tuple[tuple[str, int, int], ...]
    param_bytes: int
    tensor_maps: tuple[int, ...]
    source: dict[int, str]
    threads: tuple[int, int, int] | None

    @staticmethod
    def parse(text: str) -> "Program":
        """Lower a module of one entry."""
        return lower(parse(text))


def lower(entry: Entry) -> Program:
    """Lower a parsed kernel; ``EmulatorError`` names the first statement that is not understood."""
    work, starts = Lowering(entry), []
    for statement in entry.statements:
        starts.append(len(work.code))
        with work.at(statement):
            try:
                lower_statement(work, statement)
            except (ValueError, IndexError, OverflowError, TypeError):
                raise work.refuse("operands") from None
    starts.append(len(work.code))
    work.emit(Op.EXIT)  # running off the end
    _link(work, {label: starts[at] for label, at in entry.labels.items()})
    return _program(work)


def _link(work: Lowering, labels: dict[str, int]) -> None:
    """Resolve branches; mark where lanes may join."""
    leaders = set(labels.values())
    for at, label in work.branches:
        work.code[at]["target"] = labels[label]
    for at, record in enumerate(work.code[:-1]):
        if record["op"] in (Op.BRA, Op.EXIT):
            leaders.add(at + 1)
    for at in leaders:
        work.code[at]["flags"] |= LEADER


def _program(work: Lowering) -> Program:
    entry, files = work.entry, work.files
    code = np.zeros(len(work.code), INSTRUCTION)
    for name in INSTRUCTION.names or ():
        code[name] = [record.get(name, 0) for record in work.code]
    image = np.full(files.size, 0xFF, np.uint8)
    for at in files.predicates:
        image[at : at + LANES] = 0
    for (value, width), at in files.constants.items():
        image[at : at + LANES * width] = np.frombuffer(value.to_bytes(width, "little") * LANES, np.uint8)
    return Program(
        name=entry.name,
        target=entry.target,
        instructions=code,
        operands=np.array(work.operands, np.int32),
        image=image,
        specials=dict(files.specials),
        parameters=tuple((offset, size, at) for (offset, size), at in files.parameters.items()),
        signature=tuple((p.name, p.offset, p.size) for p in entry.parameters),
        param_bytes=max((p.offset + p.size for p in entry.parameters), default=0),
        tensor_maps=tuple(p.offset for p in entry.parameters if p.size == BYTES),
        source=_sources(entry),
        threads=entry.threads,
    )


def _sources(entry: Entry) -> dict[int, str]:
    """Per line its statements; inline assembly puts several on one."""
    texts: dict[int, list[str]] = {}
    for statement in entry.statements:
        texts.setdefault(statement.line, []).append(statement.text)
    return {line: "; ".join(parts) for line, parts in texts.items()}
