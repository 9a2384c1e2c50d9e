"""A tensor's grades as tables: rows of the batch by heads, then deeper into the worst of them.

Every tensor of every operation is brought into one shape ``[lead, column, position, a, b]``: ``lead``
are tokens, record rows or slots, ``column`` heads, planes or blocks of channels, ``position`` places in
a window or columns of a stored row, ``a`` and ``b`` what is left, as V and K of a state. A *unit*
is a row of the batch with its tokens, or a slot: some indices of ``lead``.
"""

import math
from dataclasses import dataclass

import torch

from ci.maps.grades import FREE, KEPT, RIGHT, Graded
from oracle.calls import AnyCall
from oracle.calls.commit import Commit
from oracle.calls.fused_verify import FusedVerify

Tensor = torch.Tensor
LEADS = ("token", "row", "slot", "request")
COLUMNS, POSITIONS = ("head", "part"), ("position", "column")
MOST_WIDE, MOST_HIGH = 64, 32
"""Columns and lines of a table of channels; where there are more, each stands for several."""


@dataclass(frozen=True)
class Table:
    """Grades and ratios ``[lines, columns]``; column ``j`` stands for index ``j * step`` and on."""

    title: str
    lines: tuple[str, ...]
    across: str
    step: int
    grade: Tensor
    ratio: Tensor


@dataclass(frozen=True)
class _Unit:
    label: str
    where: tuple[int, ...]


@dataclass(frozen=True)
class _Canon:
    """A tensor in the one shape, and what its dimensions are called; empty where it has none."""

    grade: Tensor
    ratio: Tensor
    lead: str
    column: str
    position: str
    a: str
    b: str
    step: int = 1


def tables(one: Graded, call: AnyCall | None) -> list[Table]:
    """Unit by column; tokens of the worst unit by column; the rest of its worst column."""
    if one.grade.numel() == 0:
        return []
    canon = _canon(one, call)
    units = _units(canon, call)
    grade = torch.stack([_most(canon.grade[list(unit.where)], (0, 2, 3, 4)) for unit in units])
    ratio = torch.stack([_most(canon.ratio[list(unit.where)], (0, 2, 3, 4)) for unit in units])
    column = canon.column or one.name
    leads = "row" if canon.lead == "token" else canon.lead
    first = Table(f"{leads} by {column}", _labels(units), column, canon.step, grade, ratio)
    at, c = _worst(grade, ratio)
    unit, name = units[at], f"{column} {c * canon.step}" if canon.column else ""
    return [first, *_deeper(canon, unit, c, name)]


def _deeper(canon: _Canon, unit: _Unit, c: int, name: str) -> list[Table]:
    found = []
    grade, ratio = canon.grade[list(unit.where)], canon.ratio[list(unit.where)]
    label, steps = unit.label.split("  ")[0], canon.position
    if canon.lead == "token":  # its tokens are its positions: [1, column, tokens, a, b]
        grade, ratio = (x.movedim(0, 1).flatten(1, 2)[None] for x in (grade, ratio))
        steps = "token"
    grade, ratio = grade[0], ratio[0]
    if steps:
        lines = tuple(f"{steps} {i}" for i in range(grade.shape[1]))
        if canon.column:
            inner = (_most(x, (2, 3)).T for x in (grade, ratio))
            title = f"{steps} by {canon.column} of {label}"
            found.append(_table(title, lines, canon.column, canon.step, *inner))
        if canon.b:
            title = f"{steps} by {canon.b} of {', '.join(filter(None, (label, name)))}"
            found.append(_table(title, lines, canon.b, 1, *(x[c].flatten(1, 2) for x in (grade, ratio))))
    elif canon.a or canon.b:
        title = f"{canon.a} by {canon.b} of " if canon.a else f"{canon.b} of "
        lines = tuple(f"{canon.a} {i}".strip() for i in range(grade.shape[2]))
        title += ", ".join(filter(None, (label, name)))
        found.append(_table(title, lines, canon.b, 1, grade[c, 0], ratio[c, 0]))
    return found


def _table(title: str, lines: tuple[str, ...], across: str, step: int, grade: Tensor, ratio: Tensor) -> Table:
    """A table of few enough lines and columns."""
    high, wide = (math.ceil(n / most) for n, most in zip(grade.shape, (MOST_HIGH, MOST_WIDE), strict=True))
    if high > 1 or wide > 1:
        grade, ratio = (_blocks(_blocks(x, 0, high), 1, wide) for x in (grade, ratio))
        lines = tuple(lines[i] for i in range(0, len(lines), high))
    return Table(title, lines, across, step * wide, grade, ratio)


