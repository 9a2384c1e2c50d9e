"""Values come from the seed alone, row by row and head by head, and regimes are what they say."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impl.contract import Domain
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.layout import DTYPES
from oracle.stored import bits, same_bits
from oracle.values import REGIMES, SPECIALS, Stream, Values, build, checksum, regime_of
from tests.meta.calls import verify_of
from tests.strategies.verify import verify_cases

Tensor = torch.Tensor
replace = msgspec.structs.replace
TOKENS = ("q", "k", "v", "raw_g", "raw_beta")
CASES = verify_cases(domain=Domain(head_dims=((5, 3), (1, 2), (4, 4)), windows=(1, 3, 4)), relations=())


def call(**changes: Any) -> Verify:
    fields: dict[str, Any] = {
        "heads": 2,
        "key_dim": 4,
        "value_dim": 3,
        "window": 4,
        "pool": 6,
        "qlens": (3, 0, 4, 1),
        "slots": (2, 0, 5, -1),
        "ids": (0, 1, 2, 7),
        "capacity": 4,
        "tail": 2,
    }
    return Verify(**(fields | changes))


PINNED = {
    "b47ed48a5e010109": Case(call=call(), seed=1),
    "6035993ef0a95f52": Case(
        call=call(activation="bfloat16", state="bfloat16", hostile=(1, 4, 4, 4), slots_dtype="int64"),
        regimes={"k": "aligned", "v": "ties", "raw_g": "mixed", "A_log": "spread", "state": "one_hot"},
        seed=2**53 - 1,
    ),
    "e741de2f39bd5e63": Case(
        call=call(activation="float16", heads=3),
        regimes={"q": "specials", "k": "extreme", "raw_beta": "thresholds", "state": "large"},
        seed=12345,
    ),
}


@pytest.mark.parametrize("digits", PINNED)
def test_checksums_do_not_drift(digits: str) -> None:
    # A change here makes every saved case unreadable: it needs a new schema, not a new literal.
    assert checksum(PINNED[digits]) == digits


def test_a_case_without_live_rows_has_a_checksum() -> None:
    # One channel, no row: torch gives the empty selection a stride of 0.
    nothing = call(key_dim=1, value_dim=1, qlens=(), slots=(), ids=(), tail=0, capacity=0)
    assert len(checksum(Case(call=nothing))) == 16


@given(CASES)
def test_building_twice_gives_the_same_bits(case: Case) -> None:
    assert checksum(case) == checksum(case)
    first, second = build(case), build(case)
    for name, tensor in first.tensors.items():
        assert bool(same_bits(tensor, second.tensors[name]).all())


def rows_of(case: Case, values: Values) -> dict[tuple[str, int], Tensor]:
    """Every live row's tokens and state, by tensor and row id; and the parameters."""
    found = {(name, -1): values.tensors[name] for name in ("A_log", "dt_bias")}
    for row, start in enumerate(case.call.starts[:-1]):
        if case.call.live(row):
            key = case.call.ids[row]
            for name in TOKENS:
                found[name, key] = values.tensors[name][start : start + case.call.qlens[row]]
            found["state", key] = values.tensors["state"][case.call.slots[row]]
    return found


def agree(first: Case, second: Case, *, all_rows: bool = True) -> None:
    """What both cases have of a row is the same, bit for bit."""
    a, b = rows_of(first, build(first)), rows_of(second, build(second))
    if all_rows:
        assert a.keys() == b.keys()
    for key in a.keys() & b.keys():
        shared = min(len(a[key]), len(b[key]))
        assert torch.equal(bits(a[key][:shared]), bits(b[key][:shared])), key


def pick(case: Case, order: list[int]) -> Case:
    """The case with these rows, in this order, and no padding."""
    lists = {
        name: tuple(getattr(case.call, name)[i] for i in order)
        for name in ("qlens", "slots", "ids", "hostile")
        if getattr(case.call, name)
    }
    return replace(case, call=replace(case.call, **lists, tail=0), layouts={}, pages=())


@given(CASES, st.data())
def test_other_rows_do_not_matter(case: Case, data: st.DataObject) -> None:
    rows = list(range(case.call.rows))
    agree(case, pick(case, data.draw(st.permutations(rows))))
    kept = [i for i in rows if data.draw(st.booleans())]
    fewer = pick(case, kept)
    agree(fewer, case, all_rows=False)
    wanted = {case.call.ids[i] for i in kept if case.call.live(i)}
    assert {key for _, key in rows_of(fewer, build(fewer))} - {-1} == wanted


@given(CASES, st.data())
def test_later_tokens_do_not_matter(case: Case, data: st.DataObject) -> None:
    shorter = tuple(data.draw(st.integers(0, n)) for n in case.call.qlens)
    agree(case, replace(case, call=replace(case.call, qlens=shorter, tail=0)), all_rows=False)


@given(CASES, st.data())
def test_names_of_slots_and_memory_do_not_matter(case: Case, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(1, case.call.pool)))
    renamed = replace(
        case.call, slots=tuple(order[slot - 1] if slot > 0 else slot for slot in case.call.slots)
    )
    agree(case, replace(case, call=renamed, layouts={}, pages=(), poison="huge"))
    assert checksum(case) == checksum(replace(case, layouts={}, pages=(), poison="huge"))


