"""The convolutions' oracle against exact rationals, one number at a time, from the contract's text (1.5).

Products of fp32 numbers are exact in double and at most seven terms are added: 7 x 2**-53 = 8e-16
of the sum of magnitudes, and SiLU moves that by its derivative. An exponential's argument of up to
2000 costs 2000 x 2**-53 = 2e-13 more. So 1e-12 holds.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from mpmath import mp

from oracle.calls.conv import ConvPrefill, ConvUpdate, PackedConv
from oracle.case import Case
from oracle.conv import convolve
from oracle.expect import expect
from oracle.expectation import Cells
from oracle.layout import DTYPES
from oracle.tracked import ANY_ORDER, COMPILED, FLUSH, INTERPRETED, SUBNORMAL, U
from oracle.values import REGIMES, build
from tests.meta.drawn import over
from tests.meta.exact import FORMATS, real

RELATIVE = mpmath.mpf("1e-12")
FINITE = {
    name: [r for r in REGIMES[name] if r not in ("specials", "extreme")]
    for name in ("x", "conv_state", "weight", "bias")
}
Cell = tuple[int, ...]
Call = ConvUpdate | ConvPrefill


@pytest.fixture(autouse=True)
def digits() -> Iterator[None]:
    with mp.workdps(50):
        yield


class Scalar:
    """A call computed number by number: outputs by (token, channel), stored columns by (slot, ..)."""

    def __init__(self, case: Case) -> None:
        self.call, values = case.call, build(case).tensors
        call = self.call
        assert isinstance(call, Call)
        self.conv = FORMATS[call.conv]
        x = values["x"].reshape(-1, call.channels)
        self.x = [[self.conv.rounded(Fraction(e)) for e in token] for token in x.double().tolist()]
        self.w = _fractions(values["weight"])
        self.bias = _fractions(values["bias"]) if "bias" in values else None
        self.state = _fractions(values["conv_state" if isinstance(call, ConvUpdate) else "conv_states"])
        self.inputs: dict[tuple[int, int], list[Fraction]] = {}
        """By (row, channel), history and inputs."""
        self.stored: dict[Cell, Fraction] = {}
        for row in range(call.rows):
            if not call.null(row) and call.qlens[row] > 0:
                for c in range(call.channels):
                    self._row(row, c)

    def _row(self, row: int, c: int) -> None:
        call, slot, W = self.call, self.call.slots[row], self.width
        stored = self.state[slot][c]
        first = call.accepted[row] - 1 if isinstance(call, ConvUpdate) and call.accepted else 0
        history = stored[first : first + W - 1]
        if isinstance(call, ConvPrefill) and not call.initial[row]:
            history = [Fraction(0)] * (W - 1)
        start, qlen = sum(call.qlens[:row]), call.qlens[row]
        inputs = [self.x[start + t][c] for t in range(qlen)]
        self.inputs[row, c] = history + inputs
        rolled = history[1:] + inputs if getattr(call, "accepted", ()) else (history + inputs)[-(W - 1) :]
        for column, number in enumerate(rolled):
            self.stored[slot, c, column] = number

    @property
    def width(self) -> int:
        """Taps."""
        assert isinstance(self.call, Call)
        return self.call.width

    def terms(self, row: int, t: int, c: int) -> list[Fraction]:
        """Bias if there is one, then the products of token t in the order of the taps."""
        call = self.call
        assert isinstance(call, Call)
        win = self.inputs[row, c]
        products = [self.w[c][j] * win[t + j] for j in range(self.width)]
        if call.conv == call.taps == "bfloat16":
            products = [FORMATS["bfloat16"].rounded(p) for p in products]
        return ([self.bias[c]] if self.bias else []) + products

    def outputs(self) -> Iterator[tuple[Cell, list[Fraction]]]:
        """Every live output's place in ``[T, C]`` and its terms."""
        assert isinstance(self.call, Call)
        for row, c in self.inputs:
            start = sum(self.call.qlens[:row])
            for t in range(self.call.qlens[row]):
                yield (start + t, c), self.terms(row, t, c)


def _fractions(x: torch.Tensor) -> list[Any]:
    def convert(entry: Any) -> Any:
        return [convert(e) for e in entry] if isinstance(entry, list) else Fraction(entry)

    return list(convert(x.double().tolist()))


