"""Faults around a launch: arguments, the grid, loop indices, numpy's warnings.

Import only after TRITON_INTERPRET is set: this module imports Triton.
"""

import ast
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as upstream
from triton.runtime.interpreter import GridExecutor as Executor
from triton.runtime.interpreter import TensorHandle as Handle
from triton.runtime.jit import _normalize_ty

from ._patching import Fault, Patches
from ._probing import block, launch

# The rewritten kernel finds this name in the interpreter module's globals, which upstream copies over.
_RANGE = "_kdafuzz_tensor_range"


def _grid_sound() -> bool:
    seen: list[Any] = []

    def program(size: Any) -> None:
        tl.static_assert(size > 0)

    def grid(arguments: dict[str, Any]) -> list[int]:
        seen.append(arguments["size"])
        return [1]

    launch(program, grid, 3)
    return type(seen[0]) is int


def _grid_repair(patches: Patches) -> None:
    def make(inner: Callable) -> Callable:
        def run(self: Any, *args: Any, **kwargs: Any) -> None:
            if callable(self.grid):
                signature = inspect.signature(self.fn)
                named = {key: value for key, value in kwargs.items() if key in signature.parameters}
                bound = signature.bind(*args, **named)
                bound.apply_defaults()
                self.grid = self.grid(dict(bound.arguments))
            self.grid = tuple(self.grid)
            inner(self, *args, **kwargs)

        return run

    patches.wrap(Executor, "__call__", make)


def _scalar_sound() -> bool:
    half, yes = upstream._implicit_cvt(0.1), upstream._implicit_cvt(True)
    exact = half.handle.data[0] == np.float32(0.1)
    return bool(exact and half.type == tl.float32 and yes.type == tl.int1)


def _scalar_repair(patches: Patches) -> None:
    def make(inner: Callable) -> Callable:
        def implicit_cvt(arg: Any) -> Any:
            if isinstance(arg, bool):
                return tl.tensor(Handle(np.array([arg]), tl.int1), tl.int1)
            if isinstance(arg, float):
                return tl.tensor(Handle(np.array([arg]).astype(np.float32), tl.float32), tl.float32)
            return inner(arg)

        return implicit_cvt

    patches.wrap(upstream, "_implicit_cvt", make)


class _TypedInt(int):
    """An integer argument that remembers its annotated type; an int to grid callables and hooks."""

    kind: tl.dtype


class _TypedFloat(float):
    """Likewise a float."""

    kind: tl.dtype


_INTEGERS = (tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64)
_KINDS = {_normalize_ty(kind): kind for kind in (*_INTEGERS, tl.float16, tl.float32, tl.float64)}


def _typed(value: Any, annotation: Any) -> Any:
    # Annotations reach the rewritten kernel as source text, a quoted one with its quotes.
    text = annotation.strip("'\"") if isinstance(annotation, str) else annotation
    kind = None if text is None else _KINDS.get(_normalize_ty(text))
    if kind is None or not isinstance(value, (int, float)):
        return value
    typed = _TypedFloat(value) if kind.is_floating() else _TypedInt(value)
    typed.kind = kind
    return typed


def _annotation_sound() -> bool:
    kinds: list[Any] = []

    def program(size: tl.int64) -> None:
        kinds.append(size.dtype)

    launch(program, (1,), 3)
    return kinds == [tl.int64]


def _annotation_repair(patches: Patches) -> None:
    def make_run(inner: Callable) -> Callable:
        def run(self: Any, *args: Any, **kwargs: Any) -> None:
            hints = self.fn.__annotations__
            args = tuple(
                _typed(arg, hints.get(name)) for name, arg in zip(self.arg_names, args, strict=False)
            )
            inner(self, *args, **{name: _typed(arg, hints.get(name)) for name, arg in kwargs.items()})

        return run

    def make_cvt(inner: Callable) -> Callable:
        def implicit_cvt(arg: Any) -> Any:
            if not isinstance(arg, (_TypedInt, _TypedFloat)):
                return inner(arg)
            data = np.array([arg]).astype(upstream._get_np_dtype(arg.kind))
            return tl.tensor(Handle(data, arg.kind), arg.kind)

        return implicit_cvt

    patches.wrap(Executor, "__call__", make_run)
    patches.wrap(upstream, "_implicit_cvt", make_cvt)


