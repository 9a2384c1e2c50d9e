"""``kdafuzz fuzz``: plan from options, live progress, the table, and the exit code."""

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ci.asked import Asked, from_options, resumed
from ci.executor import SuiteError
from ci.failures import require_writable, write_json
from ci.fuzz import Row, Run
from ci.gpus import seats
from ci.processes import PIPE_BROKEN, TerminatedError
from ci.query import probe
from ci.report import describe
from ci.reporting.demands import Demands
from ci.reporting.fuzz import summary
from ci.reporting.publish import Outlets
from ci.stale import recheck
from ci.worker import Options
from impl.contract import Domain, UnavailableError
from impl.cute.emulator.settings import SCHEDULES_VARIABLE
from oracle.buckets import BUCKETS


def command(*, json_path: Path | None, **given: Any) -> int:
    """Run what the options ask for; returns the exit code."""
    demands, outlets = Demands.asked(), Outlets.claimed()
    asked = resumed(**given) if given["resume"] is not None else from_options(**given)
    options = asked.options
    demands.check_device(options.device)
    require_writable(options.save, "--save")
    if json_path is not None:
        require_writable(json_path, "--json")
    out = console()
    for line in asked.told():
        out.print(line, soft_wrap=True, markup=False)
    run = _prepare(asked)
    stopped: KeyboardInterrupt | SuiteError | None = None
    try:
        with _Display(out) as display:
            run.execute(display.update)
    except (KeyboardInterrupt, SuiteError) as error:
        stopped = error
    _print(out, run)
    if json_path is not None:
        _write_json(json_path, run)
    passing = [] if stopped else recheck(run)
    warnings = outlets.publish(summary(run, passing, _problem(run, demands, stopped)))
    for line in (*passing, *warnings):
        out.print(f"warning: {line}", soft_wrap=True, markup=False)
    if isinstance(stopped, KeyboardInterrupt):
        out.print("interrupted; the table shows what was done")
        resume = shlex.join(["kdafuzz", "fuzz", "--resume", str(asked.log.path)])
        out.print(f"to go on: {resume}", soft_wrap=True, markup=False)
        return 143 if isinstance(stopped, TerminatedError) else 130
    if stopped is not None:
        raise stopped
    return _conclude(run, demands)


def console() -> Console:
    """Standard output: a terminal as wide as it is, anything else wide enough for our tables."""
    terminal = sys.stdout.isatty()
    return _Console(highlight=False, soft_wrap=not terminal, width=None if terminal else 140)


class _Console(Console):
    """By itself it would exit with 1 where the pipe is broken, which means failures here."""

    def on_broken_pipe(self) -> None:
        """End quietly."""
        self.quiet = True
        raise SystemExit(PIPE_BROKEN)


def _prepare(asked: Asked) -> Run:
    """Ask every implementation what it offers; a lacking operation becomes a line of the table."""
    options, past = asked.options, asked.past
    versions, domains, absent = offers(options)
    ran = versions | {name: os.environ[name] for name in (SCHEDULES_VARIABLE,) if name in os.environ}
    if past is None:
        asked.log.begin(options, ran, no_known=asked.no_known)
    elif past.versions != ran:
        raise UnavailableError(
            f"cannot resume {asked.log.path}: it ran {past.versions}; found {ran}. Start a new run"
        )
    else:
        asked.log.resume(past)
        for suspect in asked.suspects:
            suspect.unlink(missing_ok=True)  # its part of the search is done again
    run = Run(options, versions, domains, seats=seats(asked.gpus, options.jobs), log=asked.log, past=past)
    for key, why in absent.items():
        run.rows[key].absent = why
    return run


