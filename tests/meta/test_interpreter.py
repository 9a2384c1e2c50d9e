"""The cpu device's repairs: each check passes with its repair and, where the fault exists, fails without."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from impl.devices import interpreter

if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; found a GPU, whose tests compile", allow_module_level=True)
try:
    REPAIRS = {repair.name: repair for repair in interpreter.activate()}
except interpreter.CompilerLoadedError as error:
    pytest.skip(f"needs the interpreter; found: {error}", allow_module_level=True)

import triton.language as tl
from triton.runtime import interpreter as upstream

from tests.meta import interpreter_kernels as kernels

ALL = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
PARTNERS = [
    float(n)
    for n in [
        "0",
        "-0",
        "1",
        "-1",
        "1.5",
        "3.140625",
        "257",
        "1e38",
        "-1e38",
        "1e-38",
        "3e-39",
        "1e-40",
        "inf",
        "nan",
    ]
]


def same(observed: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equal numbers, any NaN equal to any NaN, zeros by sign too."""
    assert observed.dtype == expected.dtype
    nan = expected.isnan()
    assert torch.equal(observed.isnan(), nan)
    assert torch.equal(observed[~nan], expected[~nan])
    assert torch.equal(observed[~nan].signbit(), expected[~nan].signbit())


def converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    kernels.convert[(1,)](x, y, B=x.numel())
    return y


