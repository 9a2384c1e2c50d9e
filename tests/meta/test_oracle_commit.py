"""Commit's oracle against 60-digit arithmetic and plain indexing, from the contract's text (1.6).

The rounding of the oracle's doubles is that of ``test_oracle_mpmath``: 1e-12 of the sum of
magnitudes, with an absolute floor where doubles underflow.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from mpmath import mp, mpf

from impl.contract import Domain
from oracle.calls.commit import PLAN, Commit
from oracle.case import Case
from oracle.expect import expect
from oracle.expectation import Cells
from oracle.tracked import INTERPRETED
from oracle.values import Values, build
from tests.meta.drawn import over
from tests.meta.test_oracle_mpmath import agree, gate, unit
from tests.strategies.commit import commit_cases

replace = msgspec.structs.replace
Array = np.ndarray
Target = tuple[int, int, int]
"""A row, a slot that it writes, and the tokens folded into it."""


@pytest.fixture(autouse=True)
def digits() -> Iterator[None]:
    with mp.workdps(60):
        yield


def commit_of(case: Case) -> Commit:
    """The call of a case of commit."""
    assert isinstance(case.call, Commit)
    return case.call


def finite(case: Case) -> Case:
    """The case without values that are not finite; fp16 makes infinities of the extreme ones."""
    bad = ("specials", "extreme") if commit_of(case).activation == "float16" else ("specials",)
    return replace(case, regimes={name: r for name, r in case.regimes.items() if r not in bad})


def cases_with(*head_dims: tuple[int, int]) -> st.SearchStrategy[Case]:
    """Drawn cases of such head dimensions, finite, of few heads and channels."""
    drawn = commit_cases(domain=Domain(head_dims=head_dims, windows=(1, 2, 4)), relations=())
    return drawn.map(_lighter).map(finite)


def _lighter(case: Case) -> Case:
    call = commit_of(case)
    smaller = replace(call, heads=min(call.heads, 2), channels=min(call.channels, 5))
    return replace(case, call=smaller, layouts={}, pages=())


SMALL = cases_with((1, 2), (3, 1), (2, 3))


def targets(call: Commit) -> list[Target]:
    """Section 1.6, the slots that a commit writes, from the plan (which ``test_plan`` checks)."""
    found = []
    for row in range(call.rows):
        plan = call.plan(row)
        if plan.n > 0 and call.slots[row] > 0 and plan.final > 0:
            found.append((row, plan.final, plan.n))
            if plan.boundary > 0 and plan.boundary != plan.final:
                found.append((row, plan.boundary, plan.m))
    return found


def marked(cells: Cells) -> set[tuple[int, ...]]:
    """The indices of the written cells."""
    return {tuple(i) for i in torch.nonzero(cells.written).tolist()}


@over(SMALL)
def test_the_plan_s_cells(case: Case) -> None:
    call, cells = commit_of(case), expect(case).cells
    for name, field in zip(PLAN, ("n", "final", "boundary", "m"), strict=True):
        assert cells[name].value.dtype == torch.int32
        assert cells[name].written.tolist() == [i < call.rows for i in range(call.capacity)]
        assert cells[name].fresh
        assert cells[name].bound is None
        for row in range(call.rows):
            assert int(cells[name].value[row]) == getattr(call.plan(row), field)
    kinds = {f"{kind}.{layer}" for kind in ("conv_state", "state") for layer in range(call.layers)}
    assert cells.keys() == {*PLAN, *kinds}


@over(SMALL)
def test_compaction(case: Case) -> None:
    call, values, cells = commit_of(case), build(case), expect(case).cells
    for layer in range(call.layers):
        name = f"conv_state.{layer}"
        before, stored = values.tensors[name].double().tolist(), cells[name]
        wanted = {
            (slot, c, j): before[call.slots[row]][c][n - 1 + j]
            for row, slot, n in targets(call)
            for c in range(call.channels)
            for j in range(call.state_len - call.window + 1)
        }
        assert stored.bound is None
        assert marked(stored) == wanted.keys()
        for place, number in wanted.items():
            assert float(stored.value[place]) == number


@over(SMALL)
def test_folded_states(case: Case) -> None:
    call, values, cells = commit_of(case), build(case).tensors, expect(case).cells
    K, V = call.key_dim, call.value_dim
    for layer in range(call.layers):
        folded = cells[f"state.{layer}"]
        assert {place[0] for place in marked(folded)} == {slot for _, slot, _ in targets(call)}
        assert int(folded.written.sum()) == len({s for _, s, _ in targets(call)}) * call.heads * K * V
        for row, slot, n in targets(call):
            at = row if call.records == "row" else call.slots[row]
            for h in range(call.heads):
                both = values[f"key_gate.{layer}"][at, h].double().tolist()
                u = values[f"correction.{layer}"][at, h].double().tolist()
                S_0 = values[f"state.{layer}"][call.slots[row], h].double().tolist()
                A_log = float(values[f"A_log.{layer}"][h])
                bias = values[f"dt_bias.{layer}"][h].double().tolist()
                keys = [unit([mpf(e) for e in both[t][:K]]) for t in range(n)]
                decays = [
                    [gate(both[t][K + i], A_log, bias[i], call.lower_bound) for i in range(K)]
                    for t in range(n)
                ]
                for i in range(K):
                    # e**(L_{n-1} - L_t): the decay of the tokens after t; from the start, of all.
                    after = [mp.exp(mp.fsum(decays[s][i] for s in range(t + 1, n))) for t in range(-1, n)]
                    for j in range(V):
                        terms = [mpf(S_0[j][i]) * after[0]]
                        terms += [mpf(u[t][j]) * keys[t][i] * after[t + 1] for t in range(n)]
                        agree(folded.value[slot, h, j, i], mp.fsum(terms), mp.fsum(map(abs, terms)))


def in_numpy(case: Case, values: Values, layer: int, target: Target, *, forwards: bool) -> Array:
    """One slot's state ``[H, V, K]`` in fp32, token by token or backwards with the decay accumulated."""
    call, (row, _, n) = commit_of(case), target
    at = row if call.records == "row" else call.slots[row]
    parts = {name: values.tensors[f"{name}.{layer}"] for name in ("key_gate", "correction", "state")}
    both, u = parts["key_gate"][at].float().numpy(), parts["correction"][at].numpy()
    S = parts["state"][call.slots[row]].float().numpy()
    A_log, bias = (values.tensors[f"{name}.{layer}"].numpy() for name in ("A_log", "dt_bias"))
    k, x = both[..., : call.key_dim], both[..., call.key_dim :] + bias[:, None]
    one, a = np.float32(1.0), np.exp(A_log)[:, None, None]
    k = k * (one / np.sqrt((k * k).sum(-1, keepdims=True) + np.float32(1e-6)))
    if call.lower_bound is None:
        g = -a * np.where(x > 20, x, np.log(one + np.exp(x)))
    else:
        g = np.float32(call.lower_bound) * (one / (one + np.exp(-(a * x))))
    decay = np.exp(g)[:, :, None]  # [H, Q, 1, K]
    update = u[..., None] * k[:, :, None]  # [H, Q, V, K]
    if forwards:
        for t in range(n):
            S = S * decay[:, t] + update[:, t]
        return np.asarray(S)
    through, added = np.ones_like(decay[:, 0]), np.zeros_like(S)
    for t in reversed(range(n)):
        added = added + update[:, t] * through
        through = through * decay[:, t]
    return np.asarray(S * through + added)


