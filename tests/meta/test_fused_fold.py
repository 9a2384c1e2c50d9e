"""The fold from differences of cumulative decays, as a factored commit has it."""

import pytest
import torch

from oracle.recurrence import fold
from oracle.tracked import COMPILED, FACTORED, Tracked, exact
from tests.meta.fused_fake import exp, rsqrt

Tensor = torch.Tensor
N, H, Q, K, V = 2, 2, 8, 128, 16


def inputs(seed: int, strength: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """State [N, H, V, K], raw keys and log decays [N, H, Q, K], corrections [N, H, Q, V], all fp32."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    g = -strength * torch.rand((N, H, Q, K), generator=rng)
    return normal(N, H, V, K), normal(N, H, Q, K).bfloat16().float(), g, normal(N, H, Q, V)


def folded(S: Tensor, k: Tensor, g: Tensor, u: Tensor, tokens: Tensor, fault: str = "") -> Tensor:
    """The formula in fp32, every function off by what is declared."""
    kn = k * rsqrt((k * k).sum(-1) + 1e-6)[..., None]
    result = torch.empty_like(S)
    for row, n in enumerate(tokens.tolist()):
        total, logs = torch.zeros_like(g[row, :, 0]), []
        for t in range(n):
            logs.append(total := total + g[row, :, t])
        last = logs[-2] if fault == "decay of the token before" and n > 1 else logs[-1]
        acc = S[row] * exp(last)[:, None]
        for t in range(n):
            span = last - (logs[t - 1] if fault == "own decay counts" and t else logs[t])
            scaled = kn[row, :, t] * exp(span)
            acc = acc + u[row, :, t, :, None] * scaled[:, None]
        result[row] = acc
    return result


@pytest.mark.parametrize("strength", [1e-3, 1.0, 5.0, 11.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_holds(seed: int, strength: float) -> None:
    S, k, g, u = inputs(seed, strength)
    tokens = torch.tensor([Q, 1 + seed])
    known = fold(exact(S), exact(k), exact(g), exact(u), tokens, FACTORED)
    ratio = (folded(S, k, g, u, tokens).double() - known.v).abs() / known.e
    assert 0.05 < float(ratio.max()) <= 1.0
    for fault in ("decay of the token before", "own decay counts"):
        wrong = (folded(S, k, g, u, tokens, fault).double() - known.v).abs() / known.e
        assert float(wrong.max()) > 10.0


def test_errors_of_the_decay_that_cancel_are_counted_once() -> None:
    """What two cumulative sums share drops out of their difference: the newest token has not decayed."""
    S, k, g, u = inputs(0, 1.0)
    u[:, :, :-1] = 0.0
    wrong = Tracked(g.double(), torch.full(g.shape, 1e-2, dtype=torch.float64))
    tokens = torch.tensor([Q, Q])
    found = fold(exact(S * 0.0), exact(k), wrong, exact(u), tokens, FACTORED)
    assert float((found.e / found.v.abs().amax()).max()) < 1e-4
    u[:, :, -2] = 1.0  # one token more: its own error, no others'
    before = fold(exact(S * 0.0), exact(k), wrong, exact(u), tokens, FACTORED)
    assert float(before.e.max()) < 0.02 * float(before.v.abs().amax())


def test_a_sequential_fold_keeps_its_bound() -> None:
    """Only a factored arithmetic pays for differences: its bound is the larger."""
    S, k, g, u = inputs(1, 11.0)
    tokens = torch.tensor([Q, 3])
    sequential = fold(exact(S), exact(k), exact(g), exact(u), tokens, COMPILED)
    factored = fold(exact(S), exact(k), exact(g), exact(u), tokens, FACTORED)
    assert bool((factored.e >= sequential.e).all())
    assert bool((factored.e > 1.2 * sequential.e).any())
