"""How each cell of a tensor fared: one small number a cell, by the rules of ``oracle.judge``."""

from dataclasses import dataclass

import torch

from ci.runs import Run
from oracle.expectation import Cells
from oracle.stored import bits, over_bound, same_bits

Tensor = torch.Tensor
SYMBOLS = " -.0123456789~x#!"
"""A grade is an index into these; of several cells the largest stands for all."""
FREE, KEPT, RIGHT, OVER = 0, 1, 2, 3
"""Nobody compares it; kept its bytes as it must; within its bound; past it, up to ten times."""
MOST_OVER = 9
COPY, CHANGED, UNFIT, UNWRITTEN = 13, 14, 15, 16
LEGEND = (
    ". within its bound, or the copy that it must be",
    "0 past its bound, by up to 10 times; 1 up to 100; .. 9 by 10^9 and more",
    "~ other bits than those of which it is a copy, or than in the related call",
    "x changed, and must keep its bytes",
    "# not finite where it must be, or finite where it must not",
    "! wrong, and holds what lay there before the call: not written",
    "- no output: it must keep its bytes, and did (dead cells too)",
    "  (blank) not compared: free, or there is no such cell",
)


@dataclass(frozen=True)
class Graded:
    """A tensor's grades (int8) and errors over their bounds (float64, NaN where no bound applies)."""

    name: str
    stage: str
    axes: tuple[str, ...]
    grade: Tensor
    ratio: Tensor
    note: str = ""

    @property
    def wrong(self) -> Tensor:
        """Which cells are."""
        return self.grade > RIGHT

    @property
    def compared(self) -> int:
        """How many cells the call must write."""
        return int(((self.grade >= RIGHT) & (self.grade != CHANGED)).sum())


def graded(run: Run) -> list[Graded]:
    """Every tensor that the call writes, in the order of the call, and others that it changed."""
    names = [name for name in run.axes if name in run.expected.cells or name in run.seen.after]
    names += [name for name in run.expected.cells if name not in names]
    told = []
    for name in names:
        one = _graded(run, name)
        if name in run.expected.cells or bool(one.wrong.any()):
            told.append(one)
    return told


def _graded(run: Run, name: str) -> Graded:
    cells, after = run.expected.cells.get(name), run.seen.after.get(name)
    axes = tuple(run.axes.get(name, ()))
    stage = cells.stage if cells is not None else "frame"
    note = ""
    if cells is not None and (after is None or after.shape != cells.written.shape):
        note = f"came as {tuple(after.shape)}" if after is not None else "the call returned none"
        grade = torch.where(cells.written, UNWRITTEN, FREE).to(torch.int8)
        ratio = torch.full(cells.written.shape, torch.nan, dtype=torch.float64)
    else:
        assert after is not None
        before = None if cells is not None and cells.fresh else run.seen.before.get(name)
        grade, ratio = _compared(cells, before, after)
        if name in run.differs:
            grade = torch.where(run.differs[name], COPY, grade).to(torch.int8)
    if len(axes) != grade.ndim:
        axes = tuple(f"axis {i}" for i in range(grade.ndim))
    return Graded(name, stage, axes, grade, ratio, note)


def _compared(cells: Cells | None, before: Tensor | None, after: Tensor) -> tuple[Tensor, Tensor]:
    """Grades and ratios of a tensor; ``before`` is None where the callee made it."""
    grade = torch.full(after.shape, FREE, dtype=torch.int8)
    ratio = torch.full(after.shape, torch.nan, dtype=torch.float64)
    if before is not None:
        grade = torch.where(bits(before) != bits(after), CHANGED, KEPT).to(torch.int8)
    if cells is None:
        return grade, ratio
    written = cells.written
    if cells.bound is None:
        copied, source = written, cells.value
    else:
        copied = torch.zeros_like(written) if cells.copied is None else cells.copied & written
        source = cells.value.to(after.dtype)
        ratio[written] = over_bound(cells.value[written], cells.bound[written], after[written], cells.via)
        ratio[copied] = torch.nan
    far = ratio.clamp(min=1.0).log10().floor().nan_to_num(posinf=MOST_OVER).clamp(max=MOST_OVER)
    over = torch.where(ratio > 1.0, OVER + far, RIGHT)
    if after.is_floating_point() and cells.bound is not None:
        unfit = (ratio > 1.0) & (cells.value.isfinite() != after.isfinite())
        over = torch.where(unfit, UNFIT, over)
    over = torch.where(copied, torch.where(same_bits(source, after, any_nan=True), RIGHT, COPY), over)
    if before is not None:
        over = torch.where((over > RIGHT) & (bits(before) == bits(after)), UNWRITTEN, over)
    return torch.where(written, over, grade).to(torch.int8), ratio