@over(cases_with((1, 2), (16, 32), (48, 16), (5, 3)))
def test_the_bound_covers_both_orders(case: Case) -> None:
    call, values = commit_of(case), build(case)
    cells = expect(case, values, INTERPRETED).cells
    for layer in range(call.layers):
        folded = cells[f"state.{layer}"]
        assert folded.bound is not None
        for target, forwards in product(targets(call), (True, False)):
            with np.errstate(all="ignore"):
                found = torch.from_numpy(in_numpy(case, values, layer, target, forwards=forwards)).double()
            value, bound = folded.value[target[1]], folded.bound[target[1]]
            claimed = value.isfinite() & bound.isfinite()
            inside = (found - value).abs() <= bound * (1 + 1e-9)
            assert bool((inside | ~claimed).all()), (target, layer)


@pytest.mark.parametrize("forwards", [True, False], ids=["forwards", "backwards"])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_the_bound_is_near(bound: float | None, forwards: bool) -> None:
    """fp32 comes within a factor of 200 of the bound, and nothing of plain values is left unclaimed."""
    call = Commit(
        heads=4,
        key_dim=64,
        value_dim=32,
        window=4,
        channels=1,
        state_len=6,
        pool=3,
        qlens=(4,),
        slots=(1,),
        ids=(0,),
        capacity=1,
        accepted=(4,),
        lower_bound=bound,
    )
    case = Case(call=call, seed=1)
    values = build(case)
    folded = expect(case, values, INTERPRETED).cells["state.0"]
    assert folded.bound is not None
    found = torch.from_numpy(in_numpy(case, values, 0, (0, 1, 4), forwards=forwards)).double()
    ratio = (found - folded.value[1]).abs() / folded.bound[1]
    assert 1 / 200 < float(ratio.max()) <= 1.0
    # A token's decay, update and addition cost tens of roundings of what is in a cell, not thousands.
    assert float((folded.bound[1] / (folded.value[1].abs() + 1.0)).max()) < 1000 * 2.0**-24


