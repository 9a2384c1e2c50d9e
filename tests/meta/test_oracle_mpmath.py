"""The oracle against 60-digit arithmetic, written from the contract's text and sharing no code with it.

Double precision has u = 2**-53 = 1.1e-16. A gate's argument a x carries a relative error of
a few u, which an exponential turns into |a x| times that: for |a x| <= 1000 under 4e-13. A
window of four tokens adds some hundred roundings, 1e-14, and decays of up to e**-745 (below
that doubles are zero) another 3e-13 at most once, since such a decay leaves nothing behind.
So 1e-12 holds, relative to a gate's value, and for sums relative to the sum of magnitudes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf

from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.expect import expect
from oracle.gate import log_decay
from oracle.recurrence import normalise, stepwise
from oracle.tracked import COMPILED, exact
from oracle.values import REGIMES, build
from tests.meta.calls import verify_of

RELATIVE = mpf("1e-12")
SMALLEST = mpf("1e-300")
"""Absolute floor: doubles underflow where 60 digits do not."""
NOTHING = mpf(0)
FINITE = {name: [r for r in table if r != "specials"] for name, table in REGIMES.items()}


@pytest.fixture(autouse=True)
def digits() -> Iterator[None]:
    with mp.workdps(60):
        yield


def float32s(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


def gate(raw_g: Any, A_log: Any, dt_bias: Any, bound: Any) -> Any:
    """Section 1.2, number by number."""
    x, a = mpf(raw_g) + mpf(dt_bias), mp.exp(mpf(A_log))
    if bound is not None:
        return mpf(bound) / (1 + mp.exp(-a * x))
    return -a * (x if x > 20 else mp.log(1 + mp.exp(x)))


def unit(x: list[Any]) -> list[Any]:
    """Section 1.3: x / sqrt(sum x^2 + 1e-6)."""
    norm = mp.sqrt(mp.fsum(e * e for e in x) + mpf(10) ** -6)
    return [e / norm for e in x]


class Window:
    """Section 1.3 for one row and head, with the sum of magnitudes beside every number."""

    def __init__(self, S: Any) -> None:
        self.S = [[mpf(e) for e in row] for row in S]
        self.size = [[abs(e) for e in row] for row in self.S]

    def token(self, q: list[Any], k: list[Any], v: Any, g: list[Any], beta: Any) -> Any:
        """One token, k and q ready for use; (u, size of u, o, size of o), each [V]."""
        decay, us, u_sizes, os, o_sizes = [mp.exp(e) for e in g], [], [], [], []
        for row, size, target in zip(self.S, self.size, v, strict=True):
            row[:] = [s * d for s, d in zip(row, decay, strict=True)]
            size[:] = [s * d for s, d in zip(size, decay, strict=True)]
            u = beta * (mpf(target) - mp.fsum(s * e for s, e in zip(row, k, strict=True)))
            u_size = beta * (abs(mpf(target)) + mp.fsum(s * abs(e) for s, e in zip(size, k, strict=True)))
            row[:] = [s + u * e for s, e in zip(row, k, strict=True)]
            size[:] = [s + u_size * abs(e) for s, e in zip(size, k, strict=True)]
            us.append(u)
            u_sizes.append(u_size)
            os.append(mp.fsum(s * e for s, e in zip(row, q, strict=True)))
            o_sizes.append(mp.fsum(s * abs(e) for s, e in zip(size, q, strict=True)))
        return us, u_sizes, os, o_sizes


def agree(observed: Any, expected: Any, size: Any) -> None:
    assert abs(mpf(float(observed)) - expected) <= RELATIVE * size + SMALLEST, (observed, expected)


@given(
    float32s(-100, 100),
    float32s(-3, 2),
    float32s(-30, 30),
    st.sampled_from((None, 0.0, -0.0625, -1.0, -5.0, -88.0)) | float32s(-100, 0),
)
def test_gate(raw_g: float, A_log: float, dt_bias: float, bound: float | None) -> None:
    found = log_decay(tracked(raw_g), tracked(A_log), tracked(dt_bias), bound, COMPILED).v
    expected = gate(raw_g, A_log, dt_bias, bound)
    agree(found, expected, abs(expected))
    assert (0 if bound is None else bound) == 0 or bound is None or bound <= float(found) <= 0
    assert bound != 0 or float(found) == 0


def tracked(x: float) -> Any:
    return exact(torch.tensor(x, dtype=torch.float64))


@pytest.mark.parametrize("A_log", [0.0, -2.5, 1.75])
@pytest.mark.parametrize("step", [-2, -1, 0, 1, 2])
def test_softplus_changes_branch_right_after_20(A_log: float, step: int) -> None:
    x = 20.0 + step * float(np.spacing(np.float32(20.0)))
    found = log_decay(tracked(x), tracked(A_log), tracked(0.0), None, COMPILED).v
    literal = mp.log(1 + mp.exp(mpf(x)))
    expected = -mp.exp(mpf(A_log)) * (x if step > 0 else literal)
    agree(found, expected, abs(expected))
    # The branches differ by 2e-9, a hundred times what is asked: the test can tell them apart.
    assert abs(literal - x) > 100 * RELATIVE * 20


@pytest.mark.parametrize("scale", [0.0, 2.0**-30, 2.0**-12, 1e-3, 1.0, 2.0**40])
@given(x=st.lists(float32s(-4, 4), min_size=1, max_size=3))
def test_normalisation_adds_eps_to_the_squared_norm(scale: float, x: list[float]) -> None:
    data = torch.tensor(x, dtype=torch.float32) * scale
    found = normalise(exact(data), COMPILED).v
    expected = unit([mpf(float(e)) for e in data])
    for e, want in zip(found, expected, strict=True):
        agree(e, want, abs(want))


def test_eps_is_seen_exactly() -> None:
    # A squared norm equal to eps: the result is x / sqrt(2e-6), not a unit vector.
    found = normalise(exact(torch.tensor([1e-3], dtype=torch.float64)), COMPILED).v
    assert abs(float(found[0]) - 0.5**0.5) < 1e-12


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_recurrence(data: st.DataObject, K: int, V: int, Q: int) -> None:
    def numbers(shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        flat = data.draw(st.lists(float32s(low, high), min_size=(n := int(np.prod(shape))), max_size=n))
        return torch.tensor(flat, dtype=torch.float64).reshape(shape)

    q, k = numbers((1, 1, Q, K), -1, 1), numbers((1, 1, Q, K), -1, 1)
    v, state = numbers((1, 1, Q, V), -8, 8), numbers((1, 1, V, K), -8, 8)
    g, beta = numbers((1, 1, Q, K), -100, 0), numbers((1, 1, Q), 0, 1)
    found = stepwise(exact(q), exact(k), exact(v), exact(g), exact(beta), exact(state), COMPILED)
    window = Window(state[0, 0].tolist())
    for t in range(Q):
        row = [[mpf(e) for e in x[0, 0, t].tolist()] for x in (q, k, v, g)]
        inputs: tuple[Any, ...] = (*row, mpf(float(beta[0, 0, t])))
        us, u_sizes, os, o_sizes = window.token(*inputs)
        for i in range(V):
            agree(found.u.v[0, 0, t, i], us[i], u_sizes[i])
            agree(found.o.v[0, 0, t, i], os[i], o_sizes[i])
    for i in range(V):
        for j in range(K):
            agree(found.state.v[0, 0, i, j], window.S[i][j], window.size[i][j])


@st.composite
def tiny_cases(draw: st.DrawFn) -> Case:
    """One to three rows of one to four tokens, K and V of 1 to 3, finite values of any regime."""
    qlens = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    n = len(qlens)
    call = Verify(
        heads=draw(st.integers(1, 2)),
        key_dim=draw(st.integers(1, 3)),
        value_dim=draw(st.integers(1, 3)),
        window=4,
        pool=n + 2,
        qlens=qlens,
        slots=tuple(draw(st.permutations(range(n + 2)))[:n]),
        ids=tuple(range(n)),
        capacity=n,
        activation=draw(st.sampled_from(("float32", "bfloat16", "float16"))),
        state=draw(st.sampled_from(("float32", "bfloat16"))),
        lower_bound=draw(st.sampled_from((-5.0, None, 0.0, -88.0))),
    )
    names = [name for name in FINITE if name in call.tensors()]
    regimes = {name: draw(st.sampled_from(FINITE[name])) for name in names if draw(st.booleans())}
    if call.activation == "float16":  # which has no room for them: infinities
        regimes = {name: regime for name, regime in regimes.items() if regime != "extreme"}
    return Case(call=call, regimes=regimes, seed=draw(st.integers(0, 2**32)))


@given(tiny_cases())
def test_whole_verify(case: Case) -> None:
    call, values = verify_of(case), build(case).tensors
    cells = expect(case).cells
    out, correction = cells["out"], cells["correction"]
    assert out.bound is not None
    written = torch.zeros_like(correction.written)
    for row, start in enumerate(call.starts[:-1]):
        tokens = range(start, start + call.qlens[row])
        if call.slots[row] <= 0:
            assert not out.value[tokens.start : tokens.stop].any()
            assert not out.bound[tokens.start : tokens.stop].any()
            continue
        written[row, :, : call.qlens[row]] = True
        for h in range(call.heads):
            window = Window(values["state"][call.slots[row], h].tolist())
            for t, token in enumerate(tokens):
                us, u_sizes, os, o_sizes = window.token(*_inputs(case, values, token, h))
                for i in range(call.value_dim):
                    agree(correction.value[row, h, t, i], us[i], u_sizes[i])
                    agree(out.value[token, h, i], os[i], o_sizes[i])
    assert torch.equal(correction.written, written)
    assert bool(out.written.all())


def _inputs(case: Case, values: dict[str, torch.Tensor], token: int, h: int) -> Any:
    """A token's q, k, v, g and beta for one head as the recurrence takes them."""

    def row(name: str) -> list[Any]:
        return [mpf(e) for e in values[name][token, h].tolist()]

    K = verify_of(case).key_dim
    q = [e / mp.sqrt(K) for e in unit(row("q"))]
    bias, A_log = values["dt_bias"][h].tolist(), float(values["A_log"][h])
    g = [gate(x, A_log, b, verify_of(case).lower_bound) for x, b in zip(row("raw_g"), bias, strict=True)]
    beta = 1 / (1 + mp.exp(-mpf(float(values["raw_beta"][token, h]))))
    return q, unit(row("k")), row("v"), g, beta
