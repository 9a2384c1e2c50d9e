"""The gated delta rule over a window of tokens (contract, section 1.3), in two formulations.

Shapes, for N rows, H heads, Q tokens: ``k, q, g [N, H, Q, K]``, ``v [N, H, Q, V]``,
``beta [N, H, Q]``, ``state [N, H, V, K]`` (V-major). ``g`` is the log decay, ``beta`` a
probability. Results are corrections ``u [N, H, Q, V]`` and outputs ``o [N, H, Q, V]``.
"""

from dataclasses import dataclass

import torch

from oracle.parts import in_parts
from oracle.tracked import Arithmetic, Tracked, U, constant, exact, larger, select

EPS = 1e-6


@dataclass(frozen=True)
class Window:
    """Corrections, outputs and the state after the last token."""

    u: Tracked
    o: Tracked
    state: Tracked


def normalise(x: Tracked, ar: Arithmetic) -> Tracked:
    """x * rsqrt(sum x**2 + 1e-6) over the last dimension."""
    norm = ar.add(ar.sum(ar.mul(x, x)), constant(EPS))
    return ar.mul(x, _expand(ar.rsqrt(norm)))


def stepwise(
    q: Tracked, k: Tracked, v: Tracked, g: Tracked, beta: Tracked, state: Tracked, ar: Arithmetic
) -> Window:
    """Token by token, as the contract writes it; ``k`` normalised, ``q`` normalised and scaled.

    S = S exp(g);  u = beta (v - S k);  S = S + u k^T;  o = S q
    """
    S, us, os = state, [], []
    rows = (_row(x).unbound(2) for x in (k, q, ar.exp(g)))  # [N, H, 1, K] each
    for k_t, q_t, decay, v_t, beta_t in zip(*rows, v.unbound(2), _expand(beta).unbound(2), strict=True):
        S = ar.mul(S, decay)  # of key columns
        predicted = ar.sum(ar.mul(S, k_t))  # [N, H, V]
        u = ar.mul(beta_t, ar.add(v_t, predicted, -1.0))
        S = ar.add(S, ar.mul(_expand(u), k_t))
        us.append(u)
        os.append(ar.sum(ar.mul(S, q_t)))
    return Window(_stack(us), _stack(os), S)


def fold(state: Tracked, k: Tracked, g: Tracked, u: Tracked, tokens: torch.Tensor, ar: Arithmetic) -> Tracked:
    """The state after the first ``tokens[n]`` tokens of row n, from recorded keys and corrections.

    S_n = S_0 e^{L_{n-1}} + sum_{t<n} u_t (k^_t e^{L_{n-1} - L_t})^T with raw keys ``k``, in
    either of two orders: token by token forwards, or backwards with the decay accumulated. The
    bound holds for both; for a factored arithmetic also for the formula as it stands.
    """
    N, H, V, K = state.v.shape

    def part(n: slice, h: slice) -> tuple[Tracked]:
        return (_fold(state[n, h], k[n, h], g[n, h], u[n, h], tokens[n], ar),)

    return in_parts(N, H, V * K, part)[0]


def _fold(
    state: Tracked, k: Tracked, g: Tracked, u: Tracked, tokens: torch.Tensor, ar: Arithmetic
) -> Tracked:
    k, decay = normalise(k, ar), ar.exp(g)
    active = [(t < tokens)[:, None, None, None] for t in range(k.v.shape[2])]
    update = [ar.mul(_expand(u[:, :, t]), _row(k[:, :, t])) for t in range(len(active))]  # [N, H, V, K]
    forwards = state
    for t, on in enumerate(active):
        stepped = ar.add(ar.mul(forwards, _row(decay[:, :, t])), update[t])
        forwards = select(on, stepped, forwards)
    through = exact(torch.ones_like(decay.v[:, :, :1]))  # [N, H, 1, K]
    added = exact(torch.zeros_like(state.v))
    for t in reversed(range(len(active))):
        added = select(active[t], ar.add(added, ar.mul(update[t], through)), added)
        through = select(active[t], ar.mul(through, _row(decay[:, :, t])), through)
    result = larger(forwards, ar.add(ar.mul(state, through), added))
    return larger(result, _fold_by_differences(state, k, g, u, active, ar)) if ar.factored else result