FIELDS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "activation": st.sampled_from(("float32", "bfloat16", "float16")),
        "conv": st.sampled_from(("float32", "bfloat16")),
        "taps": st.sampled_from(("bfloat16", "float32")),
        "bias": st.sampled_from((None, "float32", "bfloat16")),
        "silu": st.booleans(),
    }
)


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """Update, prefill or packed: one to three rows of up to four tokens, finite values of any regime."""
    kind = draw(st.sampled_from(("update", "update", "prefill", "packed")))
    n, fields = draw(st.integers(1, 3)), dict(draw(FIELDS))
    length = st.integers(0, 4)
    form = draw(st.sampled_from(("varlen", "varlen", "batch", "single"))) if kind == "update" else ""
    if kind == "packed":
        n, length = min(n, 2), st.integers(0, 2)
        fields |= {"conv": "float32", "taps": "float32"}
    window = 1 if form == "single" else 4
    qlens = tuple(draw(length) if form in ("", "varlen") else window for _ in range(n))
    slots = tuple(draw(st.permutations(range(-1, n + 2)))[:n])
    fields |= {"qlens": qlens, "slots": slots, "ids": tuple(range(n)), "pool": n + 2}
    spare = draw(st.integers(0, 2))
    call: Call
    if kind == "update":
        width = draw(st.integers(2, 6))
        counted = draw(st.booleans())
        accepted = tuple(draw(st.integers(1, window)) for _ in range(n)) if counted else ()
        null_block = draw(st.sampled_from((0, 0, None)))
        if null_block is None:
            fields["slots"] = tuple(draw(st.permutations(range(n + 2)))[:n])
        fields |= {"form": form, "window": window, "accepted": accepted, "null_block": null_block}
        fields["own_out"] = draw(st.booleans())
        length_ = (width - 2 + window if counted else width - 1) + spare
        call = ConvUpdate(**fields, width=width, channels=draw(st.integers(1, 3)), state_len=length_)
    else:
        fields |= {"most_tokens": 4, "initial": tuple(draw(st.booleans()) for _ in range(n))}
        width = 4 if kind == "packed" else draw(st.integers(2, 4))
        fields |= {"width": width, "state_len": width - 1 + spare}
        if kind == "packed":
            call = PackedConv(**fields, part_dim=64, channels=draw(st.sampled_from((64, 128))))
        else:
            call = ConvPrefill(**fields, channels=draw(st.integers(1, 3)))
    tables = [table for table in FINITE if table != "bias" or call.bias]
    regimes = {name: draw(st.sampled_from(FINITE[name])) for name in tables if draw(st.booleans())}
    return Case(call=call, regimes=regimes, seed=draw(st.integers(0, 2**32)))


