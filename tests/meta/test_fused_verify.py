"""The fused verify end to end: a sound kernel in plain PyTorch is clean, every planted fault is found.

The sound one errs in every exponential, reciprocal root and division by all that its
arithmetic declares, so what passes here is not luck.
"""

from typing import Any

import msgspec
import pytest
import torch

from ci.check import check
from impl.arena import Arena
from impl.bindings import Launched, call_fused_verify
from impl.contract import Implementation
from impl.devices.base import Device
from impl.devices.registry import open_device
from oracle.calls.fused_verify import FusedVerify
from oracle.case import Case, Prefix, Relayout
from oracle.expect import expect
from oracle.layout import Layout
from oracle.tracked import FACTORED, Tracked, bfloat16
from oracle.values import build
from tests.meta.drawn import sample
from tests.meta.fused_fake import FAULTS, FusedFake, Run, implementation
from tests.strategies.fused_verify import fused_cases

replace = msgspec.structs.replace
ROUNDS = 30
"""Of ten examples each, at most, to find a fault in."""
FULL = FusedVerify(
    heads=2,
    window=8,
    capacity=3,
    pool=5,
    qlens=(8, 5, 8),
    slots=(3, 1, 2),
    ids=(0, 1, 2),
    accepted=(1, 8, 4),
    lower_bound=-11.0,
)
REGIMES: dict[str, dict[str, str]] = {
    "plain": {},
    "decay to e**-88": {"raw_g": "fast", "A_log": "spread"},
    "some channels decay": {"raw_g": "mixed", "A_log": "zero"},
    "corrections grow": {
        "mixed_qkv": "aligned",
        "raw_beta": "near_one",
        "raw_g": "slow",
        "conv_state": "zero",
    },
    "eps decides": {"mixed_qkv": "tiny", "conv_state": "zero"},
    "wide": {"mixed_qkv": "binades", "conv_state": "binades", "state": "binades"},
    "large": {"state": "large", "raw_g": "fast"},
    "extreme": {"mixed_qkv": "extreme", "weight": "binades"},
    "silu at its ends": {"mixed_qkv": "saturated", "weight": "near_one", "conv_state": "zero"},
    "thresholds": {"raw_g": "thresholds", "raw_beta": "thresholds", "dt_bias": "zero"},
    "not finite": {"state": "specials", "mixed_qkv": "specials"},
}
PLAIN = {"mixed_qkv": Layout(gaps=(1, 0))}


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("cpu")


@pytest.mark.parametrize("layouts", [{}, PLAIN], ids=["warp-specialised", "plain"])
@pytest.mark.parametrize("taps", ["bfloat16", "float32"])
@pytest.mark.parametrize("regimes", REGIMES.values(), ids=REGIMES)
def test_the_bounds_hold_at_the_ends(
    regimes: dict[str, str], taps: Any, layouts: dict[str, Layout], device: Device
) -> None:
    """Windows of eight tokens with the strongest decay that they allow, on both paths."""
    for seed in range(3):
        case = Case(call=replace(FULL, taps=taps), layouts=layouts, regimes=regimes, seed=seed)
        verdict = check(case, implementation(), device)
        assert verdict.ok, verdict.problems[0].describe()
        assert verdict.path == case.path == ("plain" if layouts else "warp-specialised")


def test_drawn_cases_are_clean(device: Device) -> None:
    """All paths, relations and value regimes."""
    fake, paths = implementation(), set()
    for case in sample(fused_cases(), ROUNDS):
        verdict = check(case, fake, device)
        assert verdict.ok, f"{verdict.problems[0].describe()}: {case}"
        paths.add(verdict.path if case.path else "")
    assert paths == {"", "plain", "warp-specialised", "declined"}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str, device: Device) -> None:
    fake = implementation(fault)
    for case in sample(fused_cases(relations=()), ROUNDS):
        verdict = check(case, fake, device)
        if not verdict.ok:
            assert verdict.problems[0].kind == FAULTS[fault] or not FAULTS[fault]
            return
    pytest.fail(f"{fault} survived {10 * ROUNDS} examples")


@pytest.mark.parametrize("fault", [name for name, kind in FAULTS.items() if kind == "value"])
def test_fault_is_far_outside_where_it_matters(fault: str, device: Device) -> None:
    """Not by a hair: the largest ratio of some case is ten times what is allowed."""
    fake, largest = implementation(fault), 0.0
    for case in sample(fused_cases(relations=()), ROUNDS):
        largest = max(largest, check(case, fake, device).ratio)
        if largest > 10.0:
            return
    pytest.fail(f"{fault} comes no further than {largest}")