def cumulative(g: Tracked, ar: Arithmetic) -> list[Tracked]:
    """L_t = g_0 + .. + g_t along the token axis (the third), each [N, H, K].

    The error of L_t is that of L_i plus what tokens i + 1 to t add: an implementation's
    difference of two is off by no more than the difference of their errors.
    """
    total = g[:, :, 0]
    logs = [total]
    for t in range(1, g.v.shape[2]):
        total = ar.add(total, g[:, :, t])
        logs.append(total)
    return logs


def _fold_by_differences(
    state: Tracked, k: Tracked, g: Tracked, u: Tracked, active: list[torch.Tensor], ar: Arithmetic
) -> Tracked:
    """The fold with e^{L_{n-1} - L_t} from differences of cumulative decays; ``k`` normalised."""
    logs = cumulative(g, ar)
    last = logs[0]
    for t, on in enumerate(active):
        last = select(on[..., 0], logs[t], last)
    acc = ar.mul(state, _row(ar.exp(last)))
    for t, on in enumerate(active):
        v = last.v - logs[t].v
        span = Tracked(v, (last.e - logs[t].e).clamp(min=0.0) + U * (v.abs() + last.e))
        # Past a row's last token the span is not a decay; nothing of it is used.
        scaled = ar.mul(k[:, :, t], ar.exp(Tracked(span.v.clamp(max=0.0), span.e)))
        acc = select(on, ar.add(acc, ar.mul(_expand(u[:, :, t]), _row(scaled))), acc)
    return acc


def closed_form(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same from cumulative decays, without a running state: (u, o, final state).

    With L_t = g_0 + .. + g_t, all from the old state S_0:
    u_t = beta_t (v_t - S_0 (e^{L_t} k_t) - sum_{i<t} <k_i e^{L_t - L_i}, k_t> u_i)
    o_t = S_0 (e^{L_t} q_t) + sum_{i<=t} <k_i e^{L_t - L_i}, q_t> u_i
    """
    window = k.shape[2]
    L = torch.cumsum(g, 2)
    us: list[torch.Tensor] = []
    os: list[torch.Tensor] = []
    for t in range(window):
        earlier = [k[:, :, i] * torch.exp(L[:, :, t] - L[:, :, i]) for i in range(t + 1)]  # [N, H, K]
        u = v[:, :, t] - torch.einsum("nhvk,nhk->nhv", state, torch.exp(L[:, :, t]) * k[:, :, t])
        for i in range(t):
            u = u - (earlier[i] * k[:, :, t]).sum(-1, keepdim=True) * us[i]
        us.append(beta[:, :, t, None] * u)
        o = torch.einsum("nhvk,nhk->nhv", state, torch.exp(L[:, :, t]) * q[:, :, t])
        for i in range(t + 1):
            o = o + (earlier[i] * q[:, :, t]).sum(-1, keepdim=True) * us[i]
        os.append(o)
    final = state * torch.exp(L[:, :, -1])[:, :, None]
    for i in range(window):
        final = final + us[i][..., None] * (k[:, :, i] * torch.exp(L[:, :, -1] - L[:, :, i]))[:, :, None]
    return torch.stack(us, 2), torch.stack(os, 2), final


def _expand(a: Tracked) -> Tracked:
    return Tracked(a.v[..., None], a.e[..., None])


def _row(a: Tracked) -> Tracked:
    return Tracked(a.v[..., None, :], a.e[..., None, :])


def _stack(parts: list[Tracked]) -> Tracked:
    return Tracked(torch.stack([p.v for p in parts], 2), torch.stack([p.e for p in parts], 2))
