"""The fused verify's oracle against those of its parts: the update, then verify on what it rounds to."""

import msgspec
import pytest
import torch

from impl.arena import plan
from oracle.calls.conv import ConvUpdate
from oracle.calls.fused_verify import FusedVerify
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.conv import expect_update
from oracle.expect import expect
from oracle.expectation import Expected
from oracle.layout import placed
from oracle.stored import same_bits
from oracle.tracked import COMPILED, FACTORED
from oracle.values import Values, build
from oracle.verify import expect_verify
from tests.meta.drawn import any_cases, over, sample
from tests.strategies.fused_verify import fused_cases

Tensor = torch.Tensor


def composed(call: FusedVerify, values: Values) -> tuple[Expected, Expected]:
    """What the update and verify expect, one after the other, of the fused call's inputs."""
    t = values.tensors
    H, K, T = call.heads, call.key_dim, call.tokens
    rows = {name: getattr(call, name) for name in ("pool", "qlens", "slots", "ids", "tail")}
    update = ConvUpdate(
        **rows,
        channels=call.channels,
        state_len=call.state_len,
        window=call.window,
        accepted=call.accepted,
        activation="bfloat16",
        conv="bfloat16",
        taps=call.taps,
    )
    stored = t["conv_state"] if call.dim_first else t["conv_state"].mT
    inputs = {"x": t["mixed_qkv"], "weight": t["conv_weight"], "conv_state": stored}
    conv = expect_update(Case(call=update), Values.full(inputs), COMPILED)
    q, k, v = conv.cells["out"].value.float().bfloat16().reshape(T, 3, H, K).unbind(1)
    verify = Verify(
        **rows,
        heads=H,
        key_dim=K,
        value_dim=K,
        window=call.window,
        capacity=call.capacity,
        activation="bfloat16",
        out="bfloat16",
        state="bfloat16",
        lower_bound=call.lower_bound,
    )
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        "raw_g": t["raw_gate"].reshape(T, H, K),
        "raw_beta": t["raw_beta"],
        "A_log": t["A_log"],
        "dt_bias": t["dt_bias"].reshape(H, K),
        "state": t["state"],
    }
    return conv, expect_verify(Case(call=verify), Values.full(inputs), COMPILED)


@over(fused_cases(relations=()), 20)
def test_equals_its_parts(case: Case) -> None:
    """Values to 1e-12 of the largest of their row, write sets, rolled rows and gate records exactly."""
    call, values = case.call, build(case)
    assert isinstance(call, FusedVerify)
    found = expect(case, values, FACTORED)
    if case.path == "declined":
        assert found.cells == {}
        return
    if not call.tokens > call.rows * call.window:  # more padding than verify takes
        conv, parts = composed(call, values)
        _compare(call, values, found, conv, parts)


def _compare(call: FusedVerify, values: Values, found: Expected, conv: Expected, parts: Expected) -> None:
    broken = ~values.tensors["state"].isfinite().all(-1)  # [S, H, V]: rows of which nothing is claimed
    for name in ("correction", "out"):
        cells, other = found.cells[name], parts.cells[name]
        written, value = other.written, other.value
        if name == "out":
            written, value = written.flatten(1), value.flatten(1)
        assert torch.equal(cells.written, written)
        claimed = written & (cells.bound != torch.inf)
        assert torch.equal(cells.value.isfinite()[claimed], value.isfinite()[claimed])
        scale = value.abs().nan_to_num(0.0, 0.0, 0.0).amax() if value.numel() else 0.0
        off = (cells.value - value).abs()
        near = (off <= 1e-12 * (scale + value.abs())) | ~(cells.value.isfinite() & value.isfinite())
        assert bool(near[claimed].all())
        if not bool(broken.any()):
            assert torch.equal(cells.value.isfinite()[written], value.isfinite()[written])
    rolled, wanted = found.cells["conv_state"], conv.cells["conv_state"]
    for mine, theirs in ((rolled.written, wanted.written), (rolled.value, wanted.value)):
        stored = theirs if call.dim_first else theirs.mT
        assert bool(same_bits(mine, stored, any_nan=True)[rolled.written].all())
    assert torch.equal(rolled.written, wanted.written if call.dim_first else wanted.written.mT)
    records, copied = found.cells["key_gate"], parts.cells["key_gate"]
    assert torch.equal(records.written, copied.written)
    K = call.key_dim
    for part, rounded in ((slice(K, None), records.value), (slice(K), records.value.float())):
        mine = rounded.bfloat16()[..., part]
        same = same_bits(mine, copied.value[..., part], any_nan=True) | ~records.written[..., part]
        assert bool(same.all())


