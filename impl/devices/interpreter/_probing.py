"""Small pieces the faults share: handles over numpy arrays and a launch without source rewriting.

Import only after TRITON_INTERPRET is set: this module imports Triton.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import GridExecutor, TensorHandle

from ._bf16 import narrow, widen


def bf16_handle(numbers: Any) -> TensorHandle:
    """Make a bf16 handle of one dimension, the numbers rounded to bf16."""
    return TensorHandle(narrow(np.atleast_1d(np.asarray(numbers, np.float32))), tl.bfloat16)


def fp32_handle(*numbers: float) -> TensorHandle:
    """Make an fp32 handle of one dimension."""
    return TensorHandle(np.array(numbers, np.float32), tl.float32)


def block(handle: TensorHandle) -> tl.tensor:
    """Wrap the handle as a block of its own shape, which must have at least one dimension."""
    return tl.tensor(handle, tl.block_type(handle.dtype.scalar, list(handle.data.shape)))


def launch(function: Callable, grid: Any, *args: Any) -> None:
    """Run a plain function as a kernel; it must see ``tl`` among its globals, as upstream demands."""
    GridExecutor(function, list(inspect.signature(function).parameters), grid)(*args)


def is_bf16(handle: TensorHandle) -> bool:
    """Tell whether the handle holds bf16 patterns."""
    # A comparison that upstream labels with its operands' type holds booleans, not patterns.
    # The letter first: it is the cheap test, and this runs for every operand of every operation.
    return bool(handle.data.dtype.char == "H" and handle.dtype.scalar == tl.bfloat16)


def values(handle: TensorHandle) -> np.ndarray:
    """Return the handle's numbers: bf16 opened to fp32, anything else as it is."""
    return widen(handle.data) if is_bf16(handle) else handle.data
