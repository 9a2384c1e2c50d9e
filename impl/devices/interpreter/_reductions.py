"""Faults of the interpreter where bf16 blocks are contracted: tl.dot, reductions and scans.

Import only after TRITON_INTERPRET is set: this module imports Triton.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as upstream
from triton.runtime.interpreter import InterpreterBuilder as Builder
from triton.runtime.interpreter import TensorHandle as Handle

from ._bf16 import narrow, widen
from ._patching import Fault, Patches
from ._probing import bf16_handle, block, is_bf16, launch, values


def _dot_sound() -> bool:
    ones = Handle(narrow(np.ones((2, 2), np.float32)), tl.bfloat16)
    zero = Handle(np.zeros((2, 2), np.float32), tl.float32)
    return bool((Builder().create_dot(ones, ones, zero, None, 0).data == 2.0).all())


def _dot_repair(patches: Patches) -> None:
    def make(inner: Callable) -> Callable:
        def create_dot(self: Any, a: Handle, b: Handle, d: Handle, *options: Any) -> Handle:
            opened = [Handle(values(h), tl.float32) if is_bf16(h) else h for h in (a, b)]
            return inner(self, *opened, d, *options)

        return create_dot

    patches.wrap(Builder, "create_dot", make)


def _reduction_sound() -> bool:
    found: list[np.ndarray] = []

    def program() -> None:
        # Exact in bf16, so that the order of the additions does not show.
        numbers = block(bf16_handle([1.0, 1.0, 2.0, 4.0]))
        total = upstream.ReduceOps(0, tl.standard._sum_combine, False).apply(numbers)
        most = upstream.ReduceOps(0, tl.standard._elementwise_max, False).apply(
            block(bf16_handle([-1.0, -2.0]))
        )
        running = upstream.ScanOps(0, tl.standard._sum_combine, False).apply(numbers)
        found.extend(widen(result.handle.data) for result in (total, most, running))

    launch(program, (1,))
    return [list(numbers) for numbers in found] == [[8.0], [-1.0], [1.0, 2.0, 4.0, 8.0]]


def _sum_by_halves(numbers: np.ndarray) -> np.ndarray:
    """Sum over axis 0 as a tree, every addition rounded to bf16, as a warp's shuffles would."""
    while numbers.shape[0] > 1:
        half = (numbers.shape[0] + 1) // 2
        head, tail = numbers[:half].copy(), numbers[half:]
        head[: len(tail)] = widen(narrow(head[: len(tail)] + tail))
        numbers = head
    return np.asarray(numbers[0])


def _reduction_repair(patches: Patches) -> None:
    combines = tl.standard

    def make_reduce(inner: Callable) -> Callable:
        def apply_impl(self: Any, inputs: Any) -> Any:
            handle = inputs[0].handle
            if not is_bf16(handle):
                return inner(self, inputs)
            numbers = widen(handle.data)
            if self.combine_fn is combines._sum_combine:
                flat = numbers.reshape(-1) if self.axis is None else np.moveaxis(numbers, self.axis, 0)
                total = narrow(_sum_by_halves(flat))
                if self.keep_dims:
                    total = (
                        total.reshape([1] * numbers.ndim)
                        if self.axis is None
                        else np.expand_dims(total, self.axis)
                    )
                return self.to_tensor(total, tl.bfloat16)
            if self.combine_fn in (combines._elementwise_max, combines._elementwise_min):
                # The largest of bf16 numbers is one of them, so opening and closing again is exact.
                best = inner(self, (block(Handle(numbers, tl.float32)), *inputs[1:]))
                return self.to_tensor(narrow(best.handle.data).reshape(best.shape), tl.bfloat16)
            return inner(self, inputs)

        return apply_impl

    def make_scan(inner: Callable) -> Callable:
        def apply_impl(self: Any, inputs: Any) -> Any:
            if is_bf16(inputs[0].handle):
                # Upstream sums and multiplies by numpy when it knows the function by identity; under
                # another identity it calls the function itself, element by element.
                self.combine_fn = SimpleNamespace(fn=self.combine_fn.fn)
            return inner(self, inputs)

        return apply_impl

    patches.wrap(upstream.ReduceOps, "apply_impl", make_reduce)
    patches.wrap(upstream.ScanOps, "apply_impl", make_scan)


FAULTS = (
    Fault("bf16_dot", "tl.dot multiplies bf16 patterns as integers.", _dot_sound, _dot_repair),
    Fault(
        "bf16_reduction",
        "Reductions and scans of bf16 add and compare the raw 16-bit patterns.",
        _reduction_sound,
        _reduction_repair,
    ),
)
