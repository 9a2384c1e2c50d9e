"""Buckets of values, places and plans say what is there."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from oracle.buckets import BUCKETS, EXAMPLES, buckets
from oracle.calls.commit import Commit
from oracle.calls.fused_verify import FusedVerify
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.conv import convolve
from oracle.gate import log_decay
from oracle.layout import Layout, Page
from oracle.reach.dtypes import combination, combinations
from oracle.reach.values import angles, convolved_keys, decays, few_heads, log_decays
from oracle.tracked import COMPILED, Tracked, exact
from oracle.values import build, peek
from tests.meta.drawn import sample
from tests.strategies.cases import CASES

VERIFY: dict[str, Any] = {
    "heads": 2,
    "key_dim": 16,
    "value_dim": 16,
    "window": 3,
    "capacity": 2,
    "pool": 3,
    "qlens": (3, 2),
    "slots": (1, 2),
    "ids": (0, 1),
}

FUSED: dict[str, Any] = {
    "heads": 2,
    "window": 3,
    "capacity": 1,
    "accepted": (2,),
    "pool": 3,
    "qlens": (3,),
    "slots": (2,),
    "ids": (0,),
}


def names(flags: dict[str, bool]) -> set[str]:
    return {name for name, on in flags.items() if on}


@pytest.mark.parametrize(
    ("log_decays", "wanted"),
    [
        ([[-1e-4, -1e-4]], {"none"}),
        ([[-0.5, -0.5]], {"slow"}),
        ([[-5.0, -5.0], [-5.0, -5.0]], {"moderate"}),
        ([[-9.0, -9.0], [-9.0, -9.0]], {"full"}),
        ([[-0.01, -60.0]], {"full", "mixed in a head"}),
        ([[-81.0, -81.0]], {"full", "near the range"}),
        ([[-89.0, -89.0]], {"full", "past the range", "near the range"}),
        ([[-50.0, -50.0], [-50.0, -1.0]], {"full", "past the range", "near the range", "across the range"}),
        ([[np.nan, np.nan]], set()),
    ],
)
def test_classes_of_decays(log_decays: list[list[float]], wanted: set[str]) -> None:
    """A window of one head by token and channel: typical channels by their median, ends by one."""
    assert names(decays(np.array([log_decays]))) == wanted


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ([[1.0, 0.0]], set()),
        ([[1.0, 0.0], [0.0, 2.0]], {"orthogonal"}),
        ([[1.0, 0.0], [1.0, 1.0]], {"at an angle"}),
        ([[1.0, 0.0], [-3.0, 0.01]], {"nearly equal"}),
        ([[1e-3, 0.0], [0.0, 0.0]], {"orthogonal", "eps decides", "zero"}),
        ([[np.nan, 1.0], [1.0, 0.0]], set()),
    ],
)
def test_classes_of_keys(keys: list[list[float]], wanted: set[str]) -> None:
    assert names(angles(np.array([keys]))) == wanted


@pytest.mark.parametrize("op", CASES)
def test_what_is_looked_at_is_what_is_built(op: str) -> None:
    """A row alone has the elements that it has among all: the buckets speak of the kernel's inputs."""
    looked = 0
    for case in sample(CASES[op](relations=()), 2):
        call, values = case.call, build(case)
        for name, spec in call.tensors().items():
            row = next((i for i in range(call.rows) if call.live(i)), None)
            if spec.index or spec.output or (row is None and spec.role != "parameter"):
                continue
            alone = torch.from_numpy(peek(case, spec, row or 0))
            whole = values.tensors[name]
            if spec.role == "token":
                assert row is not None
                part = whole[call.token_place(row)].double()
                alone = alone.transpose(0, 1) if spec.axes[1:2] == ("head",) else alone
                whole, alone = part, alone[: call.qlens[row]].reshape(part.shape)
            elif spec.role == "slot":
                entries = [(slot, cells) for i, slot, cells in call.blocks(name) if i == row]
                for slot, cells in entries:
                    at = cells if cells is not None else ...
                    assert torch.equal(whole[slot][at].double().nan_to_num(), alone[at].nan_to_num())
                continue
            assert torch.equal(whole.double().nan_to_num(), alone.reshape(whole.shape).nan_to_num())
            looked += 1
    assert looked > 10


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("op", ["verify", "commit", "fused_verify", "serve"])
def test_log_decays_are_those_of_the_oracle(op: str, bound: float | None) -> None:
    call = EXAMPLES[op]
    if op != "fused_verify":
        call = msgspec.structs.replace(call, lower_bound=bound)
    case, layer = Case(call=call, seed=3), ".0" if op == "commit" else ""
    raw = np.linspace(-3.0, 3.0, call.heads * 4 * call.key_dim).reshape(call.heads, 4, call.key_dim)
    A_log, bias = (exact(build(case).tensors[name + layer]) for name in ("A_log", "dt_bias"))
    known = log_decay(
        exact(torch.from_numpy(raw)),
        Tracked(A_log.v[:, None, None], A_log.e[:, None, None]),
        exact(bias.v.reshape(call.heads, 1, call.key_dim)),
        call.lower_bound,
        COMPILED,
    )
    specs = {name.removesuffix(".0"): spec for name, spec in few_heads(call).items()}
    assert np.allclose(log_decays(case, specs, raw), known.v.numpy(), rtol=1e-12, atol=0.0)


