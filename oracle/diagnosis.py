"""Which step of the algorithm explains a wrong number: norm, gate, decay, correction, output or fold.

A judge sees where memory first differs; several steps may be at fault there. Each wrong vector is
therefore held against models with one step left free, computed from what the implementation
itself recorded for earlier tokens, so that an error which only follows counts for nothing:

* ``u_t = a v_t - b p_t`` with ``p_t = S e^{g_t} k_t`` (k normalised): the contract has a = b = beta. If
  some a and b fit all value channels, then b alone is off where keys are normalised wrongly, and
  both are off together where the gate is;
* ``o_t = c S_t q_t``: where c fits, queries are normalised or scaled wrongly;
* ``S_n = S_0 diag(d) + sum_t u_t (k_t * w_t)^T``: where one number per token fits in place of each w_t,
  recorded keys are normalised wrongly; where a free d and w fit, it is the decay;
* decays that come of common slips in the gate's formula, in place of g.

A model with as many free numbers as there are equations fits everything and says nothing, so
small cases have no diagnosis.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from oracle.calls.commit import Commit
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.expectation import Expected, Observation
from oracle.judge import Verdict
from oracle.recurrence import EPS
from oracle.stored import excess, preimage
from oracle.values import Values
from oracle.verify import live_rows

Tensor = torch.Tensor
SPARE = {torch.float32: 1, torch.float64: 1}
"""Equations that a model must have beyond its free numbers, where elements are stored to a part in 10**7:
one that fits by chance is a part in a million. Where they are stored in 16 bits, ``SPARE_NARROW``."""
SPARE_NARROW = 4
ROUNDS, RELAXED, NEARLY = 400, 1.9, 0.02
"""Of alternating projections, how far each goes (nearly twice the way converges soonest), and what part of
the step between stored numbers is near enough: they reach the edge of what is right in the limit only."""
SHARE = 0.99
"""Of a vector's elements, which must be explained by fitted factors: in large ones a few may be beside it."""
_NEAR = 1e-2
"""How far a fitted factor may be from 1 and still count as that."""
MOST = 6
"""Wrong vectors that are looked at, the first ones."""


def diagnose(case: Case, values: Values, expected: Expected, seen: Observation, verdict: Verdict) -> str:
    """The step that explains all of the first wrong vectors, or nothing where none does alone."""
    first = verdict.problems[0] if verdict.problems else None
    if first is None or first.kind != "value":
        return ""
    if isinstance(case.call, Verify) and first.tensor in ("correction", "out"):
        return _agreed(_Window(case.call, values, expected, seen).causes(first.tensor))
    if isinstance(case.call, Commit) and first.tensor.startswith("state."):
        return _agreed(_folds(case.call, values, expected, seen, first.tensor))
    return ""


def _agreed(causes: Iterator[str]) -> str:
    """What all say of those that say something; nothing if they differ."""
    found = {cause for _, cause in zip(range(MOST), causes, strict=False) if cause}
    return found.pop() if len(found) == 1 else ""


@dataclass(frozen=True)
class _Vector:
    """One wrong vector: what was seen, and the bound on every element."""

    seen: Tensor
    bound: Tensor

    def fits(self, value: Tensor) -> bool:
        """Whether ``value`` explains it."""
        return bool((excess(value, self.seen) <= self.bound).all())

    def solve(self, *basis: Tensor) -> Tensor | None:
        """Coefficients with which the basis explains it; None if none do, or if anything would."""
        A = torch.stack(basis, -1)
        if len(self.seen) < len(basis) + SPARE.get(self.seen.dtype, SPARE_NARROW):
            return None
        least, most = preimage(self.seen)
        inverse, target = torch.linalg.pinv(A), self.seen.double()
        # Alternating projections, onto what the basis spans and onto what may have been stored as this.
        for _ in range(ROUNDS):
            x: Tensor = inverse @ target
            value, slack = A @ x, max(1.0, float(x.abs().max())) * self.bound
            nearest = value.clamp(least - slack, most + slack)
            near = (value - nearest).abs() <= NEARLY * (most - least)
            if float(near.double().mean()) >= SHARE:
                return x
            target = value + RELAXED * (nearest - value)
        return None


