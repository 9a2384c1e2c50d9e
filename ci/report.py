"""A failure in words, the same ones wherever it comes up: fuzz, replay and pytest."""

from pathlib import Path

from ci.failures import case_id, replay_line
from oracle.case import Case
from oracle.judge import Verdict

SHOWN = 4
"""Problems listed; the first is where the algorithm's stages diverged, the rest mostly follow from it."""


def describe(case: Case, verdict: Verdict, path: Path, implementation: str, device: str) -> list[str]:
    """Lines: id and dimensions, path taken and first stage to diverge, problems, replay command."""
    relation = f", relation {type(case.relation).__name__}" if case.relation is not None else ""
    taken = f"path taken: {verdict.path}; " if verdict.path else ""
    cause = (
        f"; explained by the step before it: {verdict.cause}"
        if verdict.cause not in ("", verdict.stage)
        else ""
    )
    lines = [
        f"case {case_id(case)}: {case.call.describe()}{relation}",
        f"{taken}first stage to diverge: {verdict.stage}{cause}",
    ]
    lines += [problem.describe() for problem in verdict.problems[:SHOWN]]
    more = len(verdict.problems) - SHOWN
    if more > 0:
        lines.append(f"and {more} more")
    return [*lines, replay_line(path, implementation, device)]