def _canon(one: Graded, call: AnyCall | None) -> _Canon:
    grade, ratio, axes = one.grade, one.ratio, list(one.axes)
    lead = next((i for i, axis in enumerate(axes) if axis in LEADS), 0)
    if isinstance(call, FusedVerify) and axes == ["token", "channel"] and one.name == "out":
        grade, ratio = (x.unflatten(1, (call.heads, call.value_dim)) for x in (grade, ratio))
        axes = ["token", "head", "v"]
    if not axes:
        grade, ratio, axes = grade[None], ratio[None], ["value"]
    names, order = [axes[lead]], [lead]
    others = [axis for i, axis in enumerate(axes) if i != lead]
    column = next((axis for axis in others if axis in COLUMNS), "channel" if "channel" in others else "")
    position = next((axis for axis in others if axis in POSITIONS), "")
    for name in (column, position):
        names.append(name)
        order += [axes.index(name)] if name else []
    rest = [i for i in range(len(axes)) if i not in order]
    grade, ratio = (x.permute(*order, *rest) for x in (grade, ratio))
    for place, name in ((1, column), (2, position)):
        if not name:
            grade, ratio = grade.unsqueeze(place), ratio.unsqueeze(place)
    step, inner = 1, [axes[i] for i in rest]
    if column == "channel":
        wide = call.key_dim if isinstance(call, FusedVerify) else math.ceil(grade.shape[1] / MOST_HIGH)
        step = wide
        grade, ratio = (_split(x, wide) for x in (grade, ratio))
        inner = [*inner, "channel"] if wide > 1 else inner
        if wide == 1:
            grade, ratio = grade.squeeze(-1), ratio.squeeze(-1)
    while grade.ndim > 5:
        grade, ratio = grade.flatten(3, 4), ratio.flatten(3, 4)
        inner = inner[1:]
    while grade.ndim < 5:
        grade, ratio = grade.unsqueeze(3), ratio.unsqueeze(3)
        inner = ["", *inner]
    return _Canon(grade, ratio, names[0], column, position, inner[0], inner[1], step)


def _split(x: Tensor, wide: int) -> Tensor:
    """Channels (dimension 1) as blocks of them, the channel in its block last; missing ones are free."""
    short = -x.shape[1] % wide
    if short:
        none = math.nan if x.is_floating_point() else FREE
        x = torch.cat((x, torch.full((x.shape[0], short, *x.shape[2:]), none, dtype=x.dtype)), 1)
    blocks: Tensor = x.unflatten(1, (-1, wide)).movedim(2, -1)
    return blocks


def _units(canon: _Canon, call: AnyCall | None) -> list[_Unit]:
    """Rows of the batch with their tokens; or rows, slots; those with nothing to compare left out."""
    count = canon.grade.shape[0]
    if canon.lead == "token" and call is not None:
        units = [
            _Unit(_row(call, row), tuple(range(call.starts[row], call.starts[row + 1])))
            for row in range(call.rows)
        ]
        padding = tuple(range(call.starts[-1], count))
        units += [_Unit(f"padding  {len(padding)} tokens", padding)] if padding else []
        return [unit for unit in units if unit.where] or [_Unit("no tokens", tuple(range(count)))]
    whole = _most(canon.grade, (1, 2, 3, 4))
    chosen = [i for i in range(count) if int(whole[i]) not in (FREE, KEPT)] or list(range(min(count, 1)))
    return [_Unit(_label(canon.lead, i, call), (i,)) for i in chosen]


def _label(lead: str, i: int, call: AnyCall | None) -> str:
    """What stands at index ``i`` of rows or slots."""
    if call is None:
        return f"{lead} {i}"
    if lead == "slot":
        return f"slot {i}{_owners(call, i)}"
    record_row = getattr(call, "record_row", None)
    if lead != "row" or record_row is None:
        return _row(call, i) if lead == "row" and i < call.rows else f"{lead} {i}"
    rows = [row for row in range(call.rows) if call.slots[row] > 0 and record_row(row) == i]
    if getattr(call, "records", "row") == "row":
        return _row(call, i) if i < call.rows else f"row {i}  no row of the batch"
    return f"slot {i}" + (f"  row {rows[0]}" if rows else "  of no row")


def _owners(call: AnyCall, slot: int) -> str:
    """Which rows a slot is of; of a commit which they write to."""
    if not isinstance(call, Commit):
        rows = [f"row {row}" for row in range(call.rows) if call.slots[row] == slot]
    else:
        plans = [(row, call.plan(row)) for row in range(call.rows)]
        rows = [f"final of row {row}" for row, plan in plans if plan.writes and plan.final == slot]
        rows += [f"boundary of row {row}" for row, p in plans if p.writes_boundary and p.boundary == slot]
    return f"  {', '.join(rows)}" if rows else "  of no row"


def _row(call: AnyCall, row: int) -> str:
    tokens, slot = call.qlens[row], call.slots[row]
    return f"row {row}  {tokens} token{'s' * (tokens != 1)}, slot {slot}"


def _labels(units: list[_Unit]) -> tuple[str, ...]:
    return tuple(unit.label for unit in units)


def _worst(grade: Tensor, ratio: Tensor) -> tuple[int, int]:
    """The line and column with the largest grade, and of those with the largest ratio."""
    score = grade.double() + torch.where(grade > RIGHT, 0.0, ratio.nan_to_num(nan=0.0).clamp(0.0, 1.0) / 2)
    deeper = ratio.nan_to_num(nan=0.0, posinf=1e300)
    best = (score == score.max()) * (1.0 + deeper)
    at = int(best.argmax())
    return at // grade.shape[1], at % grade.shape[1]


def _most(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest along some dimensions; NaN where there is nothing else."""
    if not x.is_floating_point():
        largest: Tensor = x.amax(dims)
        return largest
    most = x.nan_to_num(nan=-1.0, posinf=math.inf).amax(dims)
    return torch.where(most < 0.0, math.nan, most)


def _blocks(x: Tensor, dim: int, size: int) -> Tensor:
    """The largest of every ``size`` entries of a dimension."""
    if size == 1:
        return x
    parts = x.split(size, dim)
    return torch.stack([_most(part, (dim,)) for part in parts], dim)
