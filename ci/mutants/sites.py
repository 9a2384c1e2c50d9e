"""The places of a module where operators apply: what stands there, and what takes its place.

Only code is looked at: not docstrings, annotations, messages of exceptions, f-strings, decorators,
imports, nor defaults of parameters.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, ParentNodeProvider, PositionProvider

from ci.mutants import operators, operators_places, operators_statements, operators_values
from ci.mutants.operator import OPERATORS, Place, Scope
from ci.mutants.reach import MODULE

__all__ = ["OPERATORS", "Mutant", "function_text", "mutants_of", "planted"]
_RULES = (operators, operators_values, operators_places, operators_statements)
"""Loaded so that ``OPERATORS`` is whole."""
_SKIPPED = (
    cst.Annotation,
    cst.FormattedString,
    cst.Decorator,
    cst.Import,
    cst.ImportFrom,
    cst.Raise,
    cst.Assert,
)
_ASKED = (
    *(
        cst.BinaryOperation,
        cst.BooleanOperation,
        cst.UnaryOperation,
        cst.Comparison,
        cst.IfExp,
        cst.Call,
        cst.Arg,
    ),
    *(
        cst.Name,
        cst.Attribute,
        cst.Subscript,
        cst.BaseNumber,
        cst.Assign,
        cst.AugAssign,
        cst.SimpleStatementLine,
    ),
)
"""Kinds of node that operators change; most nodes are none."""
_LONGEST = 90
"""Letters of a text in a key; longer ones are cut, with a digest of the whole."""


@dataclass(frozen=True)
class Mutant:
    """One fault: ``new`` in place of the text from ``start`` to ``end`` of a module.

    ``operations`` are those that reach the function. ``id`` names it in this text of the module;
    ``key`` also after lines were added elsewhere: by function, operator and the text itself, and by a
    number where the function holds that text more than once.
    """

    module: str
    line: int
    column: int
    operator: str
    variant: str
    function: str
    start: int
    end: int
    old: str
    new: str
    device: bool = True
    ordinal: int = 1
    twin: int = 1
    operations: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """``module:line:column:operator:variant``, and ``:2`` for the second that begins there, and so on."""
        place = f"{self.module}:{self.line}:{self.column}:{self.operator}:{self.variant}"
        return place if self.twin == 1 else f"{place}:{self.twin}"

    @property
    def key(self) -> str:
        """``module function operator:variant `text` number``."""
        text = " ".join(self.old.split())
        if len(text) > _LONGEST:
            text = f"{text[:_LONGEST]}.. {hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
        return f"{self.module} {self.function} {self.operator}:{self.variant} `{text}` {self.ordinal}"


def planted(source: str, mutant: Mutant) -> str:
    """The module with the fault in it."""
    if source[mutant.start : mutant.end] != mutant.old:
        raise ValueError(f"{mutant.id} does not fit {mutant.module}: its text has changed")
    return source[: mutant.start] + mutant.new + source[mutant.end :]


def mutants_of(
    module: str, source: str, functions: Mapping[str, tuple[bool, tuple[str, ...]]]
) -> tuple[Mutant, ...]:
    """Every mutant of a module, in the order of the text, each text once.

    ``functions`` holds, by qualified name, those that may be changed: whether they run in a kernel,
    and the operations that reach them.
    """
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    walk = _Walk(module, source, functions, wrapper.module)
    wrapper.visit(walk)
    found = sorted(walk.found, key=lambda each: (each.start, each.end))
    counts: dict[tuple[str, str, str, str], int] = {}
    twins: dict[str, int] = {}
    seen: set[tuple[int, int, str]] = set()
    result = []
    for mutant in found:
        change = _least(mutant)
        if change in seen:
            continue
        seen.add(change)
        text = (mutant.function, mutant.operator, mutant.variant, " ".join(mutant.old.split()))
        counts[text] = counts.get(text, 0) + 1
        twins[mutant.id] = twins.get(mutant.id, 0) + 1
        result.append(replace(mutant, ordinal=counts[text], twin=twins[mutant.id]))
    return tuple(result)


def _least(mutant: Mutant) -> tuple[int, int, str]:
    """The change without what is the same at its ends, so that one change found twice is one."""
    old, new = mutant.old, mutant.new
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    return mutant.start + head, mutant.end - tail, new[head : len(new) - tail]


class _Walk(cst.CSTVisitor):
    """Asks every operator at every node of the functions that may be changed."""

    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider)

    def __init__(
        self,
        module: str,
        source: str,
        functions: Mapping[str, tuple[bool, tuple[str, ...]]],
        tree: cst.Module,
    ) -> None:
        super().__init__()
        self.found: list[Mutant] = []
        self._module, self._source, self._functions, self._tree = module, source, functions, tree
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._path: list[str] = []
        self._scopes: list[Scope] = []

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        self._path.append(node.name.value)
        return True

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self._path.pop()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        if not self._scopes:  # one within another is part of it
            name = ".".join((*self._path, node.name.value))
            device = self._functions[name][0] if name in self._functions else False
            names = tuple(_names(node))
            constants = tuple(_constants(node, self._tree))
            self._scopes.append(Scope(name, device, names, constants))
        else:
            self._scopes.append(self._scopes[-1])
        return self._scopes[-1].function in self._functions

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self._scopes.pop()

    def visit_Param(self, node: cst.Param) -> bool:
        return False

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, _SKIPPED) or _is_text(node):
            return False
        if isinstance(node, _ASKED):
            scope = self._scopes[-1] if self._scopes else self._of_module(node)
            if scope is not None and scope.function in self._functions:
                self._ask(node, scope)
        return super().on_visit(node)

    def _of_module(self, node: cst.CSTNode) -> Scope | None:
        """A module's own numbers are part of what uses them."""
        if MODULE not in self._functions or self._path:
            return None
        return Scope(MODULE, device=False) if isinstance(node, cst.BaseNumber) else None

    def _ask(self, node: cst.CSTNode, scope: Scope) -> None:
        place = Place(scope, self._tree.code_for_node, self._parent, self._refusal(node))
        for each in OPERATORS.values():
            for variant, new in each.rule(node, place):
                start, end = self._span(node)
                if each.name == "order":
                    start, end, new = self._swapped(node)
                old = self._source[start:end]
                if old != new:
                    self._add(each.name, variant, scope, (start, end), new)

    def _add(self, name: str, variant: str, scope: Scope, span: tuple[int, int], new: str) -> None:
        line = max(i for i, first in enumerate(self._lines) if first <= span[0])
        self.found.append(
            Mutant(
                module=self._module,
                line=line + 1,
                column=span[0] - self._lines[line] + 1,
                operator=name,
                variant=variant,
                function=scope.function,
                start=span[0],
                end=span[1],
                old=self._source[span[0] : span[1]],
                new=new,
                device=scope.device,
                operations=self._functions[scope.function][1],
            )
        )

    def _parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        found = self.get_metadata(ParentNodeProvider, node, None)
        return found if isinstance(found, cst.CSTNode) else None

    def _span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Offsets of a node, its own parentheses apart."""
        place = self.get_metadata(PositionProvider, node)
        assert isinstance(place, CodeRange)
        ends = [self._lines[each.line - 1] + each.column for each in (place.start, place.end)]
        return ends[0], ends[1]

    def _swapped(self, node: cst.CSTNode) -> tuple[int, int, str]:
        """A statement and the next one the other way round."""
        block = self._parent(node)
        assert isinstance(block, cst.IndentedBlock)
        lines = list(block.body)
        start, end = self._span(node)
        first, last = self._span(lines[lines.index(node) + 1])  # type: ignore[arg-type]
        between = self._source[end:first]
        return start, last, self._source[first:last] + between + self._source[start:end]

    def _refusal(self, node: cst.CSTNode) -> int:
        """Whether the node lies in the condition of an ``if`` that raises, and on which side."""
        sign, child = 1, node
        parent = self._parent(node)
        while parent is not None and not isinstance(parent, cst.BaseStatement):
            if isinstance(parent, cst.UnaryOperation) and isinstance(parent.operator, cst.Not):
                sign = -sign
            child, parent = parent, self._parent(parent)
        inside = isinstance(parent, cst.If) and parent.test is child and _raises(parent)
        return sign if inside else 0


def _raises(check: cst.If) -> bool:
    for line in check.body.body:
        if isinstance(line, cst.SimpleStatementLine) and any(isinstance(x, cst.Raise) for x in line.body):
            return True
    return False


def _is_text(node: cst.CSTNode) -> bool:
    """A docstring, or any other statement that is but text."""
    return isinstance(node, cst.Expr) and isinstance(node.value, cst.SimpleString | cst.ConcatenatedString)


def _names(function: cst.FunctionDef) -> Iterator[str]:
    """Parameters and assigned names, each once."""
    finder = _Names()
    function.visit(finder)
    yield from dict.fromkeys(finder.names)


class _Names(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def visit_Param(self, node: cst.Param) -> None:
        self.names.append(node.name.value)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        self._take(node.target)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        self._take(node.target)

    def visit_For(self, node: cst.For) -> None:
        self._take(node.target)

    def _take(self, node: cst.BaseExpression) -> None:
        if isinstance(node, cst.Name):
            self.names.append(node.value)
        elif isinstance(node, cst.Tuple):
            for element in node.elements:
                self._take(element.value)


def _constants(function: cst.FunctionDef, tree: cst.Module) -> Iterator[str]:
    """Parameters that are compile-time constants by their annotation or, in capitals, by custom."""
    for param in function.params.params:
        said = tree.code_for_node(param.annotation.annotation) if param.annotation else ""
        if "constexpr" in said.lower() and param.name.value.isupper():
            yield param.name.value


def function_text(source: str, mutant: Mutant, around: int = 1) -> list[str]:
    """The fault as lines of a diff: ``-`` and ``+`` with some lines around."""
    changed = planted(source, mutant)
    first = source.count("\n", 0, mutant.start)
    last = source.count("\n", 0, mutant.end)
    grown = mutant.new.count("\n") - mutant.old.count("\n")
    old, new = source.splitlines(), changed.splitlines()
    lines = [f"  {line}" for line in old[max(0, first - around) : first]]
    lines += [f"- {line}" for line in old[first : last + 1]]
    lines += [f"+ {line}" for line in new[first : last + 1 + grown]]
    return lines + [f"  {line}" for line in old[last + 1 : last + 1 + around]]