def output_of(case: Case, name: str, cells: Cells) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """written, value and bound as ``[T, C]``."""
    call, parts = case.call, (cells.written, cells.value, cells.bound)
    assert isinstance(call, Call)
    if isinstance(call, PackedConv):
        shape = (call.channels // call.part_dim, call.tokens, call.part_dim)
        assert cells.written.shape == shape, name
        written, value, bound = (torch.cat(list(x), -1) for x in parts if x is not None)
    else:
        written, value, bound = (x.reshape(-1, call.channels) for x in parts if x is not None)
    return written, value, bound


@over(small_cases())
def test_outputs_and_write_sets(case: Case) -> None:
    scalar, call = Scalar(case), case.call
    assert isinstance(call, Call)
    name = "x" if isinstance(call, ConvUpdate) and call.in_place else "out"
    written, value, bound = output_of(case, name, expect(case).cells[name])
    expected: dict[Cell, list[Fraction]] = dict(scalar.outputs())
    cast = set[Cell]()
    if isinstance(call, ConvUpdate) and call.cast:
        tokens = range(sum(call.qlens))
        cast |= {(t, c) for t in tokens for c in range(call.channels)} - expected.keys()
    assert {tuple(i) for i in torch.nonzero(written).tolist()} == expected.keys() | cast
    for t, c in cast:
        assert Fraction(float(value[t, c])) == scalar.x[t][c]
        assert float(bound[t, c]) == 0.0
    for (t, c), terms in expected.items():
        a, size, slope = real(sum(terms, Fraction(0))), real(sum(map(abs, terms), Fraction(0))), mpmath.mpf(1)
        y = a
        if call.silu:
            s = 1 / (1 + mp.exp(-a))
            y, slope = a * s, abs(s * (1 + a * (1 - s)))
        off = abs(mpmath.mpf(float(value[t, c])) - y)
        assert off <= RELATIVE * (abs(y) + slope * size) + mpmath.mpf("1e-300"), (t, c, value[t, c], y)


@over(small_cases())
def test_stored_rows(case: Case) -> None:
    scalar, call = Scalar(case), case.call
    cells = expect(case).cells["conv_state" if isinstance(call, ConvUpdate) else "conv_states"]
    assert cells.bound is None
    assert cells.value.dtype == DTYPES[call.conv]  # type: ignore[union-attr]
    assert {tuple(i) for i in torch.nonzero(cells.written).tolist()} == scalar.stored.keys()
    for place, number in scalar.stored.items():
        assert Fraction(float(cells.value[place])) == number


@over(small_cases())
def test_which_tensor_is_the_output(case: Case) -> None:
    call, cells = case.call, expect(case).cells
    if isinstance(call, ConvPrefill):
        assert cells.keys() == {"out", "conv_states"}
        assert (cells["out"].fresh, cells["out"].via) == (True, DTYPES[call.conv])
        assert not call.passed("out")
        return
    assert isinstance(call, ConvUpdate)
    in_place = not call.own_out and call.activation == call.conv
    name = "x" if in_place else "out"
    assert cells.keys() == {name, "conv_state"}
    assert cells[name].fresh == (not call.own_out and not in_place)
    assert cells[name].via == (None if call.own_out else DTYPES[call.conv])
    assert ("out" in call.tensors()) == call.own_out
    assert not cells["conv_state"].fresh


def in_fp32(terms: list[Fraction], *, fused: bool) -> float:
    """Terms added in order in fp32; the products are exact rationals that round first unless fused."""
    if fused:
        total = Fraction(0)
        for term in terms:
            total = FORMATS["float32"].rounded(total + term)
        return float(total)
    with np.errstate(under="ignore"):
        acc = np.float32(0.0)
        for term in terms:
            acc = np.float32(acc + np.float32(float(term)))
    return float(acc)


@over(small_cases())
def test_the_bound_covers_fp32(case: Case) -> None:
    call = case.call
    assert isinstance(call, Call)
    name = "x" if isinstance(call, ConvUpdate) and call.in_place else "out"
    wide = expect(case, arithmetic=ANY_ORDER).cells[name]
    _, value, bound = output_of(case, name, expect(case, arithmetic=INTERPRETED).cells[name])
    assert bool((output_of(case, name, wide)[2] >= bound).all())  # it allows any of the others' functions
    for (t, c), terms in Scalar(case).outputs():
        for fused in (True, False):
            y = np.float32(in_fp32(terms, fused=fused))
            if call.silu:
                with np.errstate(over="ignore", under="ignore"):
                    y = y / (np.float32(1.0) + np.exp(-y))
            assert abs(float(y) - float(value[t, c])) <= float(bound[t, c]) * (1 + 1e-9), (t, c, fused)


@over(small_cases())
def test_the_bound_is_no_larger_than_roundings_make_it(case: Case) -> None:
    """Each of W products and at most W additions rounds by U of the magnitudes, no more."""
    call = case.call
    assert isinstance(call, Call)
    name = "x" if isinstance(call, ConvUpdate) and call.in_place else "out"
    _, value, bound = output_of(case, name, expect(case, arithmetic=COMPILED).cells[name])
    W = call.width
    for (t, c), terms in Scalar(case).outputs():
        size, a = float(sum(map(abs, terms), Fraction(0))), float(sum(terms, Fraction(0)))
        most = 1.001 * (W + 1) * U * size + 1.001 * W * SUBNORMAL
        if call.conv == call.taps == "bfloat16":
            tiny = sum(abs(term) < 2.0**-125 for term in terms)
            most = 1.001 * (W * U * size + tiny * 2.0**-133)
        if call.silu:
            # The slope is below 1.1; exponential, sum and quotient: 4 U + 2 U |a|, U, 4 U.
            v = abs(float(value[t, c]))
            gone = v if a < -87.0 else 0.0
            most = 1.1 * most + (9.5 + 2.0 * min(abs(a), 700.0)) * 1.02 * U * v + gone + FLUSH
        assert float(bound[t, c]) <= most, (t, c, a, size)


def test_products_below_the_normal_numbers() -> None:
    """In bf16, in one step or by fp32 first; above them a number 2 % off is not covered."""
    generator = torch.Generator().manual_seed(4)
    x, w = (torch.randn(4096, generator=generator).bfloat16() for _ in range(2))
    scale = torch.randint(-80, -58, (4096,), generator=generator).double().exp2().bfloat16()
    x, w = x * 2.0**-60, w * scale
    taps = torch.stack((w, torch.zeros_like(w)), 1)
    found = convolve(torch.stack((x, x), 1)[None], taps, None, silu=False, ar=COMPILED)
    value, bound = found.v[0, :, 0], found.e[0, :, 0]
    exact = x.double() * w.double()
    once = torch.tensor([float(FORMATS["bfloat16"].rounded(Fraction(p))) for p in exact.tolist()]).double()
    for result in (once, exact.float().bfloat16().double()):
        assert bool(((result - value).abs() <= bound).all())
    assert not bool(((1.02 * once - value).abs() <= bound)[once.abs() > 2.0**-120].any())
