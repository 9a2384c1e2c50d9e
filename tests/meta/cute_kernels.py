"""Tiny kernels of the CuTe DSL, and what compiles them; importing this needs the DSL."""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

FLOAT = cutlass.Float32


@cute.kernel
def _double(x: cute.Tensor, y: cute.Tensor):  # type: ignore[no-untyped-def]
    i = cute.arch.block_idx()[0] * 32 + cute.arch.thread_idx()[0]
    if i < cute.size(x):
        y[i] = x[i] * FLOAT(2.0)


@cute.jit
def _launch(x: cute.Tensor, y: cute.Tensor, shared: cutlass.Int32, grid: cutlass.Int32, stream):  # type: ignore[no-untyped-def]
    _double(x, y).launch(grid=(grid, 1, 1), block=(32, 1, 1), smem=shared, stream=stream)


@cute.jit
def _clustered(x: cute.Tensor, y: cute.Tensor, stream):  # type: ignore[no-untyped-def]
    _double(x, y).launch(grid=(2, 1, 1), block=(32, 1, 1), cluster=(2, 1, 1), stream=stream)


def _compiled(function: Any, *numbers: Any) -> Any:
    fakes = [make_fake_tensor(FLOAT, (cute.sym_int(),), (1,), assumed_align=16) for _ in range(2)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = "--gpu-arch=sm_90a --enable-tvm-ffi"
    return cute.compile(function, *fakes, *numbers, stream, options=options)


def doubling() -> Any:
    """y = 2 x for fp32 vectors, 32 elements a CTA: called with x, y, bytes of shared memory, CTAs."""
    return _compiled(_launch, cutlass.Int32(0), cutlass.Int32(0))


def clustered() -> Any:
    """The same in a cluster of two CTAs: called with x, y."""
    return _compiled(_clustered)