def check_bf16_conversion() -> None:
    same(converted(ALL, torch.float32), ALL.float())
    high = ALL.view(torch.int16).to(torch.int32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        fp32 = (high | low).view(torch.float32)
        same(converted(fp32, torch.bfloat16), fp32.bfloat16())
    counts = torch.arange(-(2**17), 2**17, dtype=torch.int32) * 12345
    same(converted(counts, torch.bfloat16), counts.bfloat16())
    whole = torch.arange(-256, 256).bfloat16()
    assert torch.equal(converted(whole, torch.int32), whole.int())
    same(converted(ALL, torch.float16), ALL.half())
    half = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    same(converted(half, torch.bfloat16), half.bfloat16())
    tie = 1 + 2.0**-8
    double = torch.tensor([tie, tie + 2.0**-40, tie - 2.0**-40, 1e300], dtype=torch.float64)
    same(converted(double, torch.bfloat16), torch.tensor([1, 1 + 2.0**-7, 1, float("inf")]).bfloat16())


def test_bf16_truncation_keeps_nan() -> None:
    x = torch.tensor([1.0078124, -1.0078124, 3.4e38, float("inf"), float("nan"), 1e-40, 0.0, 2.0])
    y = torch.empty(8, dtype=torch.bfloat16)
    kernels.truncate[(1,)](x, y, B=8)
    same(y, torch.where(x.isnan(), x, (x.view(torch.int32) & -65536).view(torch.float32)).bfloat16())


def check_bf16_constant() -> None:
    x, y = torch.tensor([1.0, 2, 3, 4]).bfloat16(), torch.empty(4, 4, dtype=torch.bfloat16)
    kernels.constant[(1,)](x, y, B=4)
    rows = [[2.5, 5, 7.5, 10], [1.0039064] * 4, [-1] * 4, [0.3, 0.3, 3, 4]]
    same(y, torch.tensor(rows).bfloat16())


def check_bf16_arithmetic() -> None:
    x = ALL
    for number in PARTNERS:
        p = torch.tensor(number).bfloat16()
        sums, differences, products, negatives, chosen = (torch.empty_like(x) for _ in range(5))
        quotients, orders = torch.empty(65536), torch.empty(65536, dtype=torch.int32)
        kernels.binary[(1,)](x, p, sums, differences, products, quotients, orders, negatives, chosen, B=65536)
        same(sums, x + p)
        same(differences, p - x)
        same(products, x * p)
        same(quotients, x.float() / p.float())
        expected = (x < p).int() + 2 * (x <= p).int() + 4 * (x == p).int()
        expected += 8 * (x != p).int() + 16 * (x > p).int() + 32 * (x >= p).int()
        assert torch.equal(orders, expected)
        # Up to Triton 3.7 a negation is 0 - x, compiled too, so the sign of a zero is left open.
        same(negatives + 0.0, -x + 0.0)
        same(chosen, torch.where(x < p, x, p))


def nearest(exact: Fraction, near: torch.Tensor) -> float:
    """Return the value of near's type nearest to exact, ties to even; near is at most one step off."""
    bits = near.view(torch.int16 if near.dtype == torch.bfloat16 else torch.int32)
    steps = [(bits + step).view(near.dtype) for step in (-1, 0, 1)]
    ranked = sorted(steps, key=lambda v: (abs(Fraction(v.item()) - exact), int(v.view(bits.dtype)) & 1))
    return ranked[0].item()


def check_fma() -> None:
    for dtype, bits in ((torch.float32, 24), (torch.bfloat16, 8)):
        random = torch.Generator().manual_seed(5)
        x, y = (torch.randn(512, generator=random).to(dtype) for _ in range(2))
        # An addend that cancels the product, or lies far below its last bit, shows a second rounding.
        far = torch.randint(-bits - 40, bits + 4, (512,), generator=random)
        z = (x.double() * y.double() * torch.exp2(far.double())).to(dtype)
        z[::2] = -(x.double() * y.double())[::2].to(dtype)
        # Products on a tie of the result's type, pushed off it by a far smaller addend.
        x[:8], y[:8] = 1 + 2.0 ** (1 - bits // 2), 1 + 2.0 ** (-bits // 2)
        z[:8] = torch.tensor([1, -1] * 4) * torch.exp2(-torch.arange(20, 60, 5).double()).to(dtype)
        out = torch.empty_like(x)
        kernels.fma[(1,)](x, y, z, out, B=512)
        for a, b, c, observed in zip(x, y, z, out, strict=True):
            exact = Fraction(a.item()) * Fraction(b.item()) + Fraction(c.item())
            assert observed.item() == (nearest(exact, observed) if exact else 0.0)


def check_bf16_dot() -> None:
    x, y = torch.arange(256.0).reshape(16, 16).bfloat16(), torch.empty(16, 16)
    kernels.dot[(1,)](x, y, B=16)
    same(y, x.float() @ x.float().T)


def check_bf16_reduction() -> None:
    x = (torch.arange(16.0).reshape(4, 4) - 6).bfloat16()
    rows, columns, most = (torch.empty(4, dtype=torch.bfloat16) for _ in range(3))
    total, least, running = (torch.empty(s, dtype=torch.bfloat16) for s in ((1,), (1,), (4, 4)))
    kernels.reduction[(1,)](x, rows, columns, total, most, running, least, B=4)
    same(rows, x.sum(1))
    same(columns, x.sum(0))
    same(total, x.sum().reshape(1))
    same(most, x.max(1).values)
    same(running, x.cumsum(1))
    same(least, x.min().reshape(1))


def check_comparison_type() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        x, y = torch.arange(1, 5).to(dtype), torch.zeros(8, dtype=dtype)
        kernels.comparison[(1,)](x, y, 3, B=4)
        assert y.tolist() == [1, 2, 3, -1, 1, 1, 0, 0]


def check_nan_minmax() -> None:
    y = torch.zeros(4)
    kernels.nan[(1,)](torch.tensor([float("nan")]), y)
    same(y, torch.tensor([1, 1, 2, float("nan")]))


def check_grid() -> None:
    seen = {}
    for grid in (lambda meta: seen.update(meta) or (meta["n"] * meta["B"],), [8]):
        y = torch.zeros(8, dtype=torch.int32)
        kernels.count[grid](y, n=2)
        assert y.tolist() == [2] * 8
    assert [(key, type(seen[key])) for key in ("n", "m", "B")] == [("n", int), ("m", int), ("B", int)]
    assert isinstance(seen["y"], torch.Tensor)


def check_scalar_argument() -> None:
    x, y = torch.arange(4.0).bfloat16(), torch.empty(4)
    kernels.scalar[(1,)](x, y, 1 / 3, True, B=4)
    same(y, x.float() * torch.tensor(1 / 3) + 0.5)


def check_argument_annotation() -> None:
    y = torch.zeros(4, dtype=torch.int64)
    kernels.annotation[lambda meta: (meta["b"] // 10,)](y, 10, b=10, c=1 / 3, d=3)
    assert y.tolist() == [10**10, 10**10, 10**16, 3 * 10**9 - 2**32]


def check_loop_index() -> None:
    y = torch.zeros(6, dtype=torch.int64)
    kernels.loop[(1,)](y, 3001, torch.tensor([3000]))
    assert y.tolist() == [3_000_000_000, 3_000_000_000 - 2**32, 3_000_000_000, 3, 0, 5]


def check_numpy_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.loud[(1,)](torch.ones(4), torch.empty(4), B=4)


CHECKS = {
    name[len("check_") :]: value for name, value in list(globals().items()) if name.startswith("check_")
}


def test_every_repair_has_a_check() -> None:
    assert CHECKS.keys() == REPAIRS.keys()


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_check_passes_with_the_repairs(name: str) -> None:
    assert REPAIRS[name].applied == REPAIRS[name].needed
    CHECKS[name]()


@pytest.mark.parametrize("name", sorted(name for name, repair in REPAIRS.items() if repair.needed))
def test_check_fails_without_its_repair(name: str) -> None:
    with interpreter._without(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            CHECKS[name]()
        except Exception:
            return
    pytest.fail(f"the check of {name} does not see the fault it stands for")


def test_activate_is_idempotent() -> None:
    assert interpreter.activate() is interpreter.repairs()


def test_a_compiled_triton_is_refused() -> None:
    script = (
        "import triton; from impl.devices import interpreter as i\n"
        "try: i.activate()\nexcept ValueError as e: print(e)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert "found Triton already imported with its compiler on" in done.stdout, done.stderr


def recurrence() -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    k, v, gate = (torch.randn(4, 16, generator=random).bfloat16() for _ in range(3))
    state, out = torch.randn(3, 16, 16, generator=random), torch.zeros(3, 4, 16).bfloat16()
    bases = torch.tensor([state[row].data_ptr() for row in range(3)])
    kernels.recurrence[(3,)](k, v, gate, state, bases, torch.tensor([4, 0, 2]), out, 0.25, K=16, V=16)
    return torch.cat([state.view(torch.int32).flatten(), out.view(torch.int16).int().flatten()])


def without_speedups(make: Callable[[], Any]) -> Any:
    """What comes of it without them; they are on again afterwards, with nothing learned."""
    try:
        interpreter.speedups(False)
        return make()
    finally:
        interpreter.speedups()


def test_speedups_change_no_bit() -> None:
    slow = without_speedups(recurrence)
    assert torch.equal(recurrence(), slow)


TYPES = (
    *(tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.int1, tl.int8, tl.int16, tl.int32, tl.int64),
    *(tl.uint8, tl.uint16, tl.uint32, tl.uint64),
)
NUMBERS = (0, 1, -1, 7, 300, 2**40, True, False, 0.0, -0.0, 2.5, 1e300, float("inf"), float("nan"))
SHAPES: tuple[tuple[int, ...], ...] = ((), (4,), (2, 4), (2, 1))
OPERATIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("add", "sub", "mul"), (True,)),
    **dict.fromkeys(("truediv", "floordiv", "mod", "less_than", "equal", "and_"), ()),
    "minimum": (tl.PropagateNan.NONE,),
}


def tensor_of(kind: tl.dtype, shape: tuple[int, ...]) -> tl.tensor:
    data = np.array([3, 1, 0, 5, 2, 1, 7, 4])[: int(np.prod(shape))].reshape(shape or (1,))
    made = upstream.TensorHandle(data.astype(np.int32), tl.int32)
    whole = tl.block_type(tl.int32, list(shape)) if shape else tl.int32
    return upstream.interpreter_semantic.cast(tl.tensor(made, whole), kind)


def told(make: Callable[[], Any]) -> tuple[Any, ...]:
    """What comes of an operation, to the bit, or of what kind its error is."""
    try:
        with np.errstate(all="ignore"):
            result = make()
    except Exception as error:
        return (type(error),)
    data = result.handle.data
    return str(result.type), str(result.handle.dtype), data.dtype, data.shape, data.tobytes()


def everything(name: str) -> dict[str, tuple[Any, ...]]:
    """An operation of tensors of all types and some shapes with each other, and with numbers beside them."""
    function, more = getattr(upstream.interpreter_semantic, name), OPERATIONS[name]
    tensors = {(kind.name, shape): tensor_of(kind, shape) for kind in TYPES for shape in SHAPES}
    found = {}
    for one, x in tensors.items():
        for other, y in tensors.items():
            found[f"{one} {other}"] = told(partial(function, x, y, *more))
        for number in NUMBERS:
            found[f"{one} {number!r}"] = told(partial(function, x, number, *more))
            found[f"{number!r} {one}"] = told(partial(function, number, x, *more))
    return found


def test_speedups_change_no_operation() -> None:
    """Nor its type, its shape or its error; what one operation taught is not taken for another."""
    slow = without_speedups(lambda: {name: everything(name) for name in OPERATIONS})
    for name in (*OPERATIONS, *reversed(OPERATIONS)):
        assert everything(name) == slow[name], name
    assert all(len({result[0] for result in found.values()}) > 4 for found in slow.values())


def test_speedups_change_no_conversion() -> None:
    def conversions() -> dict[str, tuple[Any, ...]]:
        cast = upstream.interpreter_semantic.cast
        return {
            f"{one} {other} {shape} {more}": told(partial(cast, tensor_of(one, shape), other, *more))
            for one in TYPES
            for other in TYPES
            for shape in SHAPES
            for more in ((), (None,), ("rtz",))
        }

    slow = without_speedups(conversions)
    assert conversions() == slow


def test_a_launch_leaves_the_language_as_it_was() -> None:
    before = {name: value for module in (tl, tl.core) for name, value in vars(module).items()}
    recurrence()
    assert before == {name: value for module in (tl, tl.core) for name, value in vars(module).items()}


def test_masked_lanes_touch_no_memory() -> None:
    y = torch.zeros(4)
    kernels.bad_pointer[(1,)](torch.ones(4), y, 2**40 + 8, 1, B=4)
    assert y.tolist() == [5, 3, 0, 1]


def test_scans_heuristics_and_launch_keywords() -> None:
    y = torch.zeros(4)
    kernels.scan[(1,)](torch.ones(4), y, n=3, B=4, num_warps=1, num_stages=2)
    assert y.tolist() == [2, 2.5, 2.75, 2.875]


def test_bf16_patterns_against_torch() -> None:
    from impl.devices.interpreter._bf16 import narrow, widen

    patterns = np.arange(65536).astype(np.uint16)
    same(torch.from_numpy(widen(patterns)), ALL.float())
    same(torch.from_numpy(narrow(widen(patterns))).view(torch.bfloat16), ALL)
