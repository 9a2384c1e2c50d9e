"""Faults of the interpreter's arithmetic: bf16, comparisons, fused multiply-add, NaN in min and max.

Import only after TRITON_INTERPRET is set: this module imports Triton.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter as upstream
from triton.runtime.interpreter import InterpreterBuilder as Builder
from triton.runtime.interpreter import TensorHandle as Handle

from ._bf16 import fma_fp64_to_odd, narrow, widen
from ._patching import Fault, Patches
from ._probing import bf16_handle, fp32_handle, is_bf16, values

# Odd ones out of the bf16 line: a tie each way, just above a tie, subnormals, overflow to inf, inf, NaN.
_HARD = np.array(
    [1.00390625, 1.01171875, 1.0039064, 1e-40, -3e-39, 3.4e38, np.inf, -np.inf, np.nan, 1.0039063, -0.0],
    np.float32,
)


def _comparison_sound() -> bool:
    one = Handle(np.ones(1, np.int32), tl.int32)
    return bool(Builder().create_icmpSGT(one, one).dtype == tl.int1)


def _comparison_repair(patches: Patches) -> None:
    def make(inner: Callable) -> Callable:
        def binary_op(self: Any, lhs: Handle, rhs: Handle, op: Callable) -> Handle:
            result = inner(self, lhs, rhs, op)
            if result.data.dtype == np.bool_:
                result.dtype = tl.int1
            return result

        return binary_op

    patches.wrap(Builder, "binary_op", make)


def _conversion_sound() -> bool:
    builder = Builder()
    down = builder.create_fp_trunc(Handle(_HARD, tl.float32), tl.bfloat16).data
    double = np.array([1.00390625 + 2.0**-40, 1.0], np.float64)
    once = builder.create_fp_trunc(Handle(double, tl.float64), tl.bfloat16).data
    counted = builder.create_si_to_fp(Handle(np.array([3, -1], np.int32), tl.int32), tl.bfloat16).data
    patterns = np.array([0x0001, 0x807F, 0x7F80, 0x3F80], np.uint16)
    up = builder.create_fp_ext(Handle(patterns, tl.bfloat16), tl.float32).data
    back = builder.create_fp_to_si(Handle(narrow([3.0]), tl.bfloat16), tl.int32).data
    nan = np.isnan(_HARD)
    return (
        np.array_equal(down[~nan], narrow(_HARD)[~nan])
        and bool(np.isnan(widen(down[nan])).all())
        and np.array_equal(once, narrow(double))
        and np.array_equal(counted, narrow([3.0, -1.0]))
        and np.array_equal(up, widen(patterns))
        and back[0] == 3
    )


def _conversion_repair(patches: Patches) -> None:
    def make_cast(inner: Callable) -> Callable:
        def cast_impl(self: Any, src: Handle, dst_type: tl.dtype) -> Handle:
            target = dst_type.scalar
            if target == tl.bfloat16:
                return src if is_bf16(src) else Handle(narrow(src.data), target)
            if is_bf16(src):
                return Handle(widen(src.data).astype(upstream._get_np_dtype(target)), target)
            return inner(self, src, dst_type)

        return cast_impl

    def make_rounding(inner: Callable) -> Callable:
        def create_fp_to_fp(self: Any, src: Handle, dst_type: tl.dtype, rounding_mode: Any) -> Handle:
            # fp8 has its own code upstream; only the standard types meet bf16 here.
            if dst_type.scalar == tl.bfloat16 and src.dtype.scalar in (tl.float16, tl.float32, tl.float64):
                return Handle(narrow(src.data, rounding_mode == ir.ROUNDING_MODE.RTZ), tl.bfloat16)
            return inner(self, src, dst_type, rounding_mode)

        return create_fp_to_fp

    patches.wrap(Builder, "cast_impl", make_cast)
    patches.wrap(Builder, "create_fp_to_fp", make_rounding)


def _constant_sound() -> bool:
    # An exact number: how others are rounded is the conversion's affair.
    handle = Builder().get_bf16(2.5)
    return handle.dtype == tl.bfloat16 and np.array_equal(handle.data, narrow([2.5]))


def _constant_repair(patches: Patches) -> None:
    patches.replace(Builder, "get_bf16", lambda self, value: bf16_handle(value))


def _bf16_sound() -> bool:
    builder, x, y = Builder(), bf16_handle([1.5, -1.0, 2.0**-133]), bf16_handle([2.5, 3.0, 1.0])
    negate = getattr(builder, "create_fneg", None)
    return (
        np.array_equal(builder.create_fmul(x, y).data, bf16_handle([3.75, -3.0, 2.0**-133]).data)
        and np.array_equal(builder.create_fadd(x, y).data, bf16_handle([4.0, 2.0, 1.0]).data)
        and builder.create_fcmpOLT(x, y).data.tolist() == [True, True, True]
        and (negate is None or np.array_equal(negate(x).data, x.data ^ np.uint16(0x8000)))
    )


def _bf16_repair(patches: Patches) -> None:
    # fp32 has more than 2 * 8 + 2 bits, so rounding its +, -, *, / to bf16 equals one rounding (Figueroa).
    def make_binary(inner: Callable) -> Callable:
        def binary_op(self: Any, lhs: Handle, rhs: Handle, op: Callable) -> Handle:
            if not (is_bf16(lhs) or is_bf16(rhs)):
                return inner(self, lhs, rhs, op)
            result = op(values(lhs), values(rhs))
            if result.dtype == np.bool_:
                return Handle(result, tl.int1)
            return Handle(narrow(result), tl.bfloat16)

        return binary_op

    def make_unary(inner: Callable) -> Callable:
        def unary_op(self: Any, arg: Handle, op: Callable) -> Handle:
            if not is_bf16(arg):
                return inner(self, arg, op)
            if op is np.negative:
                return Handle(arg.data ^ np.uint16(0x8000), tl.bfloat16)
            return Handle(narrow(op(widen(arg.data))), tl.bfloat16)

        return unary_op

    patches.wrap(Builder, "binary_op", make_binary)
    patches.wrap(Builder, "unary_op", make_unary)


def _fma_sound() -> bool:
    builder, x = Builder(), 1 + 2.0**-12
    single = builder.create_fma(fp32_handle(x), fp32_handle(x), fp32_handle(-1 - 2.0**-11)).data[0]
    # bf16: 1.5 * 1.5 + 2 = 4.25; the patterns multiplied as integers give something else.
    half = builder.create_fma(bf16_handle(1.5), bf16_handle(1.5), bf16_handle(2.0)).data
    return single == 2.0**-24 and np.array_equal(half, narrow([4.25]))


def _fma_repair(patches: Patches) -> None:
    def make(inner: Callable) -> Callable:
        def create_fma(self: Any, x: Handle, y: Handle, z: Handle) -> Handle:
            if z.data.dtype == np.float64:
                return inner(self, x, y, z)
            exact = fma_fp64_to_odd(values(x), values(y), values(z))
            rounded = narrow(exact) if is_bf16(z) else exact.astype(z.data.dtype)
            return Handle(rounded, z.dtype.scalar)

        return create_fma

    patches.wrap(Builder, "create_fma", make)


def _nan_sound() -> bool:
    builder, nan, one = Builder(), fp32_handle(np.nan), fp32_handle(1.0)
    clamped = builder.create_clampf(nan, fp32_handle(0.0), one, ir.PROPAGATE_NAN.NONE).data[0]
    most, least = builder.create_maxnumf(nan, one).data[0], builder.create_minnumf(one, nan).data[0]
    return (most, least, clamped) == (1, 1, 0)


def _nan_repair(patches: Patches) -> None:
    def make_clamp(inner: Callable) -> Callable:
        def create_clampf(self: Any, arg: Handle, lo: Handle, hi: Handle, propagate_nans: Any) -> Handle:
            if propagate_nans == ir.PROPAGATE_NAN.NONE:
                return self.create_minnumf(self.create_maxnumf(arg, lo), hi)
            return inner(self, arg, lo, hi, propagate_nans)

        return create_clampf

    patches.replace(Builder, "create_minnumf", lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin))
    patches.replace(Builder, "create_maxnumf", lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax))
    patches.wrap(Builder, "create_clampf", make_clamp)


FAULTS = (
    Fault(
        "comparison_type",
        "A comparison's result carries its operands' type, so a scalar condition that is broadcast or "
        "converted becomes integers or bf16 patterns (from 3.9 on: 'mask has unsupported dtype').",
        _comparison_sound,
        _comparison_repair,
    ),
    Fault(
        "bf16_conversion",
        "Conversion to bf16 truncates instead of rounding to nearest even and loses NaN; bf16 subnormals, "
        "fp64 and integers convert wrongly.",
        _conversion_sound,
        _conversion_repair,
    ),
    Fault(
        "bf16_constant",
        "A bf16 constant cannot be made, so bf16 * 2.0 fails.",
        _constant_sound,
        _constant_repair,
    ),
    Fault(
        "bf16_arithmetic",
        "bf16 arithmetic, comparisons and negation work on the raw 16-bit patterns.",
        _bf16_sound,
        _bf16_repair,
    ),
    Fault(
        "fma",
        "tl.fma rounds the product before adding, or multiplies bf16 patterns as integers.",
        _fma_sound,
        _fma_repair,
    ),
    Fault(
        "nan_minmax",
        "tl.maximum, tl.minimum and tl.clamp answer NaN where the hardware answers the other operand.",
        _nan_sound,
        _nan_repair,
    ),
)
