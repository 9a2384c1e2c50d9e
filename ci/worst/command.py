"""``kdafuzz worst``: hunts over implementations and operations, the table, saved cases, the exit code."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ci.asked import Asked, from_options
from ci.campaign import console, exit_code, offers
from ci.executor import SuiteError
from ci.failures import file_name, require_writable, write_atomically, write_json
from ci.fuzz import Row, Run
from ci.gpus import seats
from ci.processes import TerminatedError
from ci.report import describe
from ci.worst.measure import Measured, measure
from ci.worst.near import Kind, Near
from ci.worst.plain import OPERATIONS
from oracle.case import Case
from oracle.codec import SCHEMA, CaseFile, dumps
from oracle.reach.dtypes import combination
from oracle.reach.memory import base
from oracle.values import checksum

SLACK = 0.05
"""A bound that no case comes nearer to than this catches little."""
SECONDS_A_CASE = 2.0
"""Of the time limit of a case, for one that is measured: all of them have passed before."""


@dataclass(frozen=True)
class Line:
    """One kind of output: how near chance and search came, and how it compares with twice a plain error."""

    implementation: str
    version: str
    operation: str
    dtypes: str
    tensor: str
    drawn: tuple[float, ...]
    """Ratios of random examples."""
    worst: float
    case: Path
    shares: tuple[float, ...] = ()
    """Of every case that was measured our bound over theirs, and how many exceeded theirs."""
    alarms: int = 0

    def quantiles(self) -> tuple[float, float, float, float]:
        """Median, 90 %, 99 % and largest of the random examples."""
        some = self.drawn if len(self.drawn) > 1 else (self.drawn or (0.0,)) * 2
        cuts = quantiles(some, n=100, method="inclusive")
        return median(some), cuts[89], cuts[98], max(some)


def command(*, json_path: Path | None, **given: Any) -> int:
    """Run what the options ask for; returns the exit code."""
    asked = from_options(
        **given, palette=None, sanitize=None, keep_going=False, no_known=False, shrink_seconds=90.0
    )
    asked = replace(asked, options=replace(asked.options, hunting=True))
    require_writable(asked.options.save, "--save")
    if json_path is not None:
        require_writable(json_path, "--json")
    out = console()
    run = _prepare(asked, out)
    stopped: KeyboardInterrupt | SuiteError | None = None
    try:
        run.execute(_Progress(out).update)
    except (KeyboardInterrupt, SuiteError) as error:
        stopped = error
    lines = [line for row in run.rows.values() for line in _kinds(run, row)]
    if stopped is None:
        lines = _compared(out, run, lines)
    _print(out, run, lines)
    if json_path is not None:
        _write_json(json_path, run, lines)
    if isinstance(stopped, KeyboardInterrupt):
        out.print("interrupted; the table shows what was done")
        return 143 if isinstance(stopped, TerminatedError) else 130
    if stopped is not None:
        raise stopped
    return exit_code(run)


def _prepare(asked: Asked, out: Console) -> Run:
    options = asked.options
    much = f"{options.minutes:g} minutes" if options.minutes else f"{options.examples} judgements each"
    out.print(
        f"kdafuzz worst: {', '.join(options.implementations)} on {options.device}, {much}, "
        f"{options.jobs} processes, seed {options.seed}",
        soft_wrap=True,
        markup=False,
    )
    versions, domains, absent = offers(options)
    run = Run(options, versions, domains, seats=seats(asked.gpus, options.jobs))
    for key, why in absent.items():
        run.rows[key].absent = why
    return run


class _Progress:
    """A line every ten seconds."""

    def __init__(self, out: Console) -> None:
        self._out, self._printed, self._started = out, time.monotonic(), time.monotonic()

    def update(self, run: Run) -> None:
        """Say how far the run is, if it is time to."""
        now = time.monotonic()
        if now - self._printed > 10:
            self._printed = now
            shown = [row for row in run.rows.values() if not row.absent]
            parts = [
                f"{row.implementation} {row.operation} {row.tally.executions} ratio {row.tally.ratio:.3f}"
                for row in shown
            ]
            self._out.print(f"{now - self._started:5.0f} s: {', '.join(parts)}", markup=False)


def _kinds(run: Run, row: Row) -> list[Line]:
    """A row's kinds, the worst case of each saved."""
    nearness = row.tally.nearness
    return [
        Line(
            implementation=row.implementation,
            version=row.version,
            operation=row.operation,
            dtypes=kind[0],
            tensor=kind[1],
            drawn=tuple(nearness.samples.get(kind, ())),
            worst=near.ratio,
            case=_saved(run, row, kind, near),
        )
        for kind, near in sorted(nearness.worst.items())
    ]


def _saved(run: Run, row: Row, kind: Kind, near: Near) -> Path:
    """Write a worst case, so that it can be replayed."""
    found = {
        "implementation": row.implementation,
        "device": run.options.device,
        "ratio": f"{near.ratio:.6g} of {kind[1]}",
    }
    entry = CaseFile(kdafuzz=SCHEMA, case=near.case, checksum=checksum(near.case), found=found)
    path = run.options.save / file_name(near.case, f"{row.implementation} worst {kind[1]} {kind[0]}")
    write_atomically(path, dumps(entry))
    return path


