"""The log of a run of mutants: one JSON value a line, so that the run can go on after any end.

First what was asked and the digests of what was mutated, then each outcome as it came. A line counts
once its newline is there.
"""

import json
import time
from pathlib import Path
from typing import IO, Any

import msgspec

from ci.mutants.judging import Outcome
from impl.contract import UnavailableError, one_line

FOLDER = Path(".kdafuzz/mutants")
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
        self._file: IO[str]
        if past is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("x", encoding="utf-8")
            self._write({"kdafuzz-mutants": _SCHEMA, "asked": msgspec.to_builtins(asked)})
        else:
            whole = path.read_bytes().rpartition(b"\n")[0] + b"\n"
            with path.open("r+b") as file:
                file.truncate(len(whole))
            self._file = path.open("a", encoding="utf-8")

    def add(self, implementation: str, outcome: Outcome) -> None:
        """Enter an outcome."""
        self.past[implementation, outcome.id] = outcome
        self._write({"implementation": implementation, "outcome": msgspec.to_builtins(outcome)})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, value: dict[str, Any]) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()


def new_path(folder: Path) -> Path:
    """Where the log of a run that starts now goes: names sort by time."""
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + f"-{time.time_ns() // 1_000_000 % 1000:03d}"
    return folder / f"{moment}.jsonl"


def latest(folder: Path) -> Path:
    """The log of the run that was started last."""
    logs = sorted(folder.glob("*.jsonl"))
    if not logs:
        raise UnavailableError(f"no run of mutants to resume in {folder}; give the path of its log")
    return logs[-1]


def read_log(path: Path) -> tuple[Asked, dict[tuple[str, str], Outcome]]:
    """What was asked and what came of it; ``UnavailableError`` in one line if it cannot be used."""
    try:
        lines = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
        values = [json.loads(line) for line in lines]
        if not values or values[0].get("kdafuzz-mutants") != _SCHEMA:
            raise ValueError("not the log of a run of mutants of this kdafuzz")  # noqa: TRY301
        asked = msgspec.convert(values[0]["asked"], Asked)
        past = {}
        for value in values[1:]:
            outcome = msgspec.convert(value["outcome"], Outcome)
            past[str(value["implementation"]), outcome.id] = outcome
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnavailableError(f"cannot resume {path}: {one_line(error) or type(error).__name__}") from None
    return asked, past