def test_a_sequential_arithmetic_has_the_bounds_of_the_parts() -> None:
    """Kernels run one after the other: bound and value are those of verify where rounding is sure."""
    compared = 0
    for case in sample(fused_cases(relations=()), 4):
        call, values = case.call, build(case)
        assert isinstance(call, FusedVerify)
        if case.path in ("", "declined"):
            continue
        found, factored = expect(case, values, COMPILED), expect(case, values, FACTORED)
        _, parts = composed(call, values)
        mine, theirs = found.cells["correction"], parts.cells["correction"]
        assert mine.bound is not None
        assert theirs.bound is not None
        assert bool((mine.bound >= theirs.bound)[mine.written & theirs.bound.isfinite()].all())
        assert torch.equal(found.cells["conv_state"].value, factored.cells["conv_state"].value)
        compared += 1
    assert compared > 10


def test_nothing_is_claimed_of_a_row_of_a_state_that_is_not_finite() -> None:
    case = Case(
        call=FusedVerify(
            heads=1, window=2, capacity=1, pool=2, qlens=(2,), slots=(1,), ids=(0,), accepted=(1,)
        )
    )
    values = build(case)
    values.tensors["state"][1, 0, 5, 7] = torch.inf
    values.tensors["state"][1, 0, 9, 0] = torch.nan
    cells = expect(case, values, FACTORED).cells
    for name in ("correction", "out"):
        bound = cells[name].bound
        assert bound is not None
        free = torch.nonzero(~bound.isfinite().reshape(-1, 128).all(0)).flatten().tolist()
        assert free == [5, 9]
        assert bool(cells[name].value.isfinite().all())


@pytest.mark.parametrize("token", [0, 1])
def test_a_key_that_is_not_finite_reaches_later_tokens_alone(token: int) -> None:
    case = Case(
        call=FusedVerify(
            heads=1, window=3, capacity=1, pool=2, qlens=(3,), slots=(1,), ids=(0,), accepted=(1,)
        )
    )
    values = build(case)
    values.tensors["mixed_qkv"][token, 128 + 3] = torch.nan
    u = expect(case, values, FACTORED).cells["correction"].value[0, 0]
    assert u.isfinite().all(-1).tolist() == [t < token for t in range(3)]


def test_a_window_of_many_tokens_bounds_more_than_one() -> None:
    """Every token adds roundings: the bound of a later correction is no smaller on the whole."""
    call = FusedVerify(
        heads=1,
        window=8,
        capacity=1,
        pool=2,
        qlens=(8,),
        slots=(1,),
        ids=(0,),
        accepted=(1,),
        lower_bound=-0.5,
    )
    bound = expect(Case(call=call, regimes={"state": "zero"}), arithmetic=FACTORED).cells["correction"].bound
    assert bound is not None
    medians = bound[0, 0].median(-1).values
    assert bool(medians.isfinite().all())
    shorter = expect(
        Case(call=msgspec.structs.replace(call, qlens=(4,)), regimes={"state": "zero"}), arithmetic=FACTORED
    )
    other = shorter.cells["correction"].bound
    assert other is not None
    assert torch.equal(other[0, 0, :4], bound[0, 0, :4])  # what comes later does not matter


@over(any_cases(), 20)
def test_spots_are_where_the_arena_puts_tensors(case: Case) -> None:
    """The alignment that the path is computed from is that of the memory which a kernel gets."""
    found = plan(case)
    for name, spot in placed(case.call.tensors(), case.layouts, case.pages).items():
        place = found.places[name]
        assert spot.strides == place.strides
        if place.extent:
            start = found.segments[place.segment].start + place.offset
            assert spot.start == start % 256, name
