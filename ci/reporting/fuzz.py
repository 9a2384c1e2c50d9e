"""The summary of a fuzzing run."""

from collections import Counter
from collections.abc import Sequence

from ci.failures import replay_line
from ci.fuzz import Row, Run
from ci.report import describe
from ci.reporting.summary import Failed, Line, Summary


def summary(run: Run, stale: Sequence[str], problem: str) -> Summary:
    """A run's table, its failures, entries of ``known.toml`` to narrow, and what went wrong beside them."""
    options = run.options
    asked = f"{options.minutes:g} minutes" if options.minutes else f"{options.examples} examples each"
    lines = [_line(row, options.device) for row in run.rows.values()]
    return Summary(
        title="kdafuzz fuzz",
        ok=not problem and not any(line.failures for line in lines),
        facts=(f"device {options.device}", asked, f"seed {options.seed}"),
        lines=lines,
        problems=[problem] if problem else [],
        stale=stale,
    )


def _line(row: Row, device: str) -> Line:
    why = row.absent or (f"stopped: {row.stopped}" if row.stopped else "")
    return Line(
        row.implementation,
        row.operation,
        row.version,
        examples=row.tally.examples,
        rate=row.rate,
        ratio=row.tally.ratio,
        known=sum(row.tally.known.values()),
        failures=[
            Failed(
                f"{row.implementation} {row.operation}",
                "\n".join(describe(failure.case, failure.verdict, path, row.implementation, device)),
                replay_line(path, row.implementation, device),
            )
            for failure, path in row.failures
        ],
        skipped=Counter([why] if why else []),
    )
