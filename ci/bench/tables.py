"""What a benchmark found, as a table and as JSON."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable


@dataclass
class Entry:
    """One column at one size. ``us`` is GPU time a call, or, without ``graph``, the time of single calls."""

    bytes: int
    """That this way of calling must move."""
    us: float | None = None
    graph: bool = True
    host_us: float | None = None
    wall_us: float | None = None
    problem: str = ""
    """What it raised, or how its results differ from the first column's."""


@dataclass(frozen=True)
class Row:
    """One size: ``bytes`` that the operation must move, and the time of that many at the copy's rate."""

    label: str
    size: dict[str, Any]
    bytes: int
    floor_us: float | None
    entries: dict[str, Entry]


@dataclass(frozen=True)
class Table:
    """An operation: ``copy_rate`` in bytes a second (None: nothing is timed), and why columns are empty."""

    operation: str
    columns: tuple[str, ...]
    absent: dict[str, str]
    copy_rate: float | None
    rows: list[Row]


def show(out: Console, table: Table) -> None:
    """Print one operation, and what there is to say below it."""
    out.print()
    title = table.operation
    if table.copy_rate:
        title += f": us a call (share of a copy's rate); device copy {table.copy_rate / 1e12:.2f} TB/s"
    drawn = RichTable(title=escape(title), title_justify="left")
    drawn.add_column(_UNITS.get(table.operation, "rows, window"))
    drawn.add_column("MB", justify="right")
    drawn.add_column("floor", justify="right")
    for name in table.columns:
        drawn.add_column(escape(name), justify="right")
    for row in table.rows:
        cells = [_cell(row.entries.get(name), table.copy_rate) for name in table.columns]
        floor = "-" if row.floor_us is None else _short(row.floor_us)
        drawn.add_row(row.label, _short(row.bytes / 1e6), floor, *cells)
    out.print(drawn)
    for line in _lines(table):
        out.print(line, markup=False)


_UNITS = {"conv_prefill": "tokens x channels", "packed_conv": "tokens x channels"}


def _short(number: float) -> str:
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _cell(entry: Entry | None, rate: float | None) -> str:
    if entry is None:
        return "-"
    if entry.us is None or rate is None:
        return "WRONG" if entry.problem else "agrees"
    text = f"{entry.us:.1f} ({entry.bytes / rate * 1e6 / entry.us:.0%})"
    if not entry.graph:
        text += "*"
    if entry.wall_us is not None:
        text += f"\nwall {entry.wall_us:.1f}\nhost {entry.host_us:.1f}"
    return text + ("\nWRONG" if entry.problem else "")


def _lines(table: Table) -> list[str]:
    """Below the table: agreement, problems, what is missing, what marks mean."""
    entries = [(row, name, entry) for row in table.rows for name, entry in row.entries.items()]
    wrong = [f"WRONG {row.label} {name}: {x.problem}" for row, name, x in entries if x.problem]
    lines = wrong or (["results agree"] if len(entries) > len(table.rows) else [])
    lines += [f"- {name}: {why}" for name, why in table.absent.items()]
    if any(not x.graph for _, _, x in entries):
        lines.append("* no graph can hold it: single calls on an idle GPU, launch gaps included")
    if any(x.wall_us is not None for _, _, x in entries):
        lines.append("wall: a loop of calls with one wait at its end; host: the loop without it")
    return lines