class _Window:
    """A call of verify, its inputs as float64 windows ``[n, H, Q, ..]``."""

    def __init__(self, call: Verify, values: Values, expected: Expected, seen: Observation) -> None:
        self._call, self._expected, self._seen = call, expected, seen
        self._live = live = live_rows(call)
        tensors = values.tensors

        def window(name: str) -> Tensor:
            return tensors[name][live.token].transpose(1, 2).double()

        self._k, self._q = (_unit(window(name)) for name in ("k", "q"))
        self._q = self._q * call.key_dim**-0.5
        self._v, self._beta = window("v"), torch.sigmoid(window("raw_beta"))
        self._S = tensors["state"][live.slots].double()
        self._gate = _Gate(
            window("raw_g"),
            tensors["A_log"].double()[:, None, None],
            tensors["dt_bias"].double()[:, None, :],
            call.lower_bound,
        )
        rows = torch.tensor([call.record_row(int(i)) for i in live.rows], dtype=torch.long)
        self._u = seen.after["correction"].double()[rows]

    def causes(self, name: str) -> Iterator[str]:
        """For each row and head with something wrong in this tensor, the cause at its first wrong token."""
        cells, after = self._expected.cells[name], self._seen.after[name]
        assert cells.bound is not None
        ratio = torch.where(cells.written, excess(cells.value, after, cells.via) / cells.bound, 0.0)
        wrong = ratio.nan_to_num(nan=2.0) > 1.0
        for j, row in enumerate(self._live.rows.tolist()):
            for h in range(self._call.heads):
                for t in range(self._call.qlens[row]):
                    at = self._place(name, row, j, h, t)
                    if bool(wrong[at].any()):
                        vector = _Vector(after[at], cells.bound[at])
                        told = self._of_correction if name == "correction" else self._of_output
                        yield told(vector, j, h, t)
                        break

    def _place(self, name: str, row: int, j: int, h: int, t: int) -> tuple[int, ...]:
        if name == "correction":
            return self._call.record_row(row), h, t
        return int(self._live.token[j, t]), h

    def _state(self, g: Tensor, j: int, h: int, t: int) -> Tensor:
        """The state that token t finds, before its decay, from the corrections that were recorded."""
        S = self._S[j, h]
        for i in range(t):
            S = S * torch.exp(g[j, h, i]) + self._u[j, h, i, :, None] * self._k[j, h, i]
        return S

    def _of_correction(self, vector: _Vector, j: int, h: int, t: int) -> str:
        v, beta = self._v[j, h, t], self._beta[j, h, t]
        p = self._predicted(self._gate.right(), j, h, t)
        if not _finite(v, p, vector.seen):
            return ""
        if any(vector.fits(beta * (v - self._predicted(g, j, h, t))) for g in self._gate.slips()):
            return "decay"
        if vector.solve(v - p) is not None:
            return "gate"
        rest = _Vector(vector.seen.double() - beta * v, vector.bound)
        # Every key of another length: that of this token scales all of p, those before it their updates.
        start = self._carried(self._gate.right(), j, h, t) @ self._k[j, h, t]
        if rest.solve(p) is not None or rest.solve(start, *self._u[j, h, :t].unbind(0)) is not None:
            return "norm"
        free = rest.solve(*(self._state(self._gate.right(), j, h, t) * self._k[j, h, t]).unbind(-1))
        return "decay" if free is not None else "correction"

    def _carried(self, g: Tensor, j: int, h: int, t: int) -> Tensor:
        """What token t meets of the state before the window, decayed."""
        return self._S[j, h] * torch.exp(g[j, h, : t + 1].sum(0))

    def _predicted(self, g: Tensor, j: int, h: int, t: int) -> Tensor:
        return (self._state(g, j, h, t) * torch.exp(g[j, h, t])) @ self._k[j, h, t]

    def _of_output(self, vector: _Vector, j: int, h: int, t: int) -> str:
        q = self._q[j, h, t]
        o = self._state(self._gate.right(), j, h, t + 1) @ q
        if not _finite(o, vector.seen):
            return ""
        if any(vector.fits(self._state(g, j, h, t + 1) @ q) for g in self._gate.slips()):
            return "decay"
        return "norm" if vector.solve(o) is not None else "output"


def _finite(*vectors: Tensor) -> bool:
    return all(bool(x.isfinite().all()) for x in vectors)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


