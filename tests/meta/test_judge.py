"""``judge`` reports every kind of problem, and nothing else."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.expect import expect
from oracle.expectation import Cells, Expected, Observation, Stray
from oracle.judge import Problem, Verdict, judge
from oracle.stored import bits, same_bits
from oracle.values import build
from tests.meta.calls import verify_of

Tensor = torch.Tensor
AXES = {"out": ("token", "head", "v"), "key_gate": ("row", "head", "position", "channel")}


def perfect(case: Case) -> tuple[Expected, Observation]:
    """What is expected, and a run that did exactly that."""
    values, expected = build(case), expect(case)
    before: dict[str, Tensor] = {}
    for name, spec in case.call.tensors().items():
        before[name] = values.tensors[name] if not spec.output else torch.zeros(spec.shape)
        if spec.output:
            before[name] = torch.full(spec.shape, 7.0, dtype=getattr(torch, spec.dtype))
    after = {name: tensor.clone() for name, tensor in before.items()}
    for name, cells in expected.cells.items():
        target = after.setdefault(
            name, torch.empty(cells.value.shape, dtype=getattr(torch, verify_of(case).out))
        )
        target[cells.written] = cells.value[cells.written].to(target.dtype)
    return expected, Observation(before, after)


def case(**changes: Any) -> Case:
    call: dict[str, Any] = {
        "heads": 2,
        "key_dim": 4,
        "value_dim": 3,
        "window": 3,
        "pool": 4,
        "qlens": (2, 1, 3),
        "slots": (2, 0, 1),
        "ids": (0, 1, 2),
        "capacity": 4,
        "tail": 1,
    }
    return Case(call=Verify(**(call | changes)), seed=5)


@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("records", ["row", "slot"])
def test_a_perfect_run_has_no_problem(out: str, records: str) -> None:
    verdict = judge(*perfect(case(out=out, records=records)))
    assert verdict.ok
    assert verdict.problems == ()
    assert verdict.stage == ""
    assert set(verdict.ratios) == {"out", "correction"}
    assert verdict.ratio <= 0.5


def test_an_output_of_the_callee_is_judged_but_has_no_frame() -> None:
    expected, seen = perfect(case(own_out=False))
    assert "out" not in seen.before
    seen.after["out"][-1] = math.nan  # the padding token: not written by contract
    assert judge(expected, seen).ok
    seen.after["out"][0, 0, 0] += 1.0
    assert [p.kind for p in judge(expected, seen).problems] == ["value"]


def test_a_wrong_value_names_place_and_size() -> None:
    expected, seen = perfect(case())
    seen.after["out"][4, 1, 2] += 0.5
    seen.after["out"][5, 0, 1] += 0.25
    verdict = judge(expected, seen, AXES)
    (problem,) = verdict.problems
    cells = expected.cells["out"]
    assert cells.bound is not None
    assert (problem.kind, problem.tensor, problem.stage) == ("value", "out", "output")
    assert problem.index == (4, 1, 2)
    assert (problem.count, problem.total) == (2, 6 * 2 * 3)
    assert problem.ratio == verdict.ratio == verdict.ratios["out"]
    assert problem.ratio == pytest.approx(0.5 / float(cells.bound[4, 1, 2]), rel=0.01)
    wanted, found = float(cells.value[4, 1, 2]), float(seen.after["out"][4, 1, 2])
    assert problem.describe() == (
        f"output: out[4, 1, 2] (token 4, head 1, v 2): expected {wanted:.9g} +- {problem.bound:.3g}, "
        f"observed {found:.9g}; ratio {problem.ratio:.3g}; 2 of 36 elements"
    )
    assert not verdict.ok
    assert verdict.stage == "output"


def test_just_inside_the_bound_is_right_and_just_outside_is_wrong() -> None:
    expected, seen = perfect(case(out="float64"))
    cells = expected.cells["out"]
    assert cells.bound is not None
    for share in (0.99, 1.01):
        seen.after["out"][0, 0, 0] = cells.value[0, 0, 0] + share * cells.bound[0, 0, 0]
        verdict = judge(expected, seen)
        assert verdict.ratios["out"] == pytest.approx(share, rel=1e-6)
        assert verdict.ok == (share < 1)


def test_null_rows_must_be_zero_of_either_sign() -> None:
    expected, seen = perfect(case())
    seen.after["out"][2] = -0.0
    assert judge(expected, seen).ok
    seen.after["out"][2, 0, 0] = 1e-45
    assert judge(expected, seen).problems[0].ratio == math.inf


def test_a_copy_counts_every_bit_but_a_nan_s_payload() -> None:
    expected, seen = perfect(case(records="slot", activation="bfloat16"))
    cells = expected.cells["key_gate"]
    assert cells.bound is None
    nan, other_nan = (torch.tensor(x, dtype=torch.int16).view(torch.bfloat16) for x in (0x7FC0, -63))
    cells.value[2, 1, 0, 5], seen.after["key_gate"][2, 1, 0, 5] = nan, other_nan
    assert judge(expected, seen).ok
    cells.value[2, 1, 0, 5], seen.after["key_gate"][2, 1, 0, 5] = 0.0, -0.0
    (problem,) = judge(expected, seen, AXES).problems
    assert problem.describe() == (
        "record: key_gate[2, 1, 0, 5] (row 2, head 1, position 0, channel 5) copy differs: "
        "expected 0 (0x0000), observed -0 (0x8000); 1 of 80 elements"
    )
    assert (problem.kind, problem.ratio) == ("copy", math.inf)
    cells.value[2, 1, 0, 5] = nan
    assert [p.kind for p in judge(expected, seen).problems] == ["copy"]


@pytest.mark.parametrize("name", ["q", "state", "A_log", "query_start_loc", "state_indices", "raw_beta"])
def test_inputs_must_keep_their_bytes(name: str) -> None:
    expected, seen = perfect(case())
    flat = bits(seen.after[name]).view(torch.uint8).flatten()
    flat[-1] ^= 1
    (problem,) = judge(expected, seen).problems
    assert (problem.kind, problem.tensor, problem.stage, problem.count) == ("frame", name, "frame", 1)
    assert problem.index == tuple(n - 1 for n in seen.after[name].shape)
    assert "must keep its bytes: expected" in problem.describe()


def test_cells_outside_the_write_set_must_keep_their_bytes() -> None:
    expected, seen = perfect(case())
    for name, index in (("out", (6, 0, 0)), ("correction", (0, 0, 2, 0)), ("key_gate", (3, 1, 0, 0))):
        seen.after[name][index] = -7.0
    problems = judge(expected, seen).problems
    assert [(p.kind, p.tensor, p.index) for p in problems] == [
        ("frame", "key_gate", (3, 1, 0, 0)),
        ("frame", "correction", (0, 0, 2, 0)),
        ("frame", "out", (6, 0, 0)),
    ]


def test_a_frame_tells_nan_from_nan_and_zero_from_zero() -> None:
    expected, seen = perfect(case())
    for image, payload in ((seen.before, 0x7FC00001), (seen.after, 0x7FC00002)):
        bits(image["out"])[6, 0, 0] = payload
    (problem,) = judge(expected, seen).problems
    assert (problem.expected, problem.observed) == ("nan (0x7fc00001)", "nan (0x7fc00002)")


def test_problems_come_in_the_order_of_the_stages() -> None:
    expected, seen = perfect(case())
    seen.after["out"][0] += 1.0
    seen.after["correction"][0, 0, 0] += 1.0
    seen.after["key_gate"][0, 0, 0] += 1.0
    seen.after["q"][0] += 1.0
    seen = Observation(seen.before, seen.after, strays=(Stray("v", -8, 3),))
    verdict = judge(expected, seen)
    stages = [(p.kind, p.stage) for p in verdict.problems]
    assert stages == [
        ("copy", "record"),
        ("value", "correction"),
        ("value", "output"),
        ("frame", "frame"),
        ("stray", ""),
    ]
    assert verdict.stage == "record"
    assert verdict.problems[-1].describe() == (
        "stray: 3 bytes changed outside every tensor, first at v -8 bytes"
    )


def test_a_lone_stray_is_its_own_stage() -> None:
    expected, seen = perfect(case())
    verdict = judge(expected, Observation(seen.before, seen.after, strays=(Stray("v", 40, 1),)))
    assert verdict.stage == "stray"
    assert "first at v +40 bytes" in verdict.problems[0].describe()


def test_an_exception_is_the_only_problem() -> None:
    expected, seen = perfect(case())
    seen.after["q"][0] += 1.0
    verdict = judge(expected, Observation(seen.before, seen.after, raised="ValueError: no", path="ws"))
    (problem,) = verdict.problems
    assert problem.describe() == "raised: ValueError: no"
    assert (verdict.ratio, verdict.path, verdict.stage) == (math.inf, "ws", "raised")


def test_a_missing_or_misshapen_output_is_reported() -> None:
    expected, seen = perfect(case(own_out=False))
    whole = seen.after.pop("out")
    assert [p.text for p in judge(expected, seen).problems] == ["the call returned no out"]
    seen.after["out"] = whole[:-1]
    verdict = judge(expected, seen)
    assert [p.text for p in verdict.problems] == ["out has shape (6, 2, 3); expected (7, 2, 3)"]
    assert verdict.ratio == math.inf


def _judge_one(value: float, bound: float, observed: float, dtype: torch.dtype = torch.float32) -> float:
    wide = torch.tensor([value, bound], dtype=torch.float64)
    cells = Cells(torch.tensor([True]), wide[:1], wide[1:], "output")
    seen = torch.tensor([observed], dtype=dtype)
    verdict = judge(Expected({"out": cells}), Observation({"out": seen}, {"out": seen}))
    assert verdict.ok == (verdict.ratio <= 1.0)
    return verdict.ratio


@pytest.mark.parametrize("seen", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite_where_the_oracle_is_not_finite_is_right(value: float, seen: float) -> None:
    assert _judge_one(value, 1.0, seen) == 0.0
    assert _judge_one(value, math.nan, seen) == 0.0
    assert _judge_one(value, math.nan, 0.0) == math.inf
    assert _judge_one(0.0, 1.0, seen) == math.inf


def test_where_fp32_may_overflow_nothing_is_claimed() -> None:
    for seen in (0.0, math.inf, math.nan, -1e30):
        assert _judge_one(1e39, math.inf, seen) == 0.0
        assert _judge_one(1.0, math.nan, seen) == 0.0


def test_overflow_of_a_narrow_store_is_right() -> None:
    assert _judge_one(1e6, 1.0, math.inf, torch.float16) == 0.0
    assert _judge_one(65519.0, 0.5, math.inf, torch.float16) == 2.0
    assert _judge_one(65519.0, 0.5, 65504.0, torch.float16) == 0.0
    assert _judge_one(1e6, 1.0, 65504.0, torch.float16) > 1e5
    assert _judge_one(1e6, 1.0, -math.inf, torch.float16) > 1e5


@given(st.floats(width=32), st.floats(0, 1e30), st.floats(width=32), st.floats(1, 10))
def test_the_ratio_falls_with_the_bound_and_is_never_nan(
    v: float, bound: float, seen: float, f: float
) -> None:
    first, second = _judge_one(v, bound, seen), _judge_one(v, bound * f, seen)
    assert not math.isnan(first)
    assert 0.0 <= second <= first


@given(st.floats(-1e30, 1e30), st.floats(1e-9, 1e30), st.lists(st.floats(0, 1e31), min_size=2, max_size=2))
def test_the_ratio_grows_with_the_distance(v: float, bound: float, steps: list[float]) -> None:
    near, far = sorted(steps)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for sign in (1.0, -1.0):
            assert _judge_one(v, bound, v + sign * near, dtype) <= _judge_one(v, bound, v + sign * far, dtype)


def test_same_bits_is_about_bits() -> None:
    a, b = torch.tensor([0.0, math.nan, 1.0]), torch.tensor([-0.0, -math.nan, 1.0])
    assert same_bits(a, b).tolist() == [False, False, True]
    assert same_bits(a, b, any_nan=True).tolist() == [False, True, True]
    assert same_bits(torch.tensor([3, 4]), torch.tensor([3, 5]), any_nan=True).tolist() == [True, False]


def test_ok_means_no_problem() -> None:
    assert Verdict().ok
    assert not Verdict(problems=(Problem("crash", text="died"),)).ok
    assert Problem("crash", text="died").describe() == "crash: died"
