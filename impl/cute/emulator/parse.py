"""PTX text to statements: scopes, registers, labels, operands. What they mean is ``program``'s matter.

The subset is what NVVM and inline assembly of the CuTe DSL emit: one entry, registers and labels
in nested scopes, dynamic shared memory. Anything else is refused with its line.
"""

import re
from dataclasses import dataclass
from typing import TypeAlias

from impl.cute.emulator.errors import EmulatorError, unsupported

WIDTHS = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4,
    "u32": 4, "s32": 4, "f32": 4, "bf16x2": 4, "f16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8,
}  # fmt: skip
"""Bytes of a value of each type."""
REGISTER_TYPES = ("pred", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")


@dataclass(frozen=True)
class Address:
    """``[base + offset]``, of a tensor copy with coordinates."""

    base: str
    offset: int = 0
    coordinates: "tuple[Operand, ...] | None" = None


@dataclass(frozen=True)
class Pair:
    """A destination ``first|second``; an underscore drops one."""

    first: str
    second: str


@dataclass(frozen=True)
class Not:
    """A negated predicate operand."""

    name: str


Operand: TypeAlias = "str | Address | Pair | Not | tuple[Operand, ...]"
"""A register, symbol or number as text, or one of the compound forms; a tuple is a vector."""


@dataclass
class Statement:
    """One instruction. ``guard`` is a predicate and whether it is negated; ``label`` a branch's target."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[str, bool] | None
    line: int
    text: str
    label: str = ""


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: ``size`` bytes at ``offset`` of the parameter block."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Entry:
    """The kernel: registers by unique name with their width in bytes, and labels before statements."""

    name: str
    target: str
    parameters: tuple[Parameter, ...]
    registers: dict[str, int]
    statements: tuple[Statement, ...]
    labels: dict[str, int]
    shared: frozenset[str]
    threads: tuple[int, int, int] | None


_HEADER = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\s*\((.*?)\)\s*((?:\.\w+[^{]*?)?)\{", re.S)
_PARAMETER = re.compile(r"\s*\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?\s*$")
_SHARED = re.compile(r"\.extern\s+\.shared\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[\]")
_STATIC = re.compile(r"^\s*(?:\.visible\s+|\.extern\s+)?\.(global|const|shared|local)\b.*$", re.M)
_LABEL = re.compile(r"([\w$]+):(?!:)")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)")
_RANGE = re.compile(r"(.*)<(\d+)>$")
_GUARD = re.compile(r"@(!?)([%\w$]+)\s+")
_ADDRESS = re.compile(r"([%\w$]+)\s*(?:\+\s*(-?\w+))?$")
_IGNORED = (".pragma", ".loc", ".file")


def parse(text: str) -> Entry:
    """Read a module's only entry; ``EmulatorError`` of kind unsupported names what is not understood."""
    text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found.group(0).count("\n"), text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    header = _HEADER.search(text)
    if header is None:
        raise unsupported("the text has no .visible .entry")
    if _HEADER.search(text, header.end()):
        raise unsupported("the text has more than one entry")
    for found in _STATIC.finditer(text[: header.start()]):
        if not _SHARED.search(found.group(0)):
            raise unsupported(
                f"memory declared in the module: {found.group(0).strip()}", _line(text, found.start())
            )
    target = re.search(r"\.target\s+(\w+)", text)
    reader = _Body(text, header.end())
    reader.read()
    threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", header.group(3))
    return Entry(
        name=header.group(1),
        target=target.group(1) if target else "",
        parameters=_parameters(header.group(2)),
        registers=reader.registers,
        statements=tuple(reader.statements),
        labels=reader.labels,
        shared=frozenset(_SHARED.findall(text)),
        threads=_triple(threads.groups()) if threads else None,
    )


def _triple(groups: tuple[str | None, ...]) -> tuple[int, int, int]:
    x, y, z = (int(group or 1) for group in groups)
    return x, y, z


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _parameters(text: str) -> tuple[Parameter, ...]:
    result: list[Parameter] = []
    at = 0
    for part in filter(str.strip, text.split(",")):
        found = _PARAMETER.match(part)
        if found is None:
            raise unsupported(f"parameter {part.strip()!r}")
        align, kind, name, count = found.groups()
        width = WIDTHS[kind]
        at = -(-at // int(align or width)) * int(align or width)
        result.append(Parameter(name, at, width * int(count or 1)))
        at += result[-1].size
    return tuple(result)


class _Body:
    """Reads an entry's body: a scope stack for registers and labels, statements up to the last brace."""

    def __init__(self, text: str, position: int) -> None:
        self._text, self._at, self._line = text, position, _line(text, position)
        self._scopes: list[tuple[int, dict[str, str]]] = [(0, {})]
        self._made = 0
        self._labels: dict[tuple[int, str], str] = {}
        self._branches: list[tuple[Statement, tuple[int, ...]]] = []
        self.registers: dict[str, int] = {}
        self.statements: list[Statement] = []
        self.labels: dict[str, int] = {}

    def read(self) -> None:
        """Read up to the brace that closes the entry, then resolve the branches."""
        while self._scopes:
            self._one()
        for statement, scopes in self._branches:
            wanted = str(statement.operands[0])
            found = [self._labels[s, wanted] for s in reversed(scopes) if (s, wanted) in self._labels]
            if not found:
                raise unsupported(f"no label {wanted}", statement.line, statement.text)
            statement.label = found[0]

    def _one(self) -> None:
        if self._at >= len(self._text):
            raise unsupported("the entry has no closing brace", self._line)
        char = self._text[self._at]
        if char == "\n":
            self._line += 1
        if char.isspace() or char == ";":
            self._at += 1
        elif char == "{":
            self._made += 1
            self._scopes.append((self._made, {}))
            self._at += 1
        elif char == "}":
            self._scopes.pop()
            self._at += 1
        elif label := _LABEL.match(self._text, self._at):
            scope = self._scopes[-1][0]
            name = f"{label.group(1)}@{scope}" if scope else label.group(1)
            self._labels[scope, label.group(1)] = name
            self.labels[name] = len(self.statements)
            self._at = label.end()
        else:
            end = self._text.find(";", self._at)
            if end < 0:
                raise unsupported("a statement has no end", self._line)
            raw, line = self._text[self._at : end], self._line
            self._line += raw.count("\n")
            self._at = end + 1
            self._statement(" ".join(raw.split()), line)

    def _statement(self, text: str, line: int) -> None:
        if found := _REGISTERS.match(text):
            self._declare(found.group(1), found.group(2), line, text)
            return
        if text.startswith(_IGNORED):
            return
        if text.startswith("."):
            raise unsupported("directive", line, text)
        whole, guard = text, None
        if found := _GUARD.match(text):
            guard = (self._register(found.group(2)), bool(found.group(1)))
            text = text[found.end() :]
        opcode, _, rest = text.partition(" ")
        try:
            operands = tuple(_operand(part) for part in _split(rest))
        except EmulatorError as error:
            raise unsupported(error.text, line, whole) from None
        except ValueError:
            raise unsupported("operands", line, whole) from None
        branch = opcode.split(".")[0] == "bra"
        statement = Statement(
            opcode, operands if branch else tuple(map(self._resolve, operands)), guard, line, whole
        )
        self.statements.append(statement)
        if branch:
            self._branches.append((statement, tuple(scope for scope, _ in self._scopes)))

    def _declare(self, kind: str, names: str, line: int, text: str) -> None:
        if kind not in REGISTER_TYPES:
            raise unsupported(f"registers of type .{kind}", line, text)
        for name in (part.strip() for part in names.split(",")):
            found = _RANGE.match(name)
            for each in [f"{found.group(1)}{i}" for i in range(int(found.group(2)))] if found else [name]:
                scope, table = self._scopes[-1]
                table[each] = f"{each}@{scope}" if scope else each
                self.registers[table[each]] = WIDTHS[kind]

    def _register(self, name: str) -> str:
        for _, table in reversed(self._scopes):
            if name in table:
                return table[name]
        return name

    def _resolve(self, operand: Operand) -> Operand:
        match operand:
            case Address(base, offset, coordinates):
                inner = None if coordinates is None else tuple(map(self._resolve, coordinates))
                return Address(self._register(base), offset, inner)
            case Pair(first, second):
                return Pair(self._register(first), self._register(second))
            case Not(name):
                return Not(self._register(name))
            case tuple():
                return tuple(map(self._resolve, operand))
        return self._register(operand)


def _split(text: str) -> list[str]:
    """Operands at the commas outside of brackets."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    return [part.strip() for part in [*parts, current] if part.strip()]


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(_operand(part) for part in _split(text[1:-1]))
    if text.startswith("["):
        inner = _split(text[1:-1])
        found = _ADDRESS.match(inner[0])
        if found is None or len(inner) > 2:
            raise unsupported(f"address {text}")
        coordinates = _operand(inner[1]) if len(inner) > 1 else None
        assert coordinates is None or isinstance(coordinates, tuple)
        return Address(found.group(1), int(found.group(2), 0) if found.group(2) else 0, coordinates)
    if text.startswith("!"):
        return Not(text[1:])
    if "|" in text:
        first, second = text.split("|")
        return Pair(first.strip(), second.strip())
    return text
