"""What an operator is: a rule that proposes small faults at nodes of a module's syntax tree."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import libcst as cst

Proposals = Iterator[tuple[str, str]]
"""(variant, text to put in the node's place)."""


@dataclass(frozen=True)
class Scope:
    """What is known of the function around a node.

    ``device``: it runs in a kernel. ``names`` are its parameters and what it assigns, in order of
    appearance, ``constants`` those among them that are compile-time constants.
    """

    function: str
    device: bool
    names: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """A node's surroundings, as operators may ask for them.

    ``refusal`` is 1 within the condition of a check that raises, -1 there below an odd number of
    ``not``, else 0.
    """

    scope: Scope
    code: Callable[[cst.CSTNode], str]
    parent: Callable[[cst.CSTNode], cst.CSTNode | None]
    refusal: int = 0

    @property
    def device(self) -> bool:
        """Whether the node is part of a kernel."""
        return self.scope.device


Rule = Callable[[cst.CSTNode, Place], Proposals]
R = TypeVar("R", bound=Callable[..., Proposals])


@dataclass(frozen=True)
class Operator:
    """A named rule, the classes of FAULT_CLASSES.md that its faults belong to, and what it does."""

    name: str
    classes: tuple[int, ...]
    does: str
    rule: Rule


OPERATORS: dict[str, Operator] = {}
"""Every operator by name, in the order of the table."""


def operator(name: str, *classes: int, does: str) -> Callable[[R], R]:
    """Register the rule below it."""

    def register(rule: R) -> R:
        assert name not in OPERATORS
        OPERATORS[name] = Operator(name, classes, does, rule)
        return rule

    return register


def called(node: cst.CSTNode) -> str:
    """The last part of the name that a call calls; nothing for other nodes."""
    if not isinstance(node, cst.Call):
        return ""
    if isinstance(node.func, cst.Name):
        return node.func.value
    return node.func.attr.value if isinstance(node.func, cst.Attribute) else ""


def positional(call: cst.Call) -> list[cst.BaseExpression]:
    """A call's positional arguments; none if some are starred."""
    if any(each.star for each in call.args):
        return []
    return [each.value for each in call.args if each.keyword is None]


def atom(text: str) -> str:
    """The text as an operand of whatever stands around it."""
    try:
        node = cst.parse_expression(text)
    except cst.ParserSyntaxError:
        return text
    plain = (cst.Name, cst.Attribute, cst.Subscript, cst.Call, cst.BaseNumber, cst.BaseString, cst.Tuple)
    wrapped = getattr(node, "lpar", ())
    return text if wrapped or (isinstance(node, plain) and not isinstance(node, cst.Tuple)) else f"({text})"


def number(node: cst.CSTNode) -> int | None:
    """The value of an integer literal."""
    if isinstance(node, cst.Integer):
        return int(node.value, 0)
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        inner = number(node.expression)
        return None if inner is None else -inner
    return None


def binary(node: cst.CSTNode, *kinds: type[cst.BaseBinaryOp]) -> cst.BinaryOperation | None:
    """The node if it is a binary operation of one of these kinds."""
    return node if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, kinds) else None