def test_a_fault_of_later_tokens_breaks_the_prefix(device: Device) -> None:
    """The invariant sees what the oracle also sees, without it."""
    case = Case(call=FULL, relation=Prefix(3))
    assert check(case, implementation(), device).ok
    found = check(case, implementation("beta of the last token"), device)
    assert not found.ok


def test_a_prepared_call_runs_any_number_of_times(device: Device) -> None:
    """Compiled once; the work counter is looked at when the device is done."""
    case, run = Case(call=FULL), Run()
    compiled: list[FusedFake] = []

    def wrapper(**arguments: Any) -> FusedFake:
        compiled.append(FusedFake(run=run, **arguments))
        return compiled[-1]

    arena = Arena(case, build(case), device)
    prepared = call_fused_verify(FULL, arena.views(), wrapper, implementation())
    left = []
    for _ in range(3):
        arena.restore()
        launched = prepared()
        assert isinstance(launched, Launched)
        launched.check()
        arena.finish()
        left.append(arena.after.copy())
        assert (dict(launched), launched.declined) == ({}, False)
    assert len(compiled) == 1
    assert (left[0] == left[1]).all()
    assert (left[0] == left[2]).all()
    compiled[0].counter += 3
    launched = prepared()
    assert isinstance(launched, Launched)
    with pytest.raises(ValueError, match="left its work counter at 3; it must be 0 between launches"):
        launched.check()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("work counter", "ValueError: the fused verify left its work counter at 1"),
        ("returns nothing", "a bool"),
    ],
)
def test_what_a_caller_would_call_wrong(fault: str, text: str, device: Device) -> None:
    verdict = check(Case(call=FULL), implementation(fault), device)
    assert [p.kind for p in verdict.problems] == ["raised"]
    assert text in verdict.problems[0].text


def test_declined_is_judged_whole(device: Device) -> None:
    """A call off its alignment must be declined and leave every byte."""
    case = Case(call=FULL, layouts={"raw_beta": Layout(offset=1)})
    sound = check(case, implementation(), device)
    assert (sound.ok, sound.path) == (True, "declined")
    launched = check(case, implementation("never declines"), device)
    assert {p.kind for p in launched.problems} == {"frame", "path"}
    touched = check(case, implementation("writes before it declines"), device)
    assert [(p.kind, p.tensor) for p in touched.problems] == [("frame", "out")]


def test_a_path_that_is_not_told_is_no_fault_but_a_wrong_one_is(device: Device) -> None:
    told = implementation()
    silent = Implementation(
        name="silent", operations=told.operations, arithmetic=told.arithmetic, devices=("cpu",)
    )
    case = Case(call=FULL, layouts={"raw_gate": Layout(gaps=(4, 0))})
    assert check(case, silent, device).ok
    wrong = check(case, implementation("path by the first stride alone"), device)
    assert [p.kind for p in wrong.problems] == ["path"]
    assert "asks for the path plain; taken: warp-specialised" in wrong.problems[0].text


@pytest.mark.parametrize(
    ("layouts", "path"),
    [
        ({}, "warp-specialised"),
        ({"mixed_qkv": Layout(gaps=(8, 0), offset=8)}, "warp-specialised"),
        ({"out": Layout(gaps=(1, 0)), "raw_beta": Layout(gaps=(3, 0))}, "warp-specialised"),
        ({"query_start_loc": Layout(offset=4)}, "warp-specialised"),
        ({"mixed_qkv": Layout(gaps=(4, 0))}, "plain"),
        ({"raw_gate": Layout(gaps=(2, 0))}, "plain"),
        ({"conv_weight": Layout(gaps=(4, 0))}, "plain"),
        ({"conv_state": Layout(gaps=(4, 0, 0))}, "plain"),
        ({"conv_state": Layout(gaps=(0, 1, 0))}, "plain"),
        ({"conv_state": Layout(gaps=(8, 0, 0))}, "warp-specialised"),
        ({"state_indices": Layout(offset=2)}, "declined"),
        ({"num_accepted_tokens": Layout(offset=1)}, "declined"),
        ({"out": Layout(offset=4)}, "declined"),
        ({"mixed_qkv": Layout(gaps=(4, 0), offset=2)}, "declined"),
        ({"raw_beta": Layout(fence="above")}, "declined"),
        ({"raw_gate": Layout(fence="above")}, "warp-specialised"),
    ],
)
def test_path_of_a_memory(layouts: dict[str, Layout], path: str) -> None:
    assert Case(call=FULL, layouts=layouts).path == path
    stored = Case(call=replace(FULL, dim_first=False), layouts=layouts).path
    assert stored == ("declined" if path == "declined" else "plain")


