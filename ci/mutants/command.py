"""``kdafuzz mutants``: what is asked, the run, and what it came to."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ci.asked import operations_of
from ci.campaign import console, progress_bar
from ci.failures import require_writable, write_json
from ci.known import read_known
from ci.logs import latest, new_path
from ci.mutants.judging import SOUND, Outcome, Task
from ci.mutants.listed import Listed, read_listed
from ci.mutants.log import Asked, Log, read_log
from ci.mutants.plan import Planned, plan
from ci.mutants.running import execute
from ci.mutants.sites import OPERATORS, function_text
from ci.mutants.subjects import Subject, subject
from ci.mutants.tally import Report, Row, Survivor, report
from ci.processes import TerminatedError
from ci.query import probe
from impl.contract import UnavailableError
from impl.registry import split

EMULATED_PALETTE = 4
"""Variants of a CuTe kernel that the emulator has compiled for each mutant, unless asked."""


@dataclass
class _Run:
    asked: Asked
    subjects: list[Subject]
    plans: list[Planned]
    listed: Listed
    log: Log | None = None

    def report(self) -> Report:
        """What came of it so far."""
        return report(self.plans, self.log.past if self.log is not None else {}, self.listed)


def command(
    implementations: str,
    operations: str,
    *,
    resume: str | None,
    save: Path,
    json_path: Path | None,
    jobs: int | None,
    list_only: bool,
    **given: Any,
) -> int:
    """Judge the mutants that the options ask for; 1 if some survive."""
    if json_path is not None:
        require_writable(json_path, "--json")
    if resume is not None:
        path = latest(save, "run of mutants") if resume == "latest" else Path(resume)
        asked, past = read_log(path)
    else:
        path, past = new_path(save), None
        asked = Asked(split(implementations), operations_of(operations), **given)
    run = _prepare(asked)
    out = console()
    if list_only:
        _list(out, run)
        return 0
    digests = {each.name: each.digest for each in run.subjects}
    if past is not None and asked.digests != digests:
        raise UnavailableError(f"cannot resume {path}: the kernels have changed since; start a new run")
    run.log = Log(path, msgspec.structs.replace(asked, digests=digests), past)
    out.print(f"log {path}", soft_wrap=True, markup=False, emoji=False)
    try:
        _execute(out, run, jobs or len(os.sched_getaffinity(0)))
    except KeyboardInterrupt as stop:
        _conclude(out, run, json_path)
        again = shlex.join(["kdafuzz", "mutants", "--resume", str(path)])
        out.print(f"interrupted; to go on: {again}", soft_wrap=True, markup=False, emoji=False)
        return 143 if isinstance(stop, TerminatedError) else 130
    finally:
        run.log.close()
    return _conclude(out, run, json_path)


def _prepare(asked: Asked) -> _Run:
    subjects = [subject(name, asked.device) for name in asked.implementations]
    listed = read_listed()
    plans = [
        plan(
            each,
            asked.operations,
            listed,
            count=asked.count,
            only=asked.only,
            with_listed=asked.with_listed,
        )
        for each in subjects
    ]
    if not any(each.every for each in plans):
        raise UnavailableError(
            f"nothing to mutate: {', '.join(asked.implementations)} has none of {', '.join(asked.operations)}"
        )
    return _Run(asked, subjects, plans, listed)


def _tasks(run: _Run) -> list[Task]:
    """What is left to do: the sound subjects first, for what they fail says nothing of a mutant."""
    asked, tasks = run.asked, []
    known = read_known()
    for planned in run.plans:
        here = planned.subject
        offer = probe(here.name, here.device)
        palette = asked.palette
        if palette is None:
            palette = EMULATED_PALETTE if here.device == "emulator" else 0
        common: dict[str, Any] = {
            "subject": here,
            "domains": offer.domains,
            "examples": asked.examples,
            "seed": asked.seed,
            "timeout": asked.timeout,
            "palette": palette,
            "baseline": asked.baseline,
            "version": offer.version,
            "known": known,
        }
        needed = dict.fromkeys(
            op for each in planned.mutants for op in each.operations if op in offer.domains
        )
        tasks += [Task(mutant=None, operations=(op,), **common) for op in needed]
        for each in planned.mutants:
            operations = tuple(op for op in each.operations if op in offer.domains)
            tasks.append(Task(mutant=each, operations=operations, **common))
    assert run.log is not None
    return [task for task in tasks if (task.subject.name, task.id) not in run.log.past and task.operations]


def _execute(out: Console, run: _Run, jobs: int) -> None:
    log, tasks = run.log, _tasks(run)
    assert log is not None
    _require_sound(log.past)
    bar = progress_bar(out)
    counts = {"killed": 0, "survived": 0}
    with bar:
        row = bar.add_task("mutants", total=len(tasks), note="")

        def done(task: Task, outcome: Outcome) -> None:
            log.add(task.subject.name, outcome)
            _require_sound({(task.subject.name, outcome.id): outcome})
            if task.mutant is not None and outcome.status in counts:
                counts[outcome.status] += 1
            bar.update(row, advance=1, note=f"{counts['killed']} killed, {counts['survived']} survived")
            if not out.is_terminal:
                out.print(_told(outcome), soft_wrap=True, markup=False, emoji=False)

        execute(tasks, min(jobs, max(1, len(tasks))), done)


def _require_sound(outcomes: dict[tuple[str, str], Outcome]) -> None:
    """A subject that fails without a fault cannot tell one."""
    for (name, identity), outcome in outcomes.items():
        if not identity.startswith(SOUND):
            continue
        if outcome.status != "survived" or outcome.baseline == "killed":
            what = outcome.text if outcome.status != "survived" else f"usual test: {outcome.baseline_text}"
            raise UnavailableError(f"{name} fails without a fault, {identity.partition(':')[2]}: {what}")


def _told(outcome: Outcome) -> str:
    how = ""
    if outcome.status == "killed":
        how = f" by {outcome.operation} example {outcome.example}: {outcome.stage} {outcome.kind}"
    usual = f"; usual test {outcome.baseline}" if outcome.baseline else ""
    return f"{outcome.id} {outcome.status}{how} ({outcome.seconds:.1f} s{usual})"


def _list(out: Console, run: _Run) -> None:
    for planned in run.plans:
        for each in planned.every:
            old, new = (" ".join(text.split()) for text in (each.old, each.new))
            out.print(
                f"{each.id}  {each.function}: {old} -> {new}", soft_wrap=True, markup=False, emoji=False
            )
        out.print(f"{len(planned.every)} mutants of {planned.subject.name}", markup=False, emoji=False)


def _conclude(out: Console, run: _Run, json_path: Path | None) -> int:
    whole = run.report()
    _print(out, whole, run.asked)
    if json_path is not None:
        _write_json(json_path, whole, run)
    if whole.broken:
        raise UnavailableError(
            f"{len(whole.broken)} mutants got no verdict, the first {whole.broken[0].mutant.id}"
        )
    return 1 if whole.survivors else 0


_COLUMNS = ("mutants", "stillborn", "equivalent", "beyond", "killed", "survived")


def _print(out: Console, whole: Report, asked: Asked) -> None:
    for name in dict.fromkeys(key[0] for key in whole.rows):
        out.print(_table(name, whole))
    for each in whole.survivors:
        _print_survivor(out, each)
    for line in whole.warnings:
        out.print(f"warning: {line}", soft_wrap=True, markup=False, emoji=False)
    out.print(f"seed {asked.seed}, up to {asked.examples} examples an operation", markup=False, emoji=False)


def _table(implementation: str, whole: Report) -> Table:
    """Rows by operation and operator, and their sums."""
    table = Table(title=escape(implementation), title_justify="left")
    for column in ("operation", "operator"):
        table.add_column(column, no_wrap=True)
    for column in (*_COLUMNS, "% killed", "median example", "usual test"):
        table.add_column(column, justify="right", no_wrap=True)
    order = list(OPERATORS)
    for operation in dict.fromkeys(key[1] for key in sorted(whole.rows) if key[0] == implementation):
        rows = [(key[2], row) for key, row in whole.rows.items() if key[:2] == (implementation, operation)]
        for name, row in sorted(rows, key=lambda pair: order.index(pair[0])):
            table.add_row(operation, name, *_cells(row))
        table.add_row(operation, "all", *_cells(whole.total(implementation, operation)), style="bold")
        table.add_section()
    table.add_row("all", "", *_cells(whole.total(implementation)), style="bold")
    return table


def _cells(row: Row) -> list[str]:
    cells = [str(getattr(row, name)) for name in _COLUMNS]
    usual = "-" if row.usual_rate is None else f"{row.usual} of {row.asked}"
    median = "-" if row.median is None else f"{row.median:g}"
    return [*cells, "-" if row.rate is None else f"{100 * row.rate:.1f}", median, usual]


def _print_survivor(out: Console, survivor: Survivor) -> None:
    mutant, outcome = survivor.mutant, survivor.outcome
    judged = ", ".join(f"{count} of {operation}" for operation, count in outcome.judged.items())
    what = f"{outcome.status}: {outcome.text}" if outcome.text else f"{outcome.status} {judged}"
    out.print(f"\n[bold]{escape(mutant.id)}[/bold] {escape(what)}", soft_wrap=True, emoji=False)
    for line in function_text(survivor.planned.subject.texts[mutant.module], mutant):
        out.print(f"  {line}", soft_wrap=True, markup=False, emoji=False)
    out.print(f"  key: {mutant.key}", soft_wrap=True, markup=False, emoji=False)


def _write_json(path: Path, whole: Report, run: _Run) -> None:
    assert run.log is not None
    rows = [
        {
            "implementation": name,
            "operation": operation,
            "operator": op,
            "rate": row.rate,
            "usual_rate": row.usual_rate,
            "median": row.median,
            "row": row,
        }
        for (name, operation, op), row in whole.rows.items()
    ]
    aside = [
        {"key": mutant.key, "kind": entry.kind, "why": entry.why, "caught": entry.caught}
        for planned in run.plans
        for mutant, entry in planned.aside
    ]
    survivors = [
        {
            "key": each.mutant.key,
            "outcome": each.outcome,
            "diff": function_text(each.planned.subject.texts[each.mutant.module], each.mutant),
        }
        for each in (*whole.survivors, *whole.set_aside)
    ]
    outcomes = [{"implementation": name, "outcome": each} for (name, _), each in run.log.past.items()]
    data: dict[str, Any] = {"asked": run.asked, "rows": rows, "survivors": survivors, "listed": aside}
    write_json(path, data | {"outcomes": outcomes, "warnings": whole.warnings})