@dataclass(frozen=True)
class _Gate:
    """The inputs of the log decay; broadcast to ``[n, H, Q, K]``."""

    raw: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None

    def right(self) -> Tensor:
        """The contract's."""
        return self._from(self.raw + self.dt_bias, torch.exp(self.A_log))

    def _from(self, x: Tensor, a: Tensor) -> Tensor:
        if self.lower_bound is None:
            return -a * torch.nn.functional.softplus(x)
        return self.lower_bound * torch.sigmoid(a * x)

    def slips(self) -> Iterator[Tensor]:
        """Log decays of common slips."""
        x, a = self.raw + self.dt_bias, torch.exp(self.A_log)
        variants: tuple[Callable[[], Tensor], ...] = (
            lambda: torch.zeros_like(x),
            lambda: -self.right(),
            lambda: self._from(self.raw, a),
            lambda: self._from(self.raw - self.dt_bias, a),
            lambda: self._from(x, torch.ones_like(a)),
            lambda: self._from(x, self.A_log),
            lambda: self._from(x, torch.exp(-self.A_log)),
            lambda: self._from(self.raw + self.dt_bias.roll(1, 0), a),
            lambda: self._from(self.raw + self.dt_bias[:1], a),
            lambda: self._from(x, a.roll(1, 0)),
            lambda: self._from(x, a[:1]),
            lambda: self._from(self.raw.roll(1, 2) + self.dt_bias, a),
            lambda: self._from(self.raw.roll(-1, 2) + self.dt_bias, a),
            *(lambda t=t: -a * torch.where(x > t, x, torch.log1p(torch.exp(x))) for t in (5.0, 10.0, 15.0)),
            lambda: -a * torch.nn.functional.softplus(x),
            lambda: -a * x.clamp(min=0.0),
            lambda: torch.sigmoid(a * x).log(),
        )
        yield from (variant() for variant in variants)


def _folds(call: Commit, values: Values, expected: Expected, seen: Observation, name: str) -> Iterator[str]:
    """The causes of wrong states of a commit, head by head."""
    layer = name.rpartition(".")[2]
    cells, after, tensors = expected.cells[name], seen.after[name], values.tensors
    assert cells.bound is not None
    A_log, dt_bias = tensors[f"A_log.{layer}"].double(), tensors[f"dt_bias.{layer}"].double()
    K = call.key_dim
    for row in range(call.rows):
        plan = call.plan(row)
        for slot, n in ((plan.final, plan.n), (plan.boundary, plan.m)):
            if not plan.writes or slot <= 0:
                continue
            both = tensors[f"key_gate.{layer}"][call.record_row(row), :, :n].double()
            gate = _Gate(both[None, ..., K:], A_log[:, None, None], dt_bias[:, None], call.lower_bound)
            for h in range(call.heads):
                at = (slot, h)
                if bool((excess(cells.value[at], after[at]) > cells.bound[at]).any()):
                    u = tensors[f"correction.{layer}"][call.record_row(row), h, :n].double()
                    S = tensors[name][call.slots[row], h].double()
                    vector = _Vector(after[at].flatten(), cells.bound[at].flatten())
                    yield _of_fold(vector, _Fold(S, _unit(both[h, :, :K]), u), gate, h)


@dataclass(frozen=True)
class _Fold:
    """A fold of one head: the state [V, K] before it, keys [n, K] and corrections [n, V]."""

    S: Tensor
    k: Tensor
    u: Tensor

    def terms(self, g: Tensor) -> list[Tensor]:
        """The carried state and each token's update, flat, for log decays [n, K]: the result is their sum."""
        L = g.cumsum(0)
        weights = self.k * torch.exp(L[-1] - L)
        updates = [u[:, None] * w for u, w in zip(self.u, weights, strict=True)]
        return [x.flatten() for x in (self.S * torch.exp(L[-1]), *updates)]


def _of_fold(vector: _Vector, fold: _Fold, gate: _Gate, h: int) -> str:
    """The cause of one wrong state."""
    terms = torch.stack(fold.terms(gate.right()[0, h]), -1)
    if not _finite(terms, vector.seen):
        return ""
    if any(vector.fits(torch.stack(fold.terms(g[0, h])).sum(0)) for g in gate.slips()):
        return "decay"
    factors = vector.solve(*terms.unbind(-1))
    if factors is not None:
        # A token that is there or not is the fold's business; one of another length is its key's.
        whole = vector.fits(terms @ factors.round())
        return "norm" if not whole and abs(float(factors[0]) - 1.0) < _NEAR else "fold"
    V, K = fold.S.shape
    seen, bound = vector.seen.view(V, K), vector.bound.view(V, K)
    columns = (_Vector(seen[:, i], bound[:, i]).solve(fold.S[:, i], *fold.u) for i in range(K))
    return "decay" if all(x is not None for x in columns) else "fold"