def offers(
    options: Options,
) -> tuple[dict[str, str], dict[tuple[str, str], Domain], dict[tuple[str, str], str]]:
    """Versions of the implementations, domains of what they offer, and why they lack the rest."""
    versions: dict[str, str] = {}
    domains: dict[tuple[str, str], Domain] = {}
    absent: dict[tuple[str, str], str] = {}
    for name in options.implementations:
        offer = probe(name, options.device)
        versions[name] = offer.version
        for operation in options.operations:
            if operation in offer.operations:
                domains[name, operation] = offer.domains[operation]
            else:
                absent[name, operation] = offer.absent.get(operation, f"{name} does not offer {operation}")
    return versions, domains, absent


def progress_bar(out: Console) -> Progress:
    """A bar for tasks with a ``note``, on a terminal alone."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    )


class _Display:
    """A progress bar on a terminal; elsewhere a plain line every ten seconds."""

    def __init__(self, out: Console) -> None:
        self._out, self._printed, self._started = out, time.monotonic(), time.monotonic()
        self._bar = progress_bar(out)
        self._tasks: dict[tuple[str, str], Any] = {}

    def __enter__(self) -> "_Display":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, run: Run) -> None:
        """Show how far the run is."""
        for key, row in run.rows.items():
            if key not in self._tasks:
                total = None if run.options.minutes is not None else run.options.examples
                self._tasks[key] = self._bar.add_task(
                    escape(f"{row.implementation} {row.operation}"), total=total, note=""
                )
            note = f"{row.rate:.1f}/s  ratio {row.tally.ratio:.3f}"
            if row.tally.known:
                note += f"  {sum(row.tally.known.values())} known"
            if row.failures:
                note += f"  [red]{len(row.failures)} failing[/red]"
            elif row.tally.executions > row.tally.examples:
                note += f"  [yellow]shrinking, {row.tally.executions - row.tally.examples} runs[/yellow]"
            self._bar.update(self._tasks[key], completed=row.tally.examples, note=note)
        now = time.monotonic()
        if not self._out.is_terminal and now - self._printed > 10:
            self._printed = now
            shown = [row for row in run.rows.values() if not row.absent]
            parts = [f"{row.implementation} {row.operation} {row.tally.examples}" for row in shown]
            self._out.print(f"{now - self._started:5.0f} s: {', '.join(parts)} examples", markup=False)


def _print(out: Console, run: Run) -> None:
    table = Table(title=None)
    for name in ("implementation", "operation"):
        table.add_column(name, no_wrap=True)
    for name in ("examples", "examples/s", "largest ratio", "reached buckets", "known", "failures"):
        table.add_column(name, justify="right")
    for row in run.rows.values():
        table.add_row(*_cells(row))
    out.print(table)
    for line in (*_findings(run), *run.notes):
        out.print(line, soft_wrap=True, markup=False)
    for row in run.rows.values():
        if row.absent or row.stopped:
            why = row.absent or f"stopped: {row.stopped}"
            out.print(f"{row.implementation} {row.operation}: {why}", soft_wrap=True, markup=False)
        for failure, path in row.failures:
            kind = "minimal case" if failure.shrunk else "failing case, perhaps not minimal:"
            kind = "not reproducible" if failure.flaky else kind
            name = escape(f"{row.implementation} {row.operation}")
            out.print(f"\n[bold]{name}[/bold]: {kind} {escape(str(path))}", soft_wrap=True)
            for line in describe(failure.case, failure.verdict, path, row.implementation, run.options.device):
                out.print(f"  {line}", soft_wrap=True, markup=False)
    for row in run.rows.values():
        if row.tally.by_tensor:
            out.print(_distribution(row), soft_wrap=True, markup=False)
    out.print(f"seed {run.options.seed}; cases: {_digests(run)}", soft_wrap=True, markup=False)


def _findings(run: Run) -> list[str]:
    """A line per known finding that was met."""
    counts = {
        entry: sum(
            row.tally.known.get(entry.case, 0)
            for row in run.rows.values()
            if entry.covers(row.implementation, row.version)
        )
        for entry in run.options.known
    }
    return [
        f"known finding, {count} examples: {entry.describe()}" for entry, count in counts.items() if count
    ]


EDGES = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0)


def _distribution(row: Row) -> str:
    """How close the examples came to their bounds: a histogram of each one's largest ratio."""
    ratios, parts, below = row.tally.ratios, [], 0
    for edge in EDGES:
        count = sum(1 for ratio in ratios if ratio <= edge)
        parts.append(f"<= {edge:g}: {100 * (count - below) / len(ratios):.1f} %")
        below = count
    if below < len(ratios):
        parts.append(f"failing: {100 * (len(ratios) - below) / len(ratios):.1f} %")
    tensors = ", ".join(f"{name} {ratio:.3f}" for name, ratio in sorted(row.tally.by_tensor.items()))
    name = f"{row.implementation} {row.operation}"
    return f"{name}: largest ratio by tensor: {tensors}; by example {', '.join(parts)}"