def _compared(out: Console, run: Run, lines: Sequence[Line]) -> list[Line]:
    """The lines with what drawn cases measure against twice a plain reference's error."""
    rows = [row for row in run.rows.values() if row.operation in OPERATIONS and row.tally.nearness.cases]
    options = run.options

    def of(row: Row) -> list[list[Measured]] | str:
        cases = row.tally.nearness.cases
        limit = 60.0 + SECONDS_A_CASE * options.timeout * len(cases)
        return measure(row.implementation, options.device, cases, limit)

    found: dict[tuple[str, str, str, str], list[Measured]] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for row, answer in zip(rows, pool.map(of, rows), strict=True):
            if isinstance(answer, str):
                told = f"{row.implementation} {row.operation}: not compared with a plain reference: {answer}"
                out.print(told, soft_wrap=True, markup=False)
                continue
            for case, measured in zip(row.tally.nearness.cases, answer, strict=True):
                for one in measured:
                    found.setdefault((row.implementation, row.operation, *_kind(case, one)), []).append(one)
    return [_with(line, found) for line in lines]


def _kind(case: Case, measured: Measured) -> Kind:
    return combination(case.call), base(measured.tensor)


def _with(line: Line, found: dict[tuple[str, str, str, str], list[Measured]]) -> Line:
    own = found.get((line.implementation, line.operation, line.dtypes, line.tensor), [])
    return replace(line, shares=tuple(one.share for one in own), alarms=sum(one.exceeded for one in own))


_COLUMNS = ("examples", "median", "90 %", "99 %", "largest", "worst", "ours : 2 plain", "false alarms")


def _table(row: Row, lines: Sequence[Line]) -> Table:
    """The kinds of one implementation and operation."""
    table = Table(title=escape(f"{row.implementation} {row.operation}"), title_justify="left")
    table.add_column(", ".join(part.split()[0] for part in lines[0].dtypes.split(", ")), no_wrap=True)
    table.add_column("tensor", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for line in lines:
        dtypes = ", ".join(part.split()[1] for part in line.dtypes.split(", "))
        cuts = [f"{cut:.3f}" for cut in line.quantiles()] if line.drawn else ["-"] * 4
        compared = ("-", "-")
        if line.shares:
            compared = f"{median(line.shares):.3g}", f"{line.alarms}/{len(line.shares)}"
        table.add_row(dtypes, line.tensor, str(len(line.drawn)), *cuts, f"{line.worst:.3f}", *compared)
    return table


def _print(out: Console, run: Run, lines: Sequence[Line]) -> None:
    for row in run.rows.values():
        own = [
            line
            for line in lines
            if (line.implementation, line.operation) == (row.implementation, row.operation)
        ]
        if own:
            out.print(_table(row, own))
    for told in (*_worst(lines), *run.notes):
        out.print(told, soft_wrap=True, markup=False)
    for row in run.rows.values():
        if row.absent or row.stopped:
            why = row.absent or f"stopped: {row.stopped}"
            out.print(f"{row.implementation} {row.operation}: {why}", soft_wrap=True, markup=False)
        for failure, path in row.failures:
            name = f"{row.implementation} {row.operation}"
            out.print(f"\n{name}: failing case {path}", soft_wrap=True, markup=False)
            for told in describe(failure.case, failure.verdict, path, row.implementation, run.options.device):
                out.print(f"  {told}", soft_wrap=True, markup=False)
    out.print(f"seed {run.options.seed}", markup=False)


def _worst(lines: Sequence[Line]) -> list[str]:
    """Per operation and tensor the nearest case of all, and what nothing comes near."""
    nearest: dict[tuple[str, str, str], Line] = {}
    for line in lines:
        key = line.implementation, line.operation, line.tensor
        if key not in nearest or line.worst > nearest[key].worst:
            nearest[key] = line
    told = []
    for (implementation, operation, tensor), line in nearest.items():
        slack = "; a bound that nothing comes near catches little" if line.worst < SLACK else ""
        told.append(f"{implementation} {operation} {tensor}: {line.worst:.3f} by {line.case}{slack}")
    return told


def _write_json(path: Path, run: Run, lines: Sequence[Line]) -> None:
    """Everything the table shows and every random example's ratio."""
    rows = [
        {
            "implementation": line.implementation,
            "version": line.version,
            "operation": line.operation,
            "dtypes": line.dtypes,
            "tensor": line.tensor,
            "ratios": line.drawn,
            "quantiles": dict(zip(("50", "90", "99", "100"), line.quantiles(), strict=True)),
            "worst": line.worst,
            "case": str(line.case),
            "ours_over_twice_plain": line.shares,
            "false_alarms": line.alarms,
        }
        for line in lines
    ]
    failures = [str(found) for row in run.rows.values() for _, found in row.failures]
    facts = {"seed": run.options.seed, "device": run.options.device, "rows": rows, "failures": failures}
    write_json(path, facts)