def test_convolved_keys_are_those_of_the_oracle() -> None:
    """Next to the roundings that the oracle tracks: those of bf16 products."""
    case = Case(call=FusedVerify(**FUSED), seed=3)
    values = build(case)
    win = values.tensors["conv_state"][2, :, 1:4]  # two tokens were accepted
    win = torch.cat((win, values.tensors["mixed_qkv"][:3].T), 1)[None]
    y = convolve(win, values.tensors["conv_weight"], None, silu=True, ar=COMPILED).v[0]
    wanted = y.reshape(3, 2, 128, 3)[1].transpose(1, 2)
    found = torch.from_numpy(convolved_keys(case, FusedVerify(**FUSED), case.call.tensors(), 0))
    assert (found - wanted).abs().max() < 2.0**-6
    assert wanted.abs().max() > 1.0


def test_places() -> None:
    """A tensor that was moved off 16 bytes, or whose rows were; in a page, the page moves it."""

    def of(name: str, **case: Any) -> set[str]:
        found = buckets(Case(call=Verify(**VERIFY), **case))
        classes = ("address off 16 bytes", "leading stride off 16 bytes", "not dense inside")
        return {one for one in classes if f"{name}: {one}" in found}

    assert of("q") == set()
    assert of("q", layouts={"q": Layout(offset=4)}) == set()
    assert of("q", layouts={"q": Layout(offset=1)}) == {"address off 16 bytes"}
    assert of("q", layouts={"q": Layout(gaps=(1, 0, 0))}) == {"leading stride off 16 bytes"}
    assert of("state", layouts={"state": Layout(gaps=(0, 0, 0, 1))}) == {"not dense inside"}
    assert of("state", layouts={"state": Layout(order=(0, 1, 3, 2))}) == {"not dense inside"}
    page = Page(members=("q", "k"), gaps=(0, 4))
    assert of("k", pages=(page,)) == {"address off 16 bytes", "leading stride off 16 bytes"}


def test_dtypes() -> None:
    assert combination(Verify(**VERIFY)) == "activation fp32, state fp32"
    for op, call in EXAMPLES.items():
        assert combination(call) in combinations(op)
        assert {f"dtypes: {name}" for name in combinations(op)} <= set(BUCKETS[op])


COMMIT: dict[str, Any] = {
    "heads": 1,
    "key_dim": 1,
    "value_dim": 1,
    "window": 4,
    "capacity": 1,
    "channels": 1,
    "state_len": 6,
    "pool": 8,
    "qlens": (4,),
    "slots": (1,),
    "ids": (0,),
    "block_size": 8,
}


@pytest.mark.parametrize(
    ("computed", "accepted", "table", "wanted"),
    [
        (0, 2, (1,), {"nothing computed"}),
        (8, 2, (5, 1), {"computed to a block's end", "past the first"}),
        (7, 1, (1,), {"computed to one before", "ended exactly", "ended, next null"}),
        (4, 3, (1,), {"ended one short"}),
        (5, 4, (2, 1), {"crossed", "crossed by one"}),
        (7, 4, (2, 1), {"computed to one before", "crossed", "crossed after one"}),
        (6, 4, (0, 1), {"boundary null"}),
        (6, 4, (2, 0), {"final null"}),
        (9, 1, (2,), {"past the first", "clamped"}),
    ],
)
def test_edges_of_blocks(computed: int, accepted: int, table: tuple[int, ...], wanted: set[str]) -> None:
    """Blocks of 8 tokens, with so many computed and so many accepted of a window of 4."""
    call = Commit(**COMMIT, computed=(computed,), accepted=(accepted,), table=(table,))
    found = {name for name in buckets(Case(call=call)) if name.startswith("blocks: ")}
    assert found == {f"blocks: {name}" for name in wanted}


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        ((1, 2), {"source is boundary", "source is boundary alone", "source is not final"}),
        ((2, 1), {"source is final", "source is final, several tokens", "source is final, with a boundary"}),
        ((2, 3), {"source is not final", "all differ"}),
    ],
)
def test_coincidences_of_slots(table: tuple[int, ...], wanted: set[str]) -> None:
    """A window that passes the end of a block, from slot 1 into the boundary's and the final one."""
    call = Commit(**COMMIT, computed=(6,), accepted=(4,), table=(table,))
    found = {name for name in buckets(Case(call=call)) if name.startswith("slots: ")}
    assert found == {f"slots: {name}" for name in wanted}


@pytest.mark.parametrize(("slot", "wanted"), [(1, {"source is boundary", "all one"}), (2, set())])
def test_a_block_that_ends_exactly(slot: int, wanted: set[str]) -> None:
    """Its boundary is its final slot, which the source may be too."""
    call = Commit(**COMMIT, computed=(6,), accepted=(2,), table=((slot,),))
    found = {name.removeprefix("slots: ") for name in buckets(Case(call=call)) if name.startswith("slots: ")}
    assert "boundary is final" in found
    assert wanted <= found
    assert ("boundary is final, source is not" in found) == (slot == 2)


def test_rows_that_are_null() -> None:
    def of(qlens: tuple[int, ...], slots: tuple[int, ...]) -> set[str]:
        rows = {"qlens": qlens, "slots": slots, "ids": tuple(range(len(qlens))), "capacity": len(qlens)}
        call = msgspec.structs.replace(Verify(**VERIFY), **rows)
        return {name for name in buckets(Case(call=call)) if name.startswith("slot: ")}

    assert {"slot: null first", "slot: null, part of a window"} <= of((2, 3), (0, 1))
    assert "slot: null last" in of((2, 3), (1, -1))
    assert "slot: null, part of a window" not in of((2, 3), (1, -1))
    assert "slot: all null" in of((2, 0), (0, 0))
    assert "slot: empty row without a slot" in of((2, 0), (1, 0))
    assert "slot: all null" not in of((0, 0), (0, 0))