def _digests(run: Run) -> str:
    """A digest of each row's cases: the same seed draws the same ones on any machine."""
    return " ".join(
        f"{row.implementation}/{row.operation}={row.tally.digest}"
        for row in run.rows.values()
        if row.tally.digest
    )


def _cells(row: Row) -> tuple[str, ...]:
    name = (
        f"{row.implementation} ({row.version})"
        if row.version and row.version not in row.implementation
        else row.implementation
    )
    if not row.tally.examples:
        return escape(name), row.operation, "-", "-", "-", "-", "-", "absent" if row.absent else "-"
    known = BUCKETS[row.operation]
    reached = sum(1 for bucket in known if bucket in row.tally.reached)
    return (
        escape(name),
        row.operation,
        str(row.tally.examples),
        f"{row.rate:.1f}",
        f"{row.tally.ratio:.3f}",
        f"{reached}/{len(known)}",
        str(sum(row.tally.known.values())),
        f"[red]{len(row.failures)}[/red]" if row.failures else "0",
    )


def _problem(run: Run, demands: Demands, stopped: BaseException | None) -> str:
    """Why a run's failures are not all there is to say of it, if so."""
    if stopped is not None:
        return str(stopped) or "interrupted"
    try:
        _conclude(run, demands)
    except UnavailableError as error:
        return str(error)
    return ""


def _conclude(run: Run, demands: Demands) -> int:
    """The exit code; ``UnavailableError`` where it would be 0 for too little."""
    code = exit_code(run)
    judged = {key: row.tally.examples for key, row in run.rows.items() if not row.absent}
    unmet = demands.unmet(judged)
    if unmet and not code:
        raise UnavailableError("; ".join(unmet))
    return code


def exit_code(run: Run) -> int:
    """1 with failures; ``UnavailableError`` where a row could not be run to its end."""
    rows = run.rows.values()
    if any(row.failures for row in rows):
        return 1
    for row in rows:
        if row.stopped:
            raise UnavailableError(f"{row.implementation} {row.operation} stopped: {row.stopped}")
        if not row.absent and not row.tally.examples:
            raise UnavailableError(f"{row.implementation} {row.operation} was not run: too little time")
    if all(row.absent for row in rows):
        raise UnavailableError("nothing was run: no implementation offers what was asked for")
    return 0


def _write_json(path: Path, run: Run) -> None:
    """Everything the table shows and every example's largest ratio (but of known findings' examples)."""
    rows = [
        {
            "implementation": row.implementation,
            "version": row.version,
            "operation": row.operation,
            "absent": row.absent,
            "rate": row.rate,
            "tally": row.tally,
            "missing": [b for b in BUCKETS[row.operation] if b not in row.tally.reached],
            "failures": [
                {"path": str(p), "verdict": [x.describe() for x in f.verdict.problems], "flaky": f.flaky}
                for f, p in row.failures
            ],
        }
        for row in run.rows.values()
    ]
    write_json(path, {"seed": run.options.seed, "device": run.options.device, "rows": rows})
