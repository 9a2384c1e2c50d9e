"""Operators on conditions: masks, edges, null tests, clamps, flags and the host's checks.

Those on values, addresses and statements are in the modules beside. A rule proposes whatever fits
the text; what does not change the module, or does not load, is dropped or set aside later.
"""

import re

import libcst as cst

from ci.mutants.operator import Place, Proposals, atom, binary, called, number, operator, positional

_NULL = re.compile(r"(?i).*null.*|.*pad_slot.*|_below_all_slots")
_SLOT = re.compile(r"(?i).*(slot|source|final|boundary|state_idx|cache_idx|block_id).*")
_EDGES: dict[type[cst.BaseCompOp], str] = {
    cst.LessThan: "<=",
    cst.LessThanEqual: "<",
    cst.GreaterThan: ">=",
    cst.GreaterThanEqual: ">",
}
_OPPOSITES: dict[type[cst.BaseCompOp], str] = {
    cst.Equal: "!=",
    cst.NotEqual: "==",
    cst.Is: "is not",
    cst.IsNot: "is",
    cst.In: "not in",
    cst.NotIn: "in",
}
_WIDER = (cst.LessThan, cst.GreaterThan)
"""Comparisons that hold more often with their edge than without."""


def _joined(node: cst.Comparison, place: Place, index: int, sign: str) -> str:
    """A comparison with another sign at one place."""
    parts = [place.code(node.left)]
    for i, target in enumerate(node.comparisons):
        own = sign if i == index else place.code(target.operator).strip()
        parts += [own, place.code(target.comparator)]
    return " ".join(parts)


@operator("mask-term", 5, 25, 27, does="drop one side of a conjunction")
def mask_term(node: cst.CSTNode, place: Place) -> Proposals:
    """``a & b`` and ``a and b``, but not of a check that raises: those would only refuse more, or less."""
    if place.refusal:
        return
    conjunction = isinstance(node, cst.BooleanOperation) and isinstance(node.operator, cst.And)
    if isinstance(node, cst.BinaryOperation | cst.BooleanOperation) and (
        conjunction or binary(node, cst.BitAnd)
    ):
        yield "without-left", place.code(node.right)
        yield "without-right", place.code(node.left)


@operator("or-term", 9, 25, does="drop one side of a disjunction, or make it a conjunction")
def or_term(node: cst.CSTNode, place: Place) -> Proposals:
    """``a | b`` in kernels, ``a or b`` anywhere outside checks."""
    if place.refusal:
        return
    if place.device and (both := binary(node, cst.BitOr)):
        yield "without-left", place.code(both.right)
        yield "without-right", place.code(both.left)
        yield "and", f"{place.code(both.left)} & {place.code(both.right)}"
    if isinstance(node, cst.BooleanOperation) and isinstance(node.operator, cst.Or):
        yield "without-left", place.code(node.right)
        yield "without-right", place.code(node.left)