ONE = Commit(
    heads=2,
    key_dim=3,
    value_dim=2,
    window=4,
    channels=3,
    state_len=6,
    pool=8,
    qlens=(4,),
    slots=(3,),
    ids=(0,),
    capacity=1,
    accepted=(4,),
)


@pytest.mark.parametrize("records", ["row", "slot"])
@pytest.mark.parametrize(("n", "m"), [(n, m) for n in (2, 3, 4) for m in range(1, n)])
def test_a_commit_over_a_boundary_is_two_commits(n: int, m: int, records: str) -> None:
    """Section 1.8, 2: S_n = commit(m) then commit(n - m), records and conv columns moved up by m."""
    align: dict[str, Any] = {"block_size": 4, "computed": (4 - m,), "table": ((4, 5),)}
    whole = Case(call=replace(ONE, accepted=(n,), records=records, **align), seed=n)
    assert commit_of(whole).plan(0).m == m
    values = build(whole)
    both = expect(whole, values).cells
    state, conv = both["state.0"], both["conv_state.0"]

    first = expect(replace(whole, call=replace(ONE, accepted=(m,), records=records)), values).cells
    assert torch.equal(first["state.0"].value[3], state.value[4])
    assert torch.equal(first["conv_state.0"].value[3, :, :3], conv.value[4, :, :3])

    moved = {name: x.double().clone() for name, x in values.tensors.items()}
    moved["state.0"][3] = state.value[4]
    at = 0 if records == "row" else 3
    for name in ("correction.0", "key_gate.0"):
        moved[name][at] = moved[name][at].roll(-m, 1)
    moved["conv_state.0"][3] = moved["conv_state.0"][3].roll(-m, -1)
    rest = Case(call=replace(ONE, accepted=(n - m,), records=records))
    second = expect(rest, Values(moved, values.filled)).cells
    assert torch.equal(second["conv_state.0"].value[3, :, :3].float(), conv.value[5, :, :3])
    off = (second["state.0"].value[3] - state.value[5]).abs()
    # All terms are of order one: 1e-12 of them, as everywhere here.
    assert float((off / (1.0 + state.value[5].abs())).max()) <= 1e-12
    assert not torch.equal(state.value[4], state.value[5])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_n_commits_of_one_token_are_one_of_n(n: int) -> None:
    """Section 1.8, 1, for the oracle's fold alone."""
    values = build(Case(call=ONE))
    whole = expect(Case(call=replace(ONE, accepted=(n,))), values).cells["state.0"].value[3]
    moved = {name: x.double().clone() for name, x in values.tensors.items()}
    for _ in range(n):
        one = Case(call=replace(ONE, accepted=(1,)))
        moved["state.0"][3] = expect(one, Values(moved, values.filled)).cells["state.0"].value[3]
        for name in ("correction.0", "key_gate.0"):
            moved[name] = moved[name].roll(-1, 2)
    assert float((moved["state.0"][3] - whole).abs().max()) <= 1e-12
