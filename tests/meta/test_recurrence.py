"""The two formulations of the recurrence agree, whatever the shape and the decay.

Both round in double precision, u = 2**-53. Per token and term the recurrence rounds about
K + 4 times, so a window of Q tokens differs by at most 2 (K + 4) Q u of the sum of
magnitudes, twice for the two sides. The closed form takes differences of cumulative decays:
L is off by Q u |L| and so is the relative error of every e**(L_t - L_i).
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle.recurrence import Window, closed_form, stepwise
from oracle.tracked import COMPILED, exact

Tensor = torch.Tensor
U64 = 2.0**-53

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@st.composite
def windows(draw: st.DrawFn, *, strongest: float) -> Inputs:
    """(q, k, v, g, beta, state) of 1 to 3 rows, 1 to 2 heads, K and V to 32, windows to 8.

    Keys are independent, nearly parallel, one vector, or zero; log decays reach from 0 to
    ``-strongest``, all alike, mixed by channel, or spread over binades.
    """
    N, H, Q = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 8))
    K, V = draw(st.sampled_from((1, 2, 3, 8, 16, 32))), draw(st.sampled_from((1, 2, 5, 16, 32)))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=rng, dtype=torch.float64)

    spread = draw(st.sampled_from((1.0, 0.03, 0.0)))
    k = normal(N, H, 1, K) * (0.0 if draw(st.integers(0, 9)) == 9 else 1.0) + spread * normal(N, H, Q, K)
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    match draw(st.sampled_from(("uniform", "mixed", "binades", "none", "full"))):
        case "uniform":
            g = -strongest * uniform(N, H, Q, K)
        case "mixed":
            g = torch.where(uniform(N, H, 1, K) < 0.5, -strongest, -1e-6) * uniform(N, H, Q, K)
        case "binades":
            g = -strongest * torch.exp2(-40.0 * uniform(N, H, Q, K))
        case "none":
            g = torch.zeros(N, H, Q, K, dtype=torch.float64)
        case _:
            g = torch.full((N, H, Q, K), -strongest, dtype=torch.float64)
    beta = uniform(N, H, Q) ** draw(st.sampled_from((1.0, 0.01, 30.0)))
    scale = 2.0 ** draw(st.integers(-40, 40))
    return normal(N, H, Q, K) * K**-0.5, k, normal(N, H, Q, V), g, beta, scale * normal(N, H, V, K)


def magnitudes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> list[Tensor]:
    """The recurrence with every term taken positive: what rounding errors are relative to."""
    S, us, os = state.abs(), [], []
    for t in range(k.shape[2]):
        S = S * torch.exp(g[:, :, t, None])
        u = beta[:, :, t, None] * (v[:, :, t].abs() + (S * k[:, :, t, None].abs()).sum(-1))
        S = S + u[..., None] * k[:, :, t, None].abs()
        us.append(u)
        os.append((S * q[:, :, t, None].abs()).sum(-1))
    return [torch.stack(us, 2), torch.stack(os, 2), S]


def steps_of(inputs: Inputs) -> Window:
    q, k, v, g, beta, state = map(exact, inputs)
    return stepwise(q, k, v, g, beta, state, COMPILED)


def worst(inputs: Inputs) -> float:
    """Largest difference of the two formulations, in units of the sum of magnitudes."""
    steps = steps_of(inputs)
    pairs = zip((steps.u.v, steps.o.v, steps.state.v), closed_form(*inputs), magnitudes(*inputs), strict=True)
    # Doubles underflow near 1e-308; nothing below 1e-290 is told apart.
    return max(float(((a - b).abs() / (size + 1e-290)).max()) for a, b, size in pairs)


@given(windows(strongest=100.0))
def test_formulations_agree_to_1e_12(inputs: Inputs) -> None:
    # At most 8 x 36 x 4 u = 1.3e-13 for the sums and 8 x 800 u = 7e-13 for the decays.
    assert worst(inputs) <= 1e-12


@given(windows(strongest=1e4))
def test_formulations_agree_under_any_decay(inputs: Inputs) -> None:
    Q, K = inputs[1].shape[2:]
    total = float(-inputs[3].sum(2).min())
    assert worst(inputs) <= (4 * (K + 4) * Q + 2 * Q * total) * U64


@given(windows(strongest=100.0))
def test_formulations_differ_when_one_number_differs(inputs: Inputs) -> None:
    # The comparison can fail: one value moved by 1e-9 of its size shows in both u and o.
    q, k, v, g, beta, state = inputs
    moved = v.clone()
    moved[..., -1, :] += 1e-9 * (
        1.0 + magnitudes(*inputs)[0][..., -1, :] / beta[..., -1, None].clamp(min=1e-300)
    )
    steps = steps_of(inputs)
    other = closed_form(q, k, moved, g, beta, state)
    size = magnitudes(*inputs)[0]
    assert float(((steps.u.v - other[0]).abs() / size)[..., -1, :].min()) > 1e-12


@given(windows(strongest=100.0), st.integers(0, 7))
def test_earlier_tokens_do_not_depend_on_later_ones(inputs: Inputs, cut: int) -> None:
    q, k, v, g, beta, state = inputs
    cut = min(cut, k.shape[2] - 1) + 1
    whole = steps_of(inputs)
    early = [x[:, :, :cut] for x in (q, k, v, g, beta)]
    part = steps_of((early[0], early[1], early[2], early[3], early[4], state))
    for a, b in ((whole.u, part.u), (whole.o, part.o)):
        assert torch.equal(a.v[:, :, :cut], b.v)
        assert torch.equal(a.e[:, :, :cut], b.e)