def tensor_range(first: Any, last: Any = None, step: Any = 1, **_options: Any) -> Iterator[tl.tensor]:
    """Yield a kernel loop's indices as scalar tensors, int32 or, if a bound is wider, int64, as compiled."""
    bounds = (0, first, step) if last is None else (first, last, step)
    numbers, wide = [], False
    for bound in bounds:
        bound = bound.value if isinstance(bound, tl.constexpr) else bound
        if isinstance(bound, tl.tensor):
            wide |= bound.dtype.primitive_bitwidth > 32
            bound = bound.handle.data.item()
        wide |= not -(2**31) <= bound < 2**31
        numbers.append(int(bound))
    kind, storage = (tl.int64, np.int64) if wide else (tl.int32, np.int32)
    for number in range(*numbers):
        yield tl.tensor(Handle(np.array([number], storage), kind), kind)


def _loop_sound() -> bool:
    tree = ast.parse("for i in range(3):\n    pass\n")
    tree = type(upstream.FunctionRewriter.ast_transformer)().visit(tree)
    # Nothing upstream turns the index into a tensor as of 3.9: an untouched loop has the fault.
    return ast.unparse(tree) != "for i in range(3):\n    pass"


def _loop_repair(patches: Patches) -> None:
    def visit_for(self: ast.NodeTransformer, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        call = node.iter
        if isinstance(call, ast.Call):
            function = call.func
            name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)
            if name == "range":
                call.func = ast.copy_location(ast.Name(_RANGE, ast.Load()), function)
        return node

    patches.replace(upstream, _RANGE, tensor_range)
    patches.replace(upstream.ASTTransformer, "visit_For", visit_for)


def _quiet_sound() -> bool:
    def program(number: Any) -> None:
        huge = tl.exp(number + 1000.0)
        hole = block(Handle(np.full(4, np.nan, np.float32), tl.float32))
        upstream.ReduceOps(0, tl.standard._elementwise_max, False).apply(hole)
        _ = huge / (number - number)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch(program, (1,), 1)
    return True


def _quiet_repair(patches: Patches) -> None:
    # np.nanmax warns on an all-NaN slice by warnings.warn, which np.errstate does not reach; fmax has the
    # same answers and does not warn.
    silent = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}

    def make_run(inner: Callable) -> Callable:
        def run(self: Any, *args: Any, **kwargs: Any) -> None:
            with np.errstate(all="ignore"):
                inner(self, *args, **kwargs)

        return run

    def make_min_max(inner: Callable) -> Callable:
        def min_max(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:  # noqa: A002
            return inner(self, input, silent.get(val_reduce_op, val_reduce_op), idx_reduce_op)

        return min_max

    patches.wrap(Executor, "__call__", make_run)
    patches.wrap(upstream.ReduceOps, "min_max", make_min_max)


FAULTS = (
    Fault(
        "grid",
        "A grid callable gets wrapped tensors instead of the caller's values; a list is refused as a grid.",
        _grid_sound,
        _grid_repair,
    ),
    Fault(
        "scalar_argument",
        "A float argument stays a Python double instead of becoming an fp32 scalar, so it takes the other "
        "operand's type; up to 3.7 a bool argument is refused.",
        _scalar_sound,
        _scalar_repair,
    ),
    Fault(
        "argument_annotation",
        "An annotated argument (stride: tl.int64) takes its value's type, so its products wrap at 2^31.",
        _annotation_sound,
        _annotation_repair,
    ),
    Fault(
        "loop_index",
        "The index of a range loop is a Python integer, not an integer tensor: it has no .to(), and products "
        "of it never wrap; 3.6 under numpy 2.4 cannot start a loop to a bound in a tensor at all.",
        _loop_sound,
        _loop_repair,
    ),
    Fault(
        "numpy_warnings",
        "Overflow, division by zero, NaN and all-NaN reductions leak out of a launch as numpy warnings.",
        _quiet_sound,
        _quiet_repair,
    ),
)