@operator("access-mask", 5, 25, 27, does="drop the mask of a load or a store")
def access_mask(node: cst.CSTNode, place: Place) -> Proposals:
    """``tl.load`` and ``tl.store``; a load loses what it takes in masked places too."""
    if not isinstance(node, cst.Call) or called(node) not in ("load", "store"):
        return
    words = [each.keyword.value if each.keyword else "" for each in node.args]
    if "mask" in words:
        kept = [a for a, word in zip(node.args, words, strict=True) if word not in ("mask", "other")]
        args = ", ".join(place.code(a.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for a in kept)
        yield called(node), f"{place.code(node.func)}({args})"


@operator("load-other", 5, does="another value where a load is masked")
def load_other(node: cst.CSTNode, place: Place) -> Proposals:
    """The keyword ``other``."""
    if isinstance(node, cst.Arg) and node.keyword is not None and node.keyword.value == "other":
        yield "one", "other=1" if "NULL" in place.code(node.value) else "other=1.0"


@operator("comparison-edge", 25, 26, does="take the edge into a comparison, or out of it")
def comparison_edge(node: cst.CSTNode, place: Place) -> Proposals:
    """In a check that raises only so that it refuses more: one that is weaker changes no valid call."""
    if not isinstance(node, cst.Comparison):
        return
    for i, target in enumerate(node.comparisons):
        sign = _EDGES.get(type(target.operator))
        tighter = isinstance(target.operator, _WIDER) == (place.refusal > 0)
        if sign and (not place.refusal or tighter):
            yield f"{i + 1}", _joined(node, place, i, sign)


@operator("comparison-opposite", 3, 20, 28, does="turn an equality or an identity around")
def comparison_opposite(node: cst.CSTNode, place: Place) -> Proposals:
    """``==``, ``is`` and ``in``; checks that raise have an operator of their own."""
    if isinstance(node, cst.Comparison) and not place.refusal:
        for i, target in enumerate(node.comparisons):
            if sign := _OPPOSITES.get(type(target.operator)):
                yield f"{i + 1}", _joined(node, place, i, sign)


@operator("null-test", 7, 9, does="test for null slots otherwise: only null, all but null, never, always")
def null_test(node: cst.CSTNode, place: Place) -> Proposals:
    """A comparison with null, or of a slot with 0."""
    if not isinstance(node, cst.Comparison) or len(node.comparisons) != 1 or not place.device:
        return
    left, right = place.code(node.left), place.code(node.comparisons[0].comparator)
    slot = _SLOT.fullmatch(left) and number(node.comparisons[0].comparator) == 0
    if not (_NULL.fullmatch(right) or slot) or isinstance(node.comparisons[0].operator, cst.Is | cst.IsNot):
        return
    below = isinstance(node.comparisons[0].operator, cst.LessThanEqual | cst.LessThan | cst.Equal)
    exact = isinstance(node.comparisons[0].operator, cst.Equal | cst.NotEqual)
    if not exact:
        yield "exact", f"{left} {'==' if below else '!='} {right}"
    yield "never", f"{left} {'!=' if below else '=='} {left}"
    yield "always", f"{left} {'==' if below else '!='} {left}"


@operator("clamp", 2, 25, 26, does="take one side of a minimum or a maximum, or the other of the two")
def clamp(node: cst.CSTNode, place: Place) -> Proposals:
    """``minimum``, ``maximum``, ``min``, ``max``."""
    name, other = called(node), {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min"}
    if not isinstance(node, cst.Call) or name not in other or len(positional(node)) != 2:
        return
    first, second = (place.code(each) for each in positional(node))
    yield "first", atom(first)
    yield "second", atom(second)
    yield other[name], place.code(node.with_changes(func=_renamed(node.func, other[name])))


def _renamed(func: cst.BaseExpression, name: str) -> cst.BaseExpression:
    if isinstance(func, cst.Attribute):
        return func.with_changes(attr=cst.Name(name))
    return cst.Name(name)


@operator("select", 5, 26, does="take one arm of a choice, or swap them")
def select(node: cst.CSTNode, place: Place) -> Proposals:
    """``tl.where``, CuTe's ``select_``, and ``a if c else b``."""
    if isinstance(node, cst.IfExp):
        yield "first", atom(place.code(node.body))
        yield "second", atom(place.code(node.orelse))
    if isinstance(node, cst.Call) and called(node) in ("where", "select_") and len(positional(node)) == 3:
        condition, first, second = (place.code(each) for each in positional(node))
        yield "first", atom(first)
        yield "second", atom(second)
        yield "swapped", f"{place.code(node.func)}({condition}, {second}, {first})"


@operator("flag", 20, 28, does="turn a compile-time flag around")
def flag(node: cst.CSTNode, place: Place) -> Proposals:
    """``if FLAG`` in kernels, and ``True`` or ``False`` anywhere but as ``strict``, which only asserts."""
    around = place.parent(node)
    if isinstance(node, cst.Name) and node.value in ("True", "False"):
        named = around.keyword.value if isinstance(around, cst.Arg) and around.keyword else ""
        if named != "strict":
            yield "literal", "False" if node.value == "True" else "True"
        return
    if not place.device or not isinstance(node, cst.Name | cst.Attribute | cst.Call):
        return
    if isinstance(around, cst.If | cst.IfExp) and around.test is node:
        constexpr = called(node) == "const_expr"
        text = place.code(node.args[0].value) if isinstance(node, cst.Call) and constexpr else ""
        if constexpr:
            yield "opposite", f"cutlass.const_expr(not {atom(text)})"
        elif isinstance(node, cst.Name):
            yield "opposite", f"not {node.value}"


@operator("host-check", 28, does="refuse what a check lets through")
def host_check(node: cst.CSTNode, place: Place) -> Proposals:
    """The condition of an ``if`` that raises, turned around."""
    check = place.parent(node)
    if isinstance(check, cst.If) and check.test is node and place.refusal and not place.device:
        yield "opposite", f"not ({place.code(node)})"


@operator("loop-bound", 25, 26, does="one iteration less or more at either end, or another step")
def loop_bound(node: cst.CSTNode, place: Place) -> Proposals:
    """Any kind of ``range``."""
    names = ("range", "static_range", "range_constexpr")
    if not isinstance(node, cst.Call) or called(node) not in names or not place.device:
        return
    ends = [place.code(each) for each in positional(node)]
    rest = [place.code(a.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for a in node.args if a.keyword]

    def written(*values: str) -> str:
        return f"{place.code(node.func)}({', '.join((*values, *rest))})"

    if len(ends) == 1:
        yield "late-start", written("1", ends[0])
        yield "early-end", written(f"{atom(ends[0])} - 1")
        yield "late-end", written(f"{atom(ends[0])} + 1")
    elif len(ends) > 1:
        yield "early-start", written(f"{atom(ends[0])} - 1", *ends[1:])
        yield "late-start", written(f"{atom(ends[0])} + 1", *ends[1:])
        yield "early-end", written(ends[0], f"{atom(ends[1])} - 1", *ends[2:])
        yield "late-end", written(ends[0], f"{atom(ends[1])} + 1", *ends[2:])
    if len(ends) == 3:
        yield "step", written(*ends[:2], "1")
