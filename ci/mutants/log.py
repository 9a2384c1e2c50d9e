"""The log of a run of mutants: one JSON value a line, so that the run can go on after any end.

First what was asked and the digests of what was mutated, then each outcome as it came. A line counts
once its newline is there.
"""

from pathlib import Path

import msgspec

from ci.logs import Lines, reading
from ci.mutants.judging import Outcome

_SCHEMA = 1


class Asked(msgspec.Struct, frozen=True):
    """What a run was asked to do; ``digests`` are those of the subjects by name."""

    implementations: tuple[str, ...]
    operations: tuple[str, ...]
    device: str | None = None
    examples: int = 500
    count: int | None = None
    seed: int = 0
    timeout: float = 30.0
    palette: int | None = None
    baseline: bool = False
    with_listed: bool = False
    only: tuple[str, ...] = ()
    digests: dict[str, str] = {}


class Log:
    """The log of a run that is going on; ``past`` holds the outcomes it had already, by id."""

    def __init__(self, path: Path, asked: Asked, past: dict[tuple[str, str], Outcome] | None = None) -> None:
        self.path, self.past = path, dict(past or {})
        self._lines = Lines(path, again=past is not None)
        if past is None:
            self._lines.write({"kdafuzz-mutants": _SCHEMA, "asked": msgspec.to_builtins(asked)})

    def add(self, implementation: str, outcome: Outcome) -> None:
        """Enter an outcome."""
        self.past[implementation, outcome.id] = outcome
        self._lines.write({"implementation": implementation, "outcome": msgspec.to_builtins(outcome)})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_log(path: Path) -> tuple[Asked, dict[tuple[str, str], Outcome]]:
    """What was asked and what came of it; ``UnavailableError`` in one line if it cannot be used."""
    with reading(path) as values:
        if not values or values[0].get("kdafuzz-mutants") != _SCHEMA:
            raise ValueError("not the log of a run of mutants of this kdafuzz")
        asked = msgspec.convert(values[0]["asked"], Asked)
        past = {}
        for value in values[1:]:
            outcome = msgspec.convert(value["outcome"], Outcome)
            past[str(value["implementation"]), outcome.id] = outcome
    return asked, past
