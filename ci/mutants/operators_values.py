"""Operators on values: constants, arithmetic, functions, and where values are rounded."""

import libcst as cst

from ci.mutants.operator import Place, Proposals, atom, binary, called, number, operator, positional

_SMALL = 1e-3
_UNARY = (
    *("exp", "exp2", "log", "log2", "sigmoid", "rsqrt", "sqrt", "abs", "silu", "_silu", "softplus"),
    *("reciprocal", "reciprocal_root", "exponential"),
)
_FLOATS = (*_UNARY, "sum", "fma", "dot", "log_decay", "multiply", "add", "multiply_add")
"""Functions whose results are floats: what holds one may be rounded."""
_OTHERS = {
    "exp": "exp2",
    "exp2": "exp",
    "rsqrt": "sqrt",
    "log": "log2",
    "sum": "max",
    "multiply": "add",
    "exponential": "exp2",
    "reciprocal_root": "reciprocal",
    "reciprocal": "reciprocal_root",
}
_WIDE = ("int64", "Int64", "uint64", "Uint64")
_INTEGERS = ("int8", "int16", "int32", "int1", "uint8", "uint16", "uint32", "Int32", "Uint32")


@operator("eps", 24, does="ten times the epsilon, or none")
def eps(node: cst.CSTNode, place: Place) -> Proposals:
    """A positive literal below 0.001."""
    if isinstance(node, cst.Float) and 0.0 < float(node.value) < _SMALL:
        yield "tenfold", f"{float(node.value) * 10:g}"
        yield "none", "0.0"


@operator("constant", 21, 22, 24, does="another number")
def constant(node: cst.CSTNode, place: Place) -> Proposals:
    """Float literals, and integers that are factors, exponents or divisors."""
    if isinstance(node, cst.Float) and (float(node.value) >= _SMALL or float(node.value) == 0.0):
        value = float(node.value)
        keyword = place.parent(node)
        if value == 0.0:
            if not (isinstance(keyword, cst.Arg) and keyword.keyword is not None):
                yield "one", "1.0"
            return
        yield "half", f"{value / 2!r}"
        if value < 2:
            yield "double", f"{value * 2!r}"
    around = place.parent(node)
    value_of = number(node)
    factors = (cst.Multiply, cst.FloorDivide, cst.Modulo, cst.Power, cst.LeftShift, cst.RightShift)
    if isinstance(node, cst.Integer) and value_of and around is not None and binary(around, *factors):
        yield "one-more", str(value_of + 1)


@operator("factor", 6, 10, 12, does="drop one side of a product")
def factor(node: cst.CSTNode, place: Place) -> Proposals:
    """``a * b``, strides and scales alike, and CuTe's ``multiply(a, b)``."""
    if both := binary(node, cst.Multiply):
        yield "without-left", atom(place.code(both.right))
        yield "without-right", atom(place.code(both.left))
    if isinstance(node, cst.Call) and called(node) == "multiply" and len(positional(node)) == 2:
        first, second = (place.code(each) for each in positional(node))
        yield "without-left", atom(second)
        yield "without-right", atom(first)


@operator("term", 6, 12, does="drop one side of a sum")
def term(node: cst.CSTNode, place: Place) -> Proposals:
    """``a + b`` of anything but small numbers, and CuTe's ``add(a, b)``."""
    if (both := binary(node, cst.Add)) and number(both.right) is None and not _is_tuple(both):
        yield "without-left", atom(place.code(both.right))
        yield "without-right", atom(place.code(both.left))
    if isinstance(node, cst.Call) and called(node) == "add" and len(positional(node)) == 2:
        first, second = (place.code(each) for each in positional(node))
        yield "without-left", atom(second)
        yield "without-right", atom(first)


def _is_tuple(node: cst.BinaryOperation) -> bool:
    return any(isinstance(side, cst.Tuple | cst.BaseString) for side in (node.left, node.right))


@operator("offset", 1, 25, 26, does="forget an offset of a number, or take one more")
def offset(node: cst.CSTNode, place: Place) -> Proposals:
    """``a + 1`` and ``a - 1``."""
    both = binary(node, cst.Add, cst.Subtract)
    if both and (value := number(both.right)) is not None:
        left, sign = place.code(both.left), place.code(both.operator).strip()
        yield "dropped", atom(left)
        yield "one-more", f"{left} {sign} {value + 1}"


@operator(
    "operands", 6, 25, does="swap the sides of a difference or a quotient, or turn it into the opposite"
)
def operands(node: cst.CSTNode, place: Place) -> Proposals:
    """``-``, ``/``, ``//`` and ``%``, and the sign of ``-x``."""
    both = binary(node, cst.Subtract, cst.Divide, cst.FloorDivide, cst.Modulo)
    if both and number(both.right) is None:
        left, right = place.code(both.left), place.code(both.right)
        sign = place.code(both.operator).strip()
        if sign in "-/":
            yield "swapped", f"{atom(right)} {sign} {atom(left)}"
        if sign != "/":
            yield "other", f"{left} {({'-': '+', '//': '%', '%': '//'})[sign]} {right}"
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        if binary(node.expression, cst.FloorDivide):
            return
        yield "sign", atom(place.code(node.expression))


