"""Operators on addresses and launches: strides, index sources, constants, arguments, grids."""

import re

import libcst as cst

from ci.mutants.operator import Place, Proposals, binary, called, number, operator, positional

_STRIDE = re.compile(
    r"[a-z].*(stride.*|_(token|row|step|slot|head|dim|channel|column|tap|part|pos|seq|width))|pitch|inner"
)
_INDEX = re.compile(
    r"(?i)(row|slot|source|final|boundary|record|request|head|layer|channel|token|t|part|block|first|begin|"
    r"position|program|i_\w+|\w*idx\w*|cs|ks|vs|feats|seq\w*|place|probe|own|at|item|warp|lane|stage)"
)
_MOST = 2
"""Names tried in place of one."""


def _others(name: str, names: tuple[str, ...], kind: re.Pattern[str]) -> list[str]:
    """Names of the kind near one: those that share a part of it first, then those that follow it."""
    of_kind = [each for each in names if each != name and kind.fullmatch(each)]
    parts = set(name.split("_"))
    place = names.index(name) if name in names else 0

    def nearness(each: str) -> tuple[int, int]:
        return -len(parts & set(each.split("_"))), (names.index(each) - place) % len(names)

    return sorted(of_kind, key=nearness)[:_MOST]


def _factor_of(node: cst.CSTNode, place: Place) -> bool:
    around = place.parent(node)
    return around is not None and binary(around, cst.Multiply) is not None


@operator("stride-swap", 10, 11, 12, does="multiply by another stride")
def stride_swap(node: cst.CSTNode, place: Place) -> Proposals:
    """A stride's name as a factor, for one that shares a word with it."""
    names = place.scope.names
    if not isinstance(node, cst.Name) or not place.device or not _factor_of(node, place):
        return
    if _STRIDE.fullmatch(node.value) and not _INDEX.fullmatch(node.value) and node.value in names:
        for other in _others(node.value, names, _STRIDE):
            if not _INDEX.fullmatch(other):
                yield other, other


@operator("index-source", 1, 3, does="index by another of the kernel's indices")
def index_source(node: cst.CSTNode, place: Place) -> Proposals:
    """An index's name as a factor of a stride, or as an address's term."""
    names = place.scope.names
    if not isinstance(node, cst.Name) or not place.device or node.value not in names:
        return
    around = place.parent(node)
    if around is not None and binary(around, cst.Multiply, cst.Add) and _INDEX.fullmatch(node.value):
        for other in _others(node.value, names, _INDEX):
            yield other, other


@operator("constexpr-swap", 11, 20, does="take another of the kernel's compile-time constants")
def constexpr_swap(node: cst.CSTNode, place: Place) -> Proposals:
    """A constant that counts something, in arithmetic, a comparison or a shape."""
    constants = place.scope.constants
    if not isinstance(node, cst.Name) or node.value not in constants or not place.device:
        return
    around = place.parent(node)
    if isinstance(around, cst.If | cst.IfExp | cst.Assign | cst.AssignTarget | cst.Param | cst.Arg):
        return
    for other in _others(node.value, constants, re.compile("[A-Z][A-Z0-9_]*")):
        yield other, other


@operator("grid-axis", 3, 16, does="read another axis of the grid")
def grid_axis(node: cst.CSTNode, place: Place) -> Proposals:
    """``tl.program_id``."""
    if isinstance(node, cst.Call) and called(node) == "program_id":
        values = [each.value for each in node.args]
        if len(values) == 1 and (axis := number(values[0])) is not None:
            yield "next", f"{place.code(node.func)}({(axis + 1) % 3})"


@operator("host-stride", 10, 12, 14, does="pass another stride, or that of a dense tensor")
def host_stride(node: cst.CSTNode, place: Place) -> Proposals:
    """``x.stride(i)`` and ``*x.stride()`` on the host."""
    if place.device or place.refusal or not isinstance(node, cst.Call) or called(node) != "stride":
        return
    if not isinstance(node.func, cst.Attribute):
        return
    owner, axes = place.code(node.func.value), positional(node)
    if not node.args:
        yield "dense", f"{owner}.contiguous().stride()"
    elif len(axes) == 1 and (axis := number(axes[0])) is not None:
        yield "dense", f"{owner}.contiguous().stride({axis})"
        if axis > 0:
            yield "other", f"{owner}.stride({axis - 1})"


@operator("subscript", 11, 12, does="the neighbour of a numbered part")
def subscript(node: cst.CSTNode, place: Place) -> Proposals:
    """``x.shape[1]``, ``inputs[3]``."""
    if not isinstance(node, cst.Subscript) or place.refusal or len(node.slice) != 1:
        return
    index = node.slice[0].slice
    if isinstance(index, cst.Index) and (value := number(index.value)) is not None:
        yield "next", f"{place.code(node.value)}[{value + 1}]"
        if value > 0:
            yield "previous", f"{place.code(node.value)}[{value - 1}]"


@operator("argument", 10, 12, does="swap two neighbouring arguments")
def argument(node: cst.CSTNode, place: Place) -> Proposals:
    """Of launches and of calls in kernels that take at least three."""
    if not isinstance(node, cst.Call) or len(node.args) < 3:
        return
    launch = isinstance(node.func, cst.Subscript)
    if not (launch or (place.device and isinstance(node.func, cst.Name))):
        return
    args = [a.with_changes(comma=cst.MaybeSentinel.DEFAULT) for a in node.args]
    texts = [place.code(each) for each in args]
    for i in range(len(args) - 1):
        simple = all(not a.star and a.keyword is None for a in args[i : i + 2])
        if simple and texts[i] != texts[i + 1]:
            swapped = [*texts[:i], texts[i + 1], texts[i], *texts[i + 2 :]]
            yield f"{i + 1}", f"{place.code(node.func)}({', '.join(swapped)})"
