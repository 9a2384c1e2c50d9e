"""What a fuzzing run has done so far, as a file that outlives it: so that it can go on after any end.

One JSON value a line: first what the run was asked to do, then what came, in order. A line counts
once its newline is there; what a killed run wrote last may be half a line, and is dropped.
"""

import fcntl
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from ci import logs
from ci.failures import case_id
from ci.search import Failure, Tally
from ci.worker import Options, Shard
from impl.contract import UnavailableError
from oracle.case import Case
from oracle.judge import Verdict

FOLDER = "runs"
"""Where logs lie in the folder of failing cases."""
KEPT = 20
"""Logs of earlier runs that stay there."""
_SCHEMA = 1


@dataclass
class Past:
    """What a log tells: options, versions, what each finished shard did, and what failed.

    ``versions`` are those of the implementations, with what else a verdict hangs on beside the options.
    ``failures`` holds, by shard, the smallest failing case so far and where it was saved;
    ``seconds`` is how long the run ran.
    """

    options: Options
    no_known: bool
    versions: dict[str, str]
    shards: dict[Shard, Tally] = field(default_factory=dict)
    failures: dict[Shard, tuple[Failure, Path]] = field(default_factory=dict)
    seconds: float = 0.0


class RunLog:
    """The log of a run that is going on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = path.parent.parent
        self._file: IO[str] | None = None
        self._start = time.monotonic()

    def begin(self, options: Options, versions: dict[str, str], *, no_known: bool) -> None:
        """Start a new log; those of runs long past are removed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for old in sorted(self.path.parent.glob("*.jsonl"))[: -KEPT + 1]:
            old.unlink(missing_ok=True)
        self._file = self.path.open("x", encoding="utf-8")
        self._hold()
        asked = asdict(options) | {"save": str(options.save.absolute()), "known": []}
        self._write({"kdafuzz": _SCHEMA, "options": asked, "no_known": no_known, "versions": versions})

    def resume(self, past: Past) -> None:
        """Go on with a log; ``UnavailableError`` if its run still does."""
        self._file = self.path.open("a", encoding="utf-8")
        self._hold()
        whole = self.path.read_bytes().rpartition(b"\n")[0] + b"\n"
        self._file.truncate(len(whole))
        self._start = time.monotonic() - past.seconds

    def _hold(self) -> None:
        """Have the log for this process alone, as long as it lives."""
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UnavailableError(f"cannot resume {self.path}: its run is still going on") from None
        except OSError:
            pass  # a file system without locks

    def done(self, shard: Shard, tally: Tally) -> None:
        """A shard was searched to its end."""
        self._write({"shard": asdict(shard), "tally": asdict(tally)})

    def failed(self, shard: Shard, failure: Failure, path: Path) -> None:
        """A shard has a failing case, or a smaller one."""
        entry = {
            "case": msgspec.to_builtins(failure.case),
            "verdict": asdict(failure.verdict),
            "shrunk": failure.shrunk,
            "flaky": failure.flaky,
        }
        self._write({"shard": asdict(shard), "failure": entry, "path": str(_below(self._folder, path))})

    def _write(self, value: dict[str, Any]) -> None:
        if self._file is None:
            return
        value["seconds"] = round(time.monotonic() - self._start, 3)
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def new_path(save: Path, seed: int) -> Path:
    """Where the log of a run that starts now goes."""
    return logs.new_path(save / FOLDER, str(seed))


def latest(save: Path) -> Path:
    """The log of the run that was started last."""
    return logs.latest(save / FOLDER, "run")


def read_log(path: Path) -> Past:
    """Read a log; ``UnavailableError`` in one line if it cannot be used."""
    with logs.reading(path) as values:
        first = _first(values)
        past = Past(
            _options(first["options"]),
            msgspec.convert(first["no_known"], bool),
            msgspec.convert(first["versions"], dict[str, str]),
        )
        for value in values[1:]:
            _take(past, value, path.parent.parent)
        past.seconds = max(msgspec.convert(value["seconds"], float) for value in values)
    return past


def _first(values: list[Any]) -> dict[str, Any]:
    if not values or not isinstance(values[0], dict) or values[0].get("kdafuzz") != _SCHEMA:
        raise ValueError("not the log of a run of this kdafuzz")
    return values[0]


def _options(given: dict[str, Any]) -> Options:
    return msgspec.convert(given | {"save": Path(given["save"])}, Options)


def _take(past: Past, value: dict[str, Any], folder: Path) -> None:
    shard = msgspec.convert(value["shard"], Shard)
    if (
        shard.implementation not in past.options.implementations
        or shard.operation not in past.options.operations
    ):
        raise ValueError(
            f"a part of it is of {shard.implementation} {shard.operation}, which it was not asked for"
        )
    if "tally" in value:
        past.shards[shard] = msgspec.convert(value["tally"], Tally)
    else:
        given = value["failure"]
        case, verdict = msgspec.convert(given["case"], Case), msgspec.convert(given["verdict"], Verdict)
        shrunk, flaky = (msgspec.convert(given[name], bool) for name in ("shrunk", "flaky"))
        past.failures[shard] = Failure(case, verdict, shrunk, flaky), folder / value["path"]


def _below(folder: Path, path: Path) -> Path:
    """The path as one below the folder: both may move, or be given in another way when a run is resumed."""
    return path.relative_to(folder) if path.is_relative_to(folder) else path.absolute()


def unfinished(past: Past) -> dict[Shard, tuple[Failure, Path]]:
    """Failing cases of shards that were cut short: those will be searched again."""
    return {shard: found for shard, found in past.failures.items() if shard not in past.shards}


def describe(past: Past) -> str:
    """One line on what is there already."""
    examples = sum(tally.examples for tally in past.shards.values())
    cases = sorted({case_id(failure.case) for failure, _ in past.failures.values()})
    failing = f", {len(cases)} failing cases ({', '.join(cases)})" if cases else ""
    return f"{examples} examples in {len(past.shards)} finished parts{failing}"