@operator("ceiling", 25, does="round a quotient down that must be rounded up")
def ceiling(node: cst.CSTNode, place: Place) -> Proposals:
    """``-(-a // b)``, ``cdiv(a, b)`` and ``(a + b - 1) // b``."""
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        quotient = binary(node.expression, cst.FloorDivide)
        inner = quotient.left if quotient else None
        if quotient and isinstance(inner, cst.UnaryOperation) and isinstance(inner.operator, cst.Minus):
            yield "floor", f"({place.code(inner.expression)} // {place.code(quotient.right)})"
    if isinstance(node, cst.Call) and called(node) == "cdiv" and len(positional(node)) == 2:
        first, second = (place.code(each) for each in positional(node))
        yield "floor", f"({atom(first)} // {atom(second)})"
    if (quotient := binary(node, cst.FloorDivide)) and binary(quotient.left, cst.Subtract):
        whole = place.code(quotient.left).strip("()").replace(" ", "")
        divisor = place.code(quotient.right)
        tail = f"+{divisor}-1".replace(" ", "")
        if whole.endswith(tail):
            yield "floor", f"{atom(whole.removesuffix(tail))} // {divisor}"


@operator("function", 22, 24, does="drop a function, or call its neighbour")
def function(node: cst.CSTNode, place: Place) -> Proposals:
    """Elementary functions of kernels."""
    name = called(node)
    if not isinstance(node, cst.Call) or not place.device:
        return
    if name in _UNARY and len(positional(node)) == 1:
        yield "dropped", atom(place.code(positional(node)[0]))
    if name in _OTHERS and positional(node):
        func = node.func
        other = cst.Name(_OTHERS[name])
        renamed = func.with_changes(attr=other) if isinstance(func, cst.Attribute) else other
        yield _OTHERS[name], place.code(node.with_changes(func=renamed))


@operator("axis", 11, does="reduce or broadcast along the other axis")
def axis(node: cst.CSTNode, place: Place) -> Proposals:
    """The keyword ``axis``, and ``x[:, None]`` against ``x[None, :]``."""
    if isinstance(node, cst.Arg) and node.keyword is not None and node.keyword.value == "axis":
        yield "other", f"axis={1 - (number(node.value) or 0)}"
    if isinstance(node, cst.Subscript) and place.device:
        text = "".join(place.code(each) for each in node.slice).replace(" ", "")
        if text in (":,None", "None,:"):
            yield "other", f"{place.code(node.value)}[{'None, :' if text == ':,None' else ':, None'}]"


@operator("cast", 19, 21, does="leave out a cast between floats")
def cast(node: cst.CSTNode, place: Place) -> Proposals:
    """``x.to(dtype)`` in kernels, unless the dtype is an integer."""
    if (kind := _cast_to(node, place)) and kind.rpartition(".")[2] not in (*_WIDE, *_INTEGERS):
        yield "dropped", _operand(node, place)


@operator("index-width", 13, does="compute an index in 32 bits")
def index_width(node: cst.CSTNode, place: Place) -> Proposals:
    """``x.to(tl.int64)`` left out, and ``Int64(x)``."""
    if (kind := _cast_to(node, place)) and kind.rpartition(".")[2] in _WIDE:
        yield "narrow", f"{_operand(node, place)}.to(tl.int32)"
    if isinstance(node, cst.Call) and called(node) == "Int64" and len(positional(node)) == 1 and place.device:
        yield "narrow", f"Int32({place.code(positional(node)[0])})"


def _cast_to(node: cst.CSTNode, place: Place) -> str:
    """What a cast in a kernel casts to."""
    inner = isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and called(node) == "to"
    if inner and isinstance(node, cst.Call) and place.device and len(positional(node)) == 1:
        return place.code(positional(node)[0])
    return ""


def _operand(node: cst.CSTNode, place: Place) -> str:
    assert isinstance(node, cst.Call)
    assert isinstance(node.func, cst.Attribute)
    return place.code(node.func.value)


@operator("rounding", 21, 30, does="round once more, to bf16")
def rounding(node: cst.CSTNode, place: Place) -> Proposals:
    """A Triton value that some function made, where it is assigned, added or stored."""
    if not place.device or not isinstance(node, cst.Assign | cst.AugAssign | cst.Arg):
        return
    if isinstance(node, cst.Arg):
        store = place.parent(node)
        if not (isinstance(store, cst.Call) and called(store) == "store" and store.args[1:2] == (node,)):
            return
    value = place.code(node.value)
    if not _makes_float(node.value) or "Float32" in value or "(16)" in value:
        return
    if _triton(node.value):
        start = place.code(node)[: -len(value)] if not isinstance(node, cst.Arg) else ""
        yield "bf16", f"{start}({value}).to(tl.bfloat16).to(tl.float32)"


def _makes_float(node: cst.CSTNode) -> bool:
    return called(node) in _FLOATS or any(_makes_float(child) for child in node.children)


def _triton(node: cst.CSTNode) -> bool:
    """Whether a function of ``tl`` is called somewhere in it."""
    inside = isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value == "tl"
    return inside or any(_triton(child) for child in node.children)
