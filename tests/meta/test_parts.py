"""Work in parts: every element once, and the same results as at once."""

import pytest
import torch

import oracle.judge
import oracle.parts
from ci.bench.calls import Size
from ci.bench.growth import case_of
from oracle.expect import expect
from oracle.expectation import Cells, Expected, Observation
from oracle.judge import Verdict, judge
from oracle.parts import PART, in_parts, slices
from oracle.tracked import COMPILED, FACTORED, Tracked, exact
from oracle.values import build


@pytest.mark.parametrize(
    ("rows", "heads", "each"),
    [(1, 1, 1), (3, 2, 16384), (2, 9, 16384), (5, 3, PART), (2, 2, 3 * PART), (40, 7, 100), (4, 2, 0)],
)
def test_every_row_and_head_is_in_one_part(rows: int, heads: int, each: int) -> None:
    found = torch.zeros(rows, heads, dtype=torch.int)
    for n, h in slices(rows, heads, each):
        found[n, h] += 1
        assert found[n, h].numel() == 1 or found[n, h].numel() * each <= PART
    assert bool((found == 1).all())


@pytest.mark.parametrize(("rows", "heads"), [(2, 3), (7, 3), (3, 11), (0, 2)])
def test_parts_are_put_together(rows: int, heads: int) -> None:
    x = torch.arange(rows * heads * 2, dtype=torch.float64).reshape(rows, heads, 2)

    def compute(n: slice, h: slice) -> tuple[Tracked, Tracked]:
        return exact(x[n, h]), Tracked(x[n, h, :1] + 1.0, x[n, h, 1:])

    one, other = in_parts(rows, heads, PART // 4, compute)
    assert torch.equal(one.v, x)
    assert not one.e.any()
    assert torch.equal(other.v, x[..., :1] + 1.0)
    assert torch.equal(other.e, x[..., 1:])


LARGE = {
    "verify": Size("verify", rows=3, heads=6, window=2),
    "fused_verify": Size("fused_verify", rows=3, heads=6, window=2),
    "commit": Size("commit", rows=3, heads=6, window=2),
    "conv_prefill": Size("conv_prefill", tokens=700, channels=3 * 128),
    "packed_conv": Size("packed_conv", tokens=700, channels=3 * 128),
}


@pytest.mark.parametrize("name", LARGE)
def test_expectations_are_those_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(LARGE[name])
    values, ar = build(case), FACTORED if name == "fused_verify" else COMPILED
    parts = expect(case, values, ar)
    monkeypatch.setattr(oracle.parts, "PART", 1 << 40)
    for key, whole in expect(case, values, ar).cells.items():
        found = parts.cells[key]
        assert torch.equal(found.written, whole.written)
        torch.testing.assert_close(found.value, whole.value, rtol=1e-12, atol=1e-12)
        if whole.bound is not None:
            torch.testing.assert_close(found.bound, whole.bound, rtol=1e-9, atol=0.0)


def cells_of(kind: str) -> Cells:
    """More than one part: by entries that are large, small or not whole, or along one axis."""
    shape = {"large": (3, 2, PART), "small": (300, 1000), "ragged": (300, 1000), "line": (3 * PART,)}[kind]
    written = torch.ones(shape, dtype=torch.bool)
    if len(shape) > 1:
        written[1] = False
    if kind == "ragged":
        written[:, ::7] = False
    copied = torch.zeros(shape, dtype=torch.bool)
    if kind == "small":
        copied[..., :3] = True
    value = torch.zeros(shape, dtype=torch.float64)
    return Cells(written, value, torch.ones(shape, dtype=torch.float64), "fold", fresh=True, copied=copied)


@pytest.mark.parametrize("kind", ["large", "small", "ragged", "line"])
@pytest.mark.parametrize("wrong", [(), (0.5,), (0.999, 0.7, 0.4), (0.999999,)])
def test_a_judgement_is_that_of_the_whole(
    kind: str, wrong: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = cells_of(kind)
    after = torch.zeros(cells.value.shape)
    for i, place in enumerate(wrong):
        after.flatten()[int(place * after.numel())] = 3.0 + i

    def verdict() -> Verdict:
        return judge(Expected({"out": cells}), Observation({"out": torch.zeros_like(after)}, {"out": after}))

    found = verdict()
    monkeypatch.setattr(oracle.judge, "PART", 1 << 40)
    assert found == verdict()
    places = [int(p * after.numel()) for p in sorted(wrong)]
    judged = [p for p in places if bool(cells.written.flatten()[p])]
    assert found.ok == (not judged)
    if judged:
        index = found.problems[0].index
        assert torch.arange(after.numel()).reshape(after.shape)[index] == judged[0]
        assert found.problems[0].count == len(judged)
