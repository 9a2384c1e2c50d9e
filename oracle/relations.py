"""Metamorphic relations: the image of a case, and which cells must agree bit for bit.

These are the serving invariants of the contract (section 1.8) that need no oracle value.
``image(case)`` gives the second case to run. ``agreement(case)`` gives, per output, pairs of
index arrays into the two results; paired cells must hold the same bits, any NaN equal to any.
"""

from dataclasses import dataclass

import msgspec
import torch

from oracle.case import Case, Hostile, OtherPoison, Permute, Prefix, Relayout, Rename, Repeat, Verify
from oracle.expectation import Expected, Observation
from oracle.judge import Problem, same_bits

Tensor = torch.Tensor
replace = msgspec.structs.replace


def image(case: Case) -> Case:
    """The related case; itself free of a relation. The case must have one."""
    call, relation = case.call, case.relation
    plain = replace(case, relation=None)
    match relation:
        case Repeat():
            return plain
        case OtherPoison():
            return replace(plain, poison="huge" if case.poison == "nan" else "nan")
        case Prefix(cut=cut):
            return replace(plain, call=replace(call, qlens=tuple(min(n, cut) for n in call.qlens)))
        case Hostile(row=row, token=token):
            hostile = list(call.hostile or call.qlens)
            hostile[row] = min(token, hostile[row])
            return replace(plain, call=replace(call, hostile=tuple(hostile)))
        case Permute(order=order):
            fields = {
                name: tuple(getattr(call, name)[i] for i in order)
                for name in ("qlens", "slots", "ids", "hostile")
                if getattr(call, name)
            }
            return replace(plain, call=replace(call, **fields))
        case Rename(slots=slots):
            return replace(plain, call=replace(call, slots=slots))
        case Relayout(layouts=layouts, pages=pages):
            return replace(plain, layouts=layouts, pages=pages)
    raise AssertionError(f"no image for {relation!r}")


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


def disagreements(case: Case, expected: Expected, first: Observation, second: Observation) -> list[Problem]:
    """Cells that the relation of ``case`` pairs and that do not hold the same bits."""
    other = image(case).call
    problems = []
    for name in ("key_gate", "correction", "out"):
        cells = expected.cells[name]
        a, b = _paired(name, case.call, other, row_maps(case), first.after[name], second.after[name])
        if a.numel() == 0:
            continue
        wrong = ~same_bits(a, b, any_nan=True)
        if bool(wrong.any()):
            at = tuple(int(i) for i in torch.nonzero(wrong)[0])
            problems.append(
                Problem(
                    kind="relation",
                    tensor=name,
                    stage=cells.stage,
                    expected=f"{float(a[at]):.9g}",
                    observed=f"{float(b[at]):.9g}",
                    count=int(wrong.sum()),
                    total=int(wrong.numel()),
                    text=f"relation {type(case.relation).__name__}, paired cell {at}",
                )
            )
    return problems


def _paired(
    name: str, call: Verify, other: Verify, maps: list[RowMap], first: Tensor, second: Tensor
) -> tuple[Tensor, Tensor]:
    """The paired cells of one output, both as ``[cells, ...]``."""
    left, right = [], []
    for m in maps:
        if name == "out":
            left.append(first[call.starts[m.row] : call.starts[m.row] + m.tokens])
            right.append(second[other.starts[m.image_row] : other.starts[m.image_row] + m.tokens])
        elif call.live(m.row) and m.tokens:
            # [H, tokens, C] to [tokens, H, C], so that rows of different lengths concatenate
            left.append(first[call.record_row(m.row), :, : m.tokens].transpose(0, 1))
            right.append(second[other.record_row(m.image_row), :, : m.tokens].transpose(0, 1))
    if not left:
        return first[:0], second[:0]
    return torch.cat(left).contiguous(), torch.cat(right).contiguous()
