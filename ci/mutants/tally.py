"""What a run came to: counts by operation and operator, and the survivors one by one."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ci.mutants.judging import Outcome
from ci.mutants.listed import Entry, Listed
from ci.mutants.plan import Planned
from ci.mutants.sites import Mutant


@dataclass
class Row:
    """Counts over some mutants. ``first`` are the numbers of the examples that killed.

    ``usual`` counts what the usual test killed of the ``asked`` ones that count.
    """

    mutants: int = 0
    stillborn: int = 0
    equivalent: int = 0
    beyond: int = 0
    killed: int = 0
    survived: int = 0
    broken: int = 0
    asked: int = 0
    usual: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, other: "Row") -> None:
        """Add another row's counts."""
        for name in ("mutants", "stillborn", "equivalent", "beyond", "killed", "survived", "broken"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.asked, self.usual = self.asked + other.asked, self.usual + other.usual
        self.first += other.first

    @property
    def rate(self) -> float | None:
        """Killed of those that can be; None without any."""
        counted = self.killed + self.survived
        return self.killed / counted if counted else None

    @property
    def usual_rate(self) -> float | None:
        """The same of the usual test."""
        return self.usual / self.asked if self.asked else None

    @property
    def median(self) -> float | None:
        """Of the examples that it took to kill."""
        return statistics.median(self.first) if self.first else None


@dataclass(frozen=True)
class Survivor:
    """A mutant that nothing killed, or that the suite could not judge."""

    planned: Planned
    mutant: Mutant
    outcome: Outcome
    entry: Entry | None = None


@dataclass
class Report:
    """Rows by (implementation, operation, operator), survivors, and what is wrong with the list."""

    rows: dict[tuple[str, str, str], Row] = field(default_factory=dict)
    survivors: list[Survivor] = field(default_factory=list)
    set_aside: list[Survivor] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def total(self, implementation: str = "", operation: str = "") -> Row:
        """The sum over an implementation's operation, or over all."""
        whole = Row()
        for (name, op, _), row in self.rows.items():
            if implementation in ("", name) and operation in ("", op):
                whole.add(row)
        return whole

    @property
    def broken(self) -> list[Survivor]:
        """Mutants without a verdict."""
        return [each for each in self.survivors if each.outcome.status == "broken"]


def report(plans: Iterable[Planned], outcomes: Mapping[tuple[str, str], Outcome], listed: Listed) -> Report:
    """The report on what has been judged so far."""
    result = Report()
    for planned in plans:
        for mutant, entry in planned.aside:
            row = _row(result, planned, mutant)
            row.mutants += 1
            setattr(row, entry.kind, getattr(row, entry.kind) + 1)
        for mutant in planned.mutants:
            outcome = outcomes.get((planned.subject.name, mutant.id))
            if outcome is not None:
                _count(result, planned, mutant, outcome, listed)
        result.warnings += [f"equivalents.toml: stale, no such mutant: {key}" for key in planned.stale]
    return result


def _row(result: Report, planned: Planned, mutant: Mutant) -> Row:
    key = planned.subject.name, mutant.operations[0], mutant.operator
    return result.rows.setdefault(key, Row())


def _count(result: Report, planned: Planned, mutant: Mutant, outcome: Outcome, listed: Listed) -> None:
    row = _row(result, planned, mutant)
    row.mutants += 1
    entry = listed.of(mutant)
    survivor = Survivor(planned, mutant, outcome, entry or listed.beyond(mutant.operator))
    match outcome.status:
        case "stillborn":
            row.stillborn += 1
            return
        case "broken":
            row.broken += 1
            result.survivors.append(survivor)
            return
        case "killed":
            row.killed += 1
            row.first.append(outcome.example)
            if entry is not None:
                result.warnings.append(
                    f"equivalents.toml: lists as {entry.kind} what was killed: {mutant.key}"
                )
        case "survived" if survivor.entry is not None:
            setattr(row, survivor.entry.kind, getattr(row, survivor.entry.kind) + 1)
            result.set_aside.append(survivor)
            return
        case "survived":
            row.survived += 1
            result.survivors.append(survivor)
    if outcome.baseline:
        row.asked += 1
        row.usual += outcome.baseline == "killed"
