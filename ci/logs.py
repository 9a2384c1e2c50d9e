"""Logs of runs that go on after any end: JSON, one value a line, which counts once its newline is there."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from impl.contract import UnavailableError, one_line


class Lines:
    """A log that is written to: a new one, or, ``again``, one that is cut to its whole lines first."""

    def __init__(self, path: Path, *, again: bool) -> None:
        if again:
            whole = path.read_bytes().rpartition(b"\n")[0] + b"\n"
            with path.open("r+b") as file:
                file.truncate(len(whole))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("a" if again else "x", encoding="utf-8")

    def write(self, value: dict[str, Any]) -> None:
        """Enter a value."""
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def new_path(folder: Path, words: str = "") -> Path:
    """Where the log of a run that starts now goes: names sort by time."""
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + f"-{time.time_ns() // 1_000_000 % 1000:03d}"
    return folder / f"{'-'.join(filter(None, (moment, words)))}.jsonl"


def latest(folder: Path, run: str) -> Path:
    """The log of the ``run`` that was started last in ``folder``."""
    logs = sorted(folder.glob("*.jsonl"))
    if not logs:
        raise UnavailableError(f"no {run} to resume in {folder}; give the path of its log")
    return logs[-1]


@contextmanager
def reading(path: Path) -> Iterator[list[Any]]:
    """The values of a log's whole lines; what cannot be made of them is ``UnavailableError`` in one line."""
    try:
        lines = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
        yield [json.loads(line) for line in lines]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnavailableError(f"cannot resume {path}: {one_line(error) or type(error).__name__}") from None
