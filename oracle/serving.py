"""What serving must come to: the plain recurrence over the accepted tokens, and nothing else.

A decode step maps the state of a head to ``S diag(e^g) (I - beta k^ k^^T) + beta v k^^T``. With
e^g <= 1, 0 <= beta <= 1 and ||k^|| <= 1 neither factor expands a row of S in the 2-norm, so a
row's deviation from the plain recurrence after many steps is at most the sum of what the steps
added to it. An element-wise error analysis would lose just that and grow with every token.

What a step added is element-wise: the error of a fold of the state in memory, the corrections
that verify may have recorded among its inputs, and one rounding to the state's dtype. So this
page knows nothing of how a window was computed; its oracle bounds the corrections from the same
state. A factored arithmetic brings in that way (``oracle.factored``) the split probes, the
accumulation of tensor cores and couplings of two exponentials, and ``fold`` holds for decays from
differences. A fused call leaves no convolved tokens in memory: the model takes them from its own
history, rounded to bf16 as ``oracle.fused_verify`` rounds them. Where the convolution's error
reaches both sides of a tie, the kernel may hold the neighbour: in q, k and v the corrections and
outputs carry that already, and the recorded keys that commit folds have it as ``Tokens.k.e``.
"""

from dataclasses import dataclass, replace

import torch

from oracle.recurrence import EPS, fold
from oracle.tracked import Arithmetic, Tracked, exact

Tensor = torch.Tensor
HALF_STEP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Unit roundoff of a stored state."""
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133}


@dataclass(frozen=True)
class Tokens:
    """Some tokens of one request: q, k, g ``[n, H, K]``, v ``[n, H, V]``, beta ``[n, H]``, float64.

    ``q`` and ``k`` are raw, ``k`` with what recorded keys may differ by; ``g`` is the log decay with
    the error that fp32 may make of it, ``beta`` a probability; ``inputs [n, C]`` is what the
    convolution took, in the conv dtype.
    """

    q: Tensor
    k: Tracked
    v: Tensor
    g: Tracked
    beta: Tensor
    inputs: Tensor

    def first(self, n: int) -> "Tokens":
        """The first ``n`` of them."""
        return Tokens(self.q[:n], self.k[:n], self.v[:n], self.g[:n], self.beta[:n], self.inputs[:n])


@dataclass(frozen=True)
class Request:
    """What the model knows of a request after some tokens.

    ``S [H, V, K]`` is the exact state and ``E [H, V]`` a bound on the 2-norm of each row's
    deviation in memory; ``history [C, W-1]`` the last inputs of the convolution, exactly.
    """

    S: Tensor
    E: Tensor
    history: Tensor
    tokens: int = 0

    def outputs(self, some: Tokens) -> tuple[Tensor, Tensor]:
        """Outputs ``[n, H, V]`` of plain decode steps, and what the deviation may add to them."""
        S, outs = self.S, []
        q = _unit(some.q) * some.q.shape[-1] ** -0.5
        for t in range(some.q.shape[0]):
            S = _decode(S, some, t)
            outs.append(torch.einsum("hvk,hk->hv", S, q[t]))
        norms = q.norm(dim=-1)[:, :, None]  # [n, H, 1]
        return torch.stack(outs), norms * self.E

    def advanced(self, some: Tokens, added: Tensor | None = None) -> "Request":
        """After these tokens; ``added [H, V, K]`` bounds what memory gained over exact steps."""
        S = self.S
        for t in range(some.q.shape[0]):
            S = _decode(S, some, t)
        E = self.E + added.norm(dim=-1) if added is not None else self.E
        return replace(
            self,
            S=S,
            E=E,
            history=_shifted(self.history, some.inputs),
            tokens=self.tokens + some.q.shape[0],
        )


def started(state: tuple[int, int, int], history: tuple[int, int], dtype: torch.dtype) -> Request:
    """A request without tokens: zero state ``[H, V, K]``, zero history ``[C, W-1]`` in the conv dtype."""
    S = torch.zeros(state, dtype=torch.float64)
    return Request(S, torch.zeros(state[:2], dtype=torch.float64), torch.zeros(history, dtype=dtype))


def added_by_commit(before: Tensor, some: Tokens, u: Tracked, dtype: torch.dtype, ar: Arithmetic) -> Tensor:
    """How far the committed state may be from exact steps over ``some`` from the state ``before`` in memory.

    ``before [H, V, K]``, corrections ``u [n, H, V]`` with the error that verify may have made;
    the result ``[H, V, K]`` includes the one rounding to ``dtype``.
    """

    def lead(x: Tensor) -> Tensor:
        return x.transpose(0, 1)[None]  # [1, H, n, ...]

    count = torch.tensor([some.q.shape[0]])
    k, g, rows = (Tracked(lead(x.v), lead(x.e)) for x in (some.k, some.g, u))
    folded = fold(exact(before[None]), k, g, rows, count, ar)
    v, e = folded.v[0], folded.e[0]
    return e + HALF_STEP[dtype] * (v.abs() + e) + SMALLEST[dtype]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def _decode(S: Tensor, some: Tokens, t: int) -> Tensor:
    """One plain decode step of all heads."""
    k = _unit(some.k.v[t])
    S = S * torch.exp(some.g.v[t])[:, None, :]
    u = some.beta[t][:, None] * (some.v[t] - torch.einsum("hvk,hk->hv", S, k))
    return S + u[:, :, None] * k[:, None, :]


def _shifted(history: Tensor, inputs: Tensor) -> Tensor:
    return torch.cat((history, inputs.T), 1)[:, -history.shape[1] :]
