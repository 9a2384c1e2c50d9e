"""A case refuses what is outside the contract, in one sentence."""

from typing import Any

import pytest

from oracle.calls.conv import ConvPrefill
from oracle.calls.serve import Serve
from oracle.calls.verify import Verify
from oracle.case import Case, Hostile, Permute, Relayout, Rename, Unpacked
from oracle.layout import Layout, Page

CALL: dict[str, Any] = {
    "heads": 1,
    "key_dim": 4,
    "value_dim": 4,
    "window": 2,
    "pool": 3,
    "qlens": (2, 1),
    "slots": (1, 2),
    "ids": (0, 1),
    "capacity": 2,
}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"slots": (1,)}, "qlens, slots, ids and hostile need one entry a row"),
        ({"ids": (0, 1, 2)}, "qlens, slots, ids and hostile need one entry a row"),
        ({"hostile": (0,)}, "qlens, slots, ids and hostile need one entry a row"),
        ({"ids": (1, 1)}, "ids must be distinct: they name the rows' values"),
        ({"qlens": (3, 0)}, "a row has more tokens than the window"),
        ({"tail": 2}, "more tokens than rows times window"),
        ({"slots": (1, 3)}, "a row names a slot outside the pool"),
        ({"slots": (1, 1)}, "two live rows share a slot"),
        (
            {"own_out": False, "out": "bfloat16"},
            "an output that the callee allocates has the activation dtype",
        ),
        ({"capacity": 1}, "capacity is below the number of rows"),
    ],
)
def test_calls_outside_the_contract(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        Case(call=Verify(**(CALL | changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"slots": (1, 1), "qlens": (2, 0)},
        {"slots": (0, 0)},
        {"slots": (-1, -1)},
        {"records": "slot", "capacity": 0},
        {"tail": 1},
        {"qlens": (), "slots": (), "ids": (), "capacity": 0},
        {"hostile": (0, 9)},
    ],
)
def test_calls_at_the_edge_of_the_contract(changes: dict[str, Any]) -> None:
    Case(call=Verify(**(CALL | changes)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layouts": {"z": Layout()}}, "verify has no tensor 'z'"),
        ({"regimes": {"z": "normal"}}, "verify has no tensor 'z' to give values to"),
        ({"layouts": {"q": Layout(gaps=(1,))}}, "layout of q needs 3 gaps; found 1"),
        (
            {"layouts": {"state": Layout(order=(0, 1, 2))}},
            "layout of state needs an order of its 4 dimensions;",
        ),
        ({"layouts": {"state": Layout(order=(0, 1, 2, 2))}}, "layout of state needs an order of its 4 dimen"),
        ({"layouts": {"q": Layout(offset=-1)}}, "layout of q needs offset and gaps of at least 0; found"),
        (
            {"layouts": {"q": Layout(gaps=(-1, 0, 0))}},
            "layout of q needs offset and gaps of at least 0; found",
        ),
        (
            {"layouts": {"q": Layout(gaps=(0, 1, 0))}},
            "layout of q may not move its trailing dimensions; found",
        ),
        (
            {"layouts": {"q": Layout(order=(1, 0, 2))}},
            "layout of q may not move its trailing dimensions; found",
        ),
        ({"layouts": {"A_log": Layout(gaps=(1,))}}, "layout of A_log must be dense; found"),
        ({"pages": (Page(()),)}, r"a page needs distinct tensors of the call; found \(\)"),
        ({"pages": (Page(("q", "q")),)}, "a tensor lies in two pages"),
        ({"pages": (Page(("q", "z")),)}, "a page needs distinct tensors of the call; found"),
        ({"pages": (Page(("q", "k"), gaps=(1,)),)}, "a page needs one gap a member; found 1 for 2"),
        ({"pages": (Page(("q",), tail=-1),)}, "a page needs gaps, tail and offset of at least 0; found"),
        ({"pages": (Page(("q", "state_indices")),)}, "a page needs members of one leading size; found"),
        ({"pages": (Page(("A_log",)),)}, "A_log must be dense, so it cannot lie in a page"),
        ({"pages": (Page(("q",)), Page(("q",)))}, "a tensor lies in two pages"),
        (
            {"pages": (Page(("q",)),), "layouts": {"q": Layout(offset=1)}},
            "the page places q: its layout may only arrange the inner dimensions",
        ),
        (
            {"pages": (Page(("state",)),), "layouts": {"state": Layout(order=(1, 0, 2, 3))}},
            "the page places state: its layout may only arrange the inner dimensions",
        ),
        ({"relation": Permute((0, 0))}, "a permutation must name every row once"),
        ({"relation": Hostile(2, 0)}, "the hostile row is not in the batch"),
        ({"relation": Rename((0, 1))}, "new names must be the slots of the pool in another order, 0 first"),
        ({"relation": Rename((1, 0, 2))}, "new names must be the slots of the pool in another order"),
        ({"relation": Rename((0, 1, 1))}, "new names must be the slots of the pool in another order"),
        ({"relation": Rename((0, 1, 3))}, "new names must be the slots of the pool in another order"),
        ({"relation": Unpacked()}, "verify has no invariant 'unpacked'"),
        ({"relation": Relayout({"z": Layout()})}, "verify has no tensor 'z'"),
        ({"relation": Relayout({"q": Layout(gaps=(1,))})}, "layout of q needs 3 gaps; found 1"),
    ],
)
def test_cases_that_cannot_be_laid_out(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        Case(**({"call": Verify(**CALL)} | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"layouts": {"q": Layout(offset=1 << 40)}},
        {"layouts": {"q": Layout(gaps=(1 << 40, 0, 0))}},
        {"layouts": {"state": Layout(gaps=(0, 0, 0, 1 << 62))}},
        {"layouts": {"dt_bias": Layout(offset=1 << 28)}},
        {"pages": (Page(("q",), tail=1 << 40),)},
        {"pages": (Page(("q",), offset=1 << 40),)},
        {"pages": (Page(("q",), gaps=(1 << 40,)),)},
        {"call": Verify(**(CALL | {"heads": 4096, "key_dim": 4096, "value_dim": 4096}))},
        {"relation": Relayout({"q": Layout(offset=1 << 40)})},
    ],
)
def test_more_memory_than_a_case_may_ask_for(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^the case needs \d+ bytes; the limit is 1073741824$"):
        Case(**({"call": Verify(**CALL)} | changes))


def script(**changes: Any) -> Serve:
    """A script of one request, small but for the changes."""
    fields: dict[str, Any] = {"heads": 1, "key_dim": 16, "value_dim": 16, "window": 2, "capacity": 2}
    rows = {"qlens": (2, 1), "slots": (1, 1), "ids": (0, 1), "steps": (0, 1), "accepted": (0, 1)}
    return Serve(**{**fields, **rows, "pool": 4, "kinds": ("prefill", "decode"), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"pool": 65536, "heads": 64},
        {"heads": 2048, "key_dim": 1024},
        {"capacity": 65536, "heads": 512},
    ],
)
def test_serving_counts_the_memory_of_its_engine(changes: dict[str, int]) -> None:
    assert Case(call=script(heads=64, pool=1000)).call.own_bytes() > 64 * 1000 * 16 * 16 * 4
    with pytest.raises(ValueError, match=r"^the case needs \d+ bytes; the limit is 1073741824$"):
        Case(call=script(**changes))


def test_more_values_than_a_case_may_draw() -> None:
    """Of a row's tokens as many are drawn as it may have, however few it has."""
    fields: dict[str, Any] = {"channels": 65536, "state_len": 3, "most_tokens": 4096}
    one: dict[str, Any] = {"pool": 2, "qlens": (1,), "slots": (1,), "ids": (0,), "initial": (False,)}
    two: dict[str, Any] = {
        "pool": 3,
        "qlens": (1, 1),
        "slots": (1, 2),
        "ids": (0, 1),
        "initial": (False, False),
    }
    call = Case(call=ConvPrefill(**fields, **one)).call
    assert call.drawn() == 65536 * (4096 + 4 + 3)  # tokens, taps, columns of a stored row
    with pytest.raises(ValueError, match=r"^the case draws \d+ elements; the limit is 536870912$"):
        Case(call=ConvPrefill(**fields, **two))