@given(CASES)
def test_heads_do_not_depend_on_each_other(case: Case) -> None:
    one = replace(case, call=replace(case.call, heads=1), layouts={}, pages=())
    a, b = build(case).tensors, build(one).tensors
    for name in (*TOKENS, "state"):
        assert torch.equal(bits(a[name][:, :1]), bits(b[name]))
    assert torch.equal(a["dt_bias"][:1], b["dt_bias"])


@given(CASES)
def test_seeds_ids_and_heads_differ(case: Case) -> None:
    plain = replace(case, regimes={}, call=replace(case.call, heads=2), layouts={}, pages=())
    a, b = rows_of(plain, build(plain)), rows_of(plain, build(replace(plain, seed=plain.seed + 1)))
    for (name, key), tensor in a.items():
        if tensor.numel() > 8 * 2:
            assert not torch.equal(tensor, b[name, key])
            assert not torch.equal(tensor[:, 0], tensor[:, 1]) or name in ("A_log", "dt_bias")
    k = [tensor for (name, _), tensor in a.items() if name == "k" and tensor.shape[2] > 1]
    assert all(not torch.equal(x[:1], y[:1]) for i, x in enumerate(k) for y in k[:i])


@given(CASES)
def test_dead_cells_are_not_inputs(case: Case) -> None:
    values, c = build(case), case.call
    live = [c.live(i) for i in range(c.rows)]
    tokens = [on for on, n in zip(live, c.qlens, strict=True) for _ in range(n)] + [False] * c.tail
    slots = {c.slots[i] for i in range(c.rows) if live[i]}
    for name, mask in values.filled.items():
        if name in TOKENS:
            assert mask.tolist() == tokens
        elif name == "state":
            assert mask.tolist() == [s in slots for s in range(c.pool)]
        else:
            assert bool(mask.all())
    assert values.tensors.keys() == {name for name, spec in c.tensors().items() if not spec.output}
    for name, spec in c.tensors().items():
        if not spec.output:
            assert values.tensors[name].shape == spec.shape
            assert values.tensors[name].dtype == DTYPES[spec.dtype]
    assert tuple(values.tensors["query_start_loc"].tolist()) == c.starts
    assert tuple(values.tensors["state_indices"].tolist()) == c.slots


@given(CASES, st.data())
def test_hostile_values_touch_their_tokens_only(case: Case, data: st.DataObject) -> None:
    c = case.call
    plain = replace(case, call=replace(c, hostile=()))
    hostile = tuple(data.draw(st.integers(0, n)) for n in c.qlens)
    changed = replace(case, call=replace(c, hostile=hostile))
    a, b = build(plain), build(changed)
    for name in ("A_log", "dt_bias", "state", "query_start_loc", "state_indices"):
        assert torch.equal(bits(a.tensors[name]), bits(b.tensors[name]))
    for row, start in enumerate(c.starts[:-1]):
        cut = start + hostile[row] if c.live(row) else start + c.qlens[row]
        for name in TOKENS:
            assert torch.equal(bits(a.tensors[name][start:cut]), bits(b.tensors[name][start:cut]))
            specials = torch.from_numpy(SPECIALS).to(b.tensors[name].dtype)
            for x in b.tensors[name][cut : start + c.qlens[row]].flatten():
                assert bool(same_bits(x.expand(len(specials)), specials, any_nan=True).any())


def test_hostile_values_are_all_kinds() -> None:
    c = call(qlens=(4,), slots=(1,), ids=(0,), hostile=(0,), tail=0, heads=8)
    q = build(Case(call=c)).tensors["q"].flatten()
    assert {str(float(x)) for x in q} >= {"nan", "inf", "-inf", "-0.0", "60000.0"}


def test_unknown_regimes_are_refused() -> None:
    case = Case(call=call(), regimes={"q": "huge"})
    with pytest.raises(ValueError, match=r"q has no regime 'huge'; it has normal, zero, tiny, "):
        build(case)
    with pytest.raises(ValueError, match="q has no regime"):
        checksum(case)
    assert regime_of(case, "q") == "huge"
    assert regime_of(case, "k") == "normal"


@given(CASES)
def test_numbers_are_the_regime_s_rounded_to_the_dtype(case: Case) -> None:
    c, tensors = verify_of(case), build(case).tensors
    for row, start in enumerate(c.starts[:-1]):
        if not c.live(row):
            continue
        for name in ("k", "v"):
            width = tensors[name].shape[2]
            draw = REGIMES[name][regime_of(case, name)]
            wide = draw(Stream(case.seed, name, c.ids[row], 0), (c.window, width))[: c.qlens[row]]
            with np.errstate(over="ignore", invalid="ignore"):
                narrow = torch.from_numpy(wide).to(DTYPES[c.activation])
            seen = tensors[name][start : start + c.qlens[row], 0]
            assert bool(same_bits(seen, narrow, any_nan=True).all())