def test_no_path_is_claimed_where_nothing_is_launched() -> None:
    nobody: dict[str, Any] = {"qlens": (), "slots": (), "ids": (), "accepted": ()}
    assert Case(call=replace(FULL, **nobody, tail=2)).path == ""
    empty = replace(FULL, qlens=(0, 0, 0))
    assert Case(call=empty, layouts={"mixed_qkv": Layout(offset=1)}).path == ""


@pytest.mark.parametrize(
    ("layouts", "sentence"),
    [
        ({"state": Layout(offset=4)}, "state must start on a multiple of 16 bytes"),
        ({"A_log": Layout(offset=2)}, "A_log must start on a multiple of 16 bytes"),
        ({"state": Layout(gaps=(4, 0, 0, 0))}, "states must lie a multiple of 16 bytes apart"),
        (
            {"conv_weight": Layout(gaps=(1, 0))},
            "rows of a bfloat16 weight must lie a multiple of 8 bytes apart",
        ),
        ({"state": Layout(gaps=(0, 8, 0, 0))}, "layout of state may not move its trailing dimensions; .*"),
        ({"conv_state": Layout(gaps=(0, 0, 1))}, "layout of conv_state may not move its trailing dimen.*"),
        ({"state_indices": Layout(gaps=(1,))}, "layout of state_indices must be dense; .*"),
    ],
)
def test_memory_outside_the_contract(layouts: dict[str, Layout], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        Case(call=FULL, layouts=layouts)


def test_a_relayout_stays_on_its_path() -> None:
    Case(call=FULL, relation=Relayout({"mixed_qkv": Layout(gaps=(16, 0))}))
    with pytest.raises(ValueError, match=r"^the other layouts take the path 'plain' instead of 'warp-spec"):
        Case(call=FULL, relation=Relayout({"mixed_qkv": Layout(gaps=(1, 0))}))


def test_rounding_sets() -> None:
    """One number where all within the error round to it, else one step; every fp32 number is covered."""
    tie, step = 1.0 + 2.0**-8, 2.0**-23
    x = tie + step * torch.arange(-300, 301, dtype=torch.float64)
    for count in (0, 1, 40, 299):
        error = count * step
        found = bfloat16(Tracked(x, torch.full_like(x, error)))
        assert set(found.v.tolist()) == {1.0, 1.0 + 2.0**-7}
        for moved in range(-count, count + 1, max(1, count // 7)):
            off = ((x + moved * step).float().bfloat16().double() - found.v).abs()
            assert bool((off <= found.e).all())
        # Ambiguous within the error of the tie, and from nowhere else; the tie itself rounds to even.
        sure = (x - tie).abs() > error if count else torch.ones_like(x, dtype=torch.bool)
        assert bool((found.e == 0.0)[sure].all())
        assert torch.equal(found.e[~sure][1:-1], torch.full_like(found.e[~sure][1:-1], 2.0**-7))


@pytest.mark.parametrize("layouts", [{}, PLAIN], ids=["warp-specialised", "plain"])
def test_the_bounds_are_tight(layouts: dict[str, Layout], device: Device) -> None:
    """Where every rounding of the convolution is sure, errors come within a tenth of what is allowed."""
    largest = {"correction": 0.0, "out": 0.0}
    seeds = 0
    for seed in range(60):
        call = replace(FULL, heads=1, window=2, qlens=(2,), slots=(1,), ids=(0,), accepted=(1,))
        case = Case(call=call, layouts=layouts, seed=seed)
        bound = expect(case, arithmetic=FACTORED).cells["correction"].bound
        assert bound is not None
        if float(bound[0, 0].max()) > 1e-4:  # a step of bf16 is carried on
            continue
        seeds += 1
        ratios = check(case, implementation(), device).ratios
        largest = {name: max(ratio, ratios[name]) for name, ratio in largest.items()}
    assert seeds > 10
    assert largest["correction"] > 0.1, largest
    assert largest["out"] > 0.02, largest
