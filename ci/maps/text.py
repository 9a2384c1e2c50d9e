"""Error maps as text, for terminals and the logs of a CI."""

from ci.maps.grades import LEGEND, RIGHT, SYMBOLS, Graded, graded
from ci.maps.sheets import Table, tables
from ci.runs import Run

MOST_LINES = 48
"""Lines of one table; of more, those with something wrong are shown first."""


def render(run: Run) -> str:
    """All maps of a call, and the legend."""
    every = graded(run)
    spoiled = any(bool(one.wrong.any()) for one in every)
    parts = [_section(one, tables(one, run.call), brief=spoiled) for one in every]
    if run.seen.raised:
        parts.insert(0, f"the call raised {run.seen.raised}: the maps show memory as it left it")
    if run.what:
        parts.insert(0, run.what)
    return "\n\n".join([*parts, "\n".join(LEGEND)]) + "\n"


def _section(one: Graded, maps: list[Table], *, brief: bool) -> str:
    """One tensor: a headline, and its tables if anything is wrong; else the first one, or none if brief."""
    wrong = int(one.wrong.sum())
    shape = " x ".join(f"{axis} {n}" for axis, n in zip(one.axes, one.grade.shape, strict=True))
    finite = one.ratio[~one.ratio.isnan()]
    ratio = f", largest ratio {float(finite.max()):.3g}" if finite.numel() else ""
    note = f" ({one.note})" if one.note else ""
    head = f"{one.name}{note}: {shape}; {one.stage}; {wrong} wrong, {one.compared} to be written{ratio}"
    shown = maps if wrong else maps[: 0 if brief else 1]
    return "\n".join([head, *(line for table in shown for line in _table(table))])


def _table(table: Table) -> list[str]:
    """The header with every tenth column's index, then a line of symbols each."""
    shown = list(range(len(table.lines)))
    if len(shown) > MOST_LINES:
        bad = [i for i in shown if bool((table.grade[i] > RIGHT).any())]
        shown = sorted([*bad, *(i for i in shown if i not in set(bad))][:MOST_LINES])
    wide = max([len(table.lines[i]) for i in shown], default=0)
    each = f", {table.step} in a place" if table.step > 1 else ""
    marks = "".join(f"{j * table.step:<10}" for j in range(0, table.grade.shape[1], 10)).rstrip()
    lines = [f"  {table.title}{each}", f"    {'':{wide}}  {marks}"]
    for i in shown:
        cells = "".join(SYMBOLS[int(grade)] for grade in table.grade[i])
        lines.append(f"    {table.lines[i]:{wide}}  {cells}".rstrip())
    left = len(table.lines) - len(shown)
    return [*lines, f"    and {left} more lines"] if left else lines
