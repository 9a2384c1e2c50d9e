"""The log of a bisection: one JSON value a line. It outlives the run, and a run can go on from it.

First what was asked: the case, how it is judged, and the whole history, so that a branch that moves
meanwhile changes nothing. Then every judgement in order, at last the result. A line counts once
its newline is there.
"""

from pathlib import Path
from typing import Any

import msgspec

from ci import logs
from ci.bisect.bisection import Phase, Result
from ci.bisect.items import History
from ci.bisect.rule import Outcome, Rule, Seen
from ci.logs import Lines, reading
from oracle.captured import read_sidecar
from oracle.case import Case

FOLDER = Path(".kdafuzz/bisect")
_SCHEMA = 1


class Asked(msgspec.Struct, frozen=True):
    """What a bisection was asked to do; ``sidecar`` is where captured values of the case lie."""

    case: Case
    history: History
    device: str | None = None
    repeats: int = 3
    timeout: float = 60.0
    threshold: float | None = None
    any_run: bool = False
    sidecar: str = ""

    @property
    def rule(self) -> Rule:
        """When an item is bad, before it is known how the bad end fails."""
        return Rule(self.threshold, any_run=self.any_run)


class Log:
    """The log of a run that is going on; ``past`` is what it held already."""

    def __init__(self, path: Path, asked: Asked, past: dict[tuple[Phase, int], Seen] | None = None) -> None:
        self.path, self._asked, self.past = path, asked, dict(past or {})
        self._lines = Lines(path, again=past is not None)
        if past is None:
            self._lines.write({"kdafuzz-bisect": _SCHEMA, "asked": msgspec.to_builtins(asked)})

    def judged(self, phase: Phase, place: int, seen: Seen, outcome: Outcome) -> None:
        """Enter a judgement that is new."""
        if (phase, place) in self.past:
            return
        self.past[phase, place] = seen
        failure = next((run.failure for run in seen.runs if run.failure), "")
        summary = {"verdict": outcome.kind, "why": outcome.why, "ratio": seen.ratio, "signature": failure}
        head = {"phase": phase, "place": place, "item": self._asked.history.items[place].name}
        self._lines.write({**head, **summary, "seconds": seen.seconds, "seen": msgspec.to_builtins(seen)})

    def ended(self, result: Result) -> None:
        """Enter what came out."""
        names = [item.name for item in self._asked.history.items]
        self._lines.write(
            {
                "first": result.new,
                "candidates": [names[place] for place in result.candidates],
                "parents": [names[place] for place in result.boundary],
                "steps": result.steps,
                "skips": len(result.skips),
                "doubts": list(result.doubts),
            }
        )

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def new_path(folder: Path, name: str) -> Path:
    """Where the log of a bisection that starts now goes."""
    return logs.new_path(folder, name)


def latest(folder: Path) -> Path:
    """The log of the bisection that was started last."""
    return logs.latest(folder, "bisection")


def read_log(path: Path) -> tuple[Asked, dict[tuple[Phase, int], Seen]]:
    """What was asked and what was judged; ``UnavailableError`` in one line if it cannot be used."""
    with reading(path) as values:
        asked = _asked(values)
        if asked.case.captured is not None:
            read_sidecar(Path(asked.sidecar), asked.case.captured.digest)
        entries = [value for value in values[1:] if "phase" in value]
        past = {(entry["phase"], entry["place"]): msgspec.convert(entry["seen"], Seen) for entry in entries}
    return asked, past


def _asked(values: list[Any]) -> Asked:
    if not values or values[0].get("kdafuzz-bisect") != _SCHEMA:
        raise ValueError("not the log of a bisection of this kdafuzz")
    return msgspec.convert(values[0]["asked"], Asked)
