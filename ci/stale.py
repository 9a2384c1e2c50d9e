"""Entries of ``corpora/known.toml`` whose case passes by now, though no example of a run showed that."""

from ci.executor import Executor
from ci.failures import load, locate
from ci.fuzz import Row, Run
from ci.known import Known, stale
from impl.contract import UnavailableError
from oracle.codec import CaseError


def recheck(run: Run) -> list[str]:
    """Judge the case of every finding that the run might have met and did not; returns what is stale.

    One that was met is not: its failure was there. Nor is one of another implementation, version or
    operation, or one that is not found or cannot run here.
    """
    found = []
    for row in run.rows.values():
        unmet = [entry for entry in run.options.known if _unmet(entry, row)]
        if not unmet or not row.tally.examples:
            continue
        with Executor(row.implementation, run.options.device, timeout=run.options.timeout) as executor:
            found += [
                stale(entry, row.implementation, row.version) for entry in unmet if _passes(entry, executor)
            ]
    return found


def _unmet(entry: Known, row: Row) -> bool:
    mine = entry.operation == row.operation and entry.covers(row.implementation, row.version)
    return mine and entry.case not in row.tally.known


def _passes(entry: Known, executor: Executor) -> bool:
    try:
        return executor.check(load(locate(entry.case)[0]).case).ok
    except (CaseError, UnavailableError):
        return False
