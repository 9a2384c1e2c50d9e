"""Metamorphic relations: which cells of a case and of its image must agree bit for bit.

These are the serving invariants of the contract (section 1.8) that need no oracle value.
``oracle.case.image`` gives the second case to run. The call knows which cells of an output
the first tokens of a row decide; any NaN equals any.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from oracle.calls import AnyCall
from oracle.calls.base import Place
from oracle.case import Case, Hostile, Permute, Prefix
from oracle.expectation import Expected, Observation
from oracle.judge import Problem
from oracle.stored import same_bits

Tensor = torch.Tensor


@dataclass(frozen=True)
class RowMap:
    """Where row ``i`` of the case is in the image, and how many of its tokens must agree."""

    row: int
    image_row: int
    tokens: int


def row_maps(case: Case) -> list[RowMap]:
    """Every row's place in the image and the number of its leading tokens that must agree."""
    call = case.call
    match case.relation:
        case Prefix(cut=cut):
            return [RowMap(i, i, min(n, cut)) for i, n in enumerate(call.qlens)]
        case Hostile(row=row, token=token):
            return [RowMap(i, i, min(n, token) if i == row else n) for i, n in enumerate(call.qlens)]
        case Permute(order=order):
            return [RowMap(i, place, call.qlens[i]) for place, i in enumerate(order)]
        case _:
            return [RowMap(i, i, n) for i, n in enumerate(call.qlens)]


@dataclass(frozen=True)
class _Pair:
    """A part of the case's tensor, that of the image as the same shape, and where they differ."""

    row: int
    here: Place
    left: Tensor
    right: Tensor
    bad: Tensor


def _pairs(case: Case, other: AnyCall, name: str, first: Observation, second: Observation) -> Iterator[_Pair]:
    """The parts of a tensor that the relation pairs; ``bad`` has the shape of the part itself.

    ``other`` is the image's call.
    """
    for m in row_maps(case):
        left, right = case.call.cells(name, m.row, m.tokens), other.cells(name, m.image_row, m.tokens)
        # A shorter row of the image may decide by all its tokens what the case's does by more.
        for here, there in zip(left, right if left else [], strict=True):
            a, b = first.after[name][here], second.after[name][there]
            if a.shape != b.shape:  # planes of channels against one row of them
                planes = a.movedim(0, -2).shape
                b = b.reshape(planes).movedim(-2, 0)
            yield _Pair(m.row, here, a, b, ~same_bits(a, b, any_nan=True))


def differing(
    case: Case, other: AnyCall, expected: Expected, first: Observation, second: Observation
) -> dict[str, Tensor]:
    """Per tensor with any, which cells of the case do not hold the bits that its image has.

    ``other`` is the call of ``image(case)``; ``first`` is the case's observation, ``second`` the image's.
    """
    found = {}
    for name in expected.cells.keys() & second.after.keys():
        wrong = torch.zeros(first.after[name].shape, dtype=torch.bool)
        for pair in _pairs(case, other, name, first, second):
            wrong[pair.here] |= pair.bad
        if bool(wrong.any()):
            found[name] = wrong
    return found


def disagreements(
    case: Case, other: AnyCall, expected: Expected, first: Observation, second: Observation
) -> list[Problem]:
    """Cells that the relation of ``case`` pairs and that do not hold the same bits.

    ``other`` is the call of ``image(case)``; ``first`` is the case's observation, ``second`` the image's.
    """
    problems = []
    for name, cells in expected.cells.items():
        if name not in second.after:
            continue  # an output that only the case has
        wrong = total = 0
        where, pair = "", (torch.zeros(()), torch.zeros(()))
        for part in _pairs(case, other, name, first, second):
            total += int(part.bad.numel())
            if bool(part.bad.any()):
                at = tuple(int(i) for i in torch.nonzero(part.bad)[0])
                if not wrong:
                    where, pair = f"row {part.row}, cell {at} of its part", (part.left[at], part.right[at])
                wrong += int(part.bad.sum())
        if wrong:
            problems.append(
                Problem(
                    kind="relation",
                    tensor=name,
                    stage=cells.stage,
                    expected=f"{float(pair[0]):.9g}",
                    observed=f"{float(pair[1]):.9g}",
                    count=wrong,
                    total=total,
                    text=f"relation {type(case.relation).__name__}, {where}",
                )
            )
    return problems
