"""What the judge makes of a path, and of copies inside a tensor that is bounded elsewhere."""

import pytest
import torch

from oracle.expectation import Cells, Expected, Observation
from oracle.judge import judge


def mixed(value: list[float], written: list[bool] | None = None) -> Expected:
    """Four cells, the first two bounded by 0.01, the last two copies."""
    copied = torch.tensor([False, False, True, True])
    return Expected(
        {
            "x": Cells(
                torch.tensor(written or [True] * 4),
                torch.tensor(value, dtype=torch.float64),
                torch.where(copied, 0.0, 0.01).double(),
                "record",
                copied=copied,
            )
        }
    )


def seen(x: list[float], path: str = "") -> Observation:
    before = {"x": torch.full((4,), 7.0, dtype=torch.bfloat16)}
    return Observation(before, {"x": torch.tensor(x, dtype=torch.bfloat16)}, path=path)


@pytest.mark.parametrize(
    ("observed", "kind", "index"),
    [
        ([1.0, 2.0, 0.0, torch.nan], "", ()),
        ([1.0078125, 2.0, 0.0, torch.nan], "", ()),  # within the bound of the first
        ([1.0, 2.0, -0.0, torch.nan], "copy", (2,)),
        ([1.0, 2.0, 0.0, torch.inf], "copy", (3,)),
        ([1.0, 2.0, 1e-30, torch.nan], "copy", (2,)),
        ([1.5, 2.0, 0.0, torch.nan], "value", (0,)),
        ([1.5, 2.0, -0.0, torch.nan], "copy", (2,)),
    ],
)
def test_copies_are_compared_by_bits(observed: list[float], kind: str, index: tuple[int, ...]) -> None:
    verdict = judge(mixed([1.0, 2.0, 0.0, torch.nan]), seen(observed))
    assert [(p.kind, p.index) for p in verdict.problems] == ([(kind, index)] if kind else [])


def test_a_copy_that_is_not_written_keeps_its_bytes() -> None:
    expected = mixed([1.0, 2.0, 0.0, 5.0], [True, True, True, False])
    assert judge(expected, seen([1.0, 2.0, 0.0, 7.0])).ok
    touched = judge(expected, seen([1.0, 2.0, 0.0, 5.0]))
    assert [(p.kind, p.index) for p in touched.problems] == [("frame", (3,))]


@pytest.mark.parametrize(
    ("expected", "path", "ok"),
    [
        ("", "", True),
        ("", "plain", True),
        ("", "declined", True),
        ("plain", "plain", True),
        ("plain", "", True),  # an implementation need not tell
        ("plain", "warp-specialised", False),
        ("plain", "declined", False),
        ("declined", "declined", True),
        ("declined", "", False),  # a declined call always tells
        ("declined", "plain", False),
    ],
)
def test_path(expected: str, path: str, ok: bool) -> None:
    verdict = judge(Expected({}, expected), seen([7.0] * 4, path))
    assert verdict.ok == ok
    assert [p.kind for p in verdict.problems] == ([] if ok else ["path"])
    assert verdict.stage == ("" if ok else "path")
