"""Kills parts of a fuzzing run at random moments, and sees whether anything is lost.

    python -m tests.meta.kills --moments 20 --seed 1

A moment is a run of a kernel with planted faults, of which at some point a kernel's process, a
worker or the whole run is killed outright. Whatever failing case the log had by then must be on
disk, and the run, resumed if it was killed itself, must end with the cases (by digest) and failing
cases of a run that nobody disturbed.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ci.runlog import latest, read_log
from oracle.codec import read
from tests.meta.commands import command_line, gone, plug_in, processes_of

SAVE = Path(".kdafuzz/failures")
IMPLEMENTATION = "zoo_outside:large"
WHOM = ("kernel", "worker", "run")
ENDED = r"seed \d+; cases: (.+)"


@dataclass(frozen=True)
class Outcome:
    """What a run came to: its digest, and the ids of its failing cases."""

    digest: str
    failing: frozenset[str]
    told: bool = field(compare=False)
    """Whether the run says that a kernel's process was killed."""


def arguments(examples: int, seed: int) -> list[str]:
    """The run that is disturbed, or not."""
    return [
        *("--impl", IMPLEMENTATION, "--op", "verify", "--device", "cpu", "--jobs", "2", "--keep-going"),
        *("--examples", str(examples), "--seed", str(seed), "--save", str(SAVE)),
    ]


def start(folder: Path, *given: str) -> "subprocess.Popen[str]":
    """A run in the background."""
    return subprocess.Popen(
        command_line("fuzz", *given),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )


def outcome(folder: Path, said: str) -> Outcome:
    """What a run that ended by itself came to."""
    found = re.search(ENDED, said)
    assert found, said
    failing = {path.stem.rpartition("-")[2] for path in (folder / SAVE / "verify").glob("*.json")}
    told = re.search(r"(stopped: .*loading failed|^  crash): the process died of SIGKILL", said, re.M)
    return Outcome(found[1], frozenset(failing), told is not None)


def undisturbed(folder: Path, asked: Sequence[str]) -> tuple[Outcome, float]:
    """The run as it should be, and its seconds."""
    begin = time.monotonic()
    running = start(folder, *asked)
    said, _ = running.communicate()
    return outcome(folder, said), time.monotonic() - begin


def lost(folder: Path) -> list[str]:
    """Failing cases that the log speaks of and that are not on disk, or not whole."""
    missing = []
    for _, path in read_log(latest(folder / SAVE)).failures.values():
        try:
            read(path)
        except ValueError as error:
            missing.append(str(error))
    return missing


def disturbed(
    folder: Path, asked: Sequence[str], whom: str, wait: Callable[[], None]
) -> tuple[Outcome, list[str]]:
    """The run with one kill when ``wait`` returns; and what was lost by it."""
    running = start(folder, *asked)
    wait()
    _kill(running, folder, whom)
    said, _ = running.communicate()
    missing = lost(folder) if list((folder / SAVE / "runs").glob("*.jsonl")) else []
    if running.returncode == -signal.SIGKILL:
        assert gone(folder, 30.0), "a process of a killed run lives on"  # one that starts sees it late
        logged = list((folder / SAVE / "runs").glob("*.jsonl"))
        again = ["--resume", "latest", "--save", str(SAVE)] if logged else asked
        said, _ = start(folder, *again).communicate()
    return outcome(folder, said), missing


def same(found: Outcome, wanted: Outcome, whom: str) -> bool:
    """Whether a kill made no difference but what it must, if it hit a kernel's process.

    That is a crash of its case, which passes when it is run again: one more failing case. Where nothing had
    failed yet, it ends that part of the search, and while it loads, that row; the table says so.
    """
    if whom == "kernel" and found.digest != wanted.digest:
        return found.told
    return found == wanted or (whom == "kernel" and found.failing >= wanted.failing)


def _kill(running: "subprocess.Popen[str]", folder: Path, whom: str) -> None:
    """One process of the kind; the run itself if there is none at the moment."""
    mark = {"kernel": b"ci.child", "worker": b"spawn_main"}.get(whom)
    others = [pid for pid in processes_of(folder) if mark is not None and mark in _command(pid)]
    os.kill(random.choice(others) if others else running.pid, signal.SIGKILL)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def main() -> None:
    """Print a line a moment, and what went wrong; exit 1 if anything did."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--examples", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    random.seed(given.seed)
    asked = arguments(given.examples, given.seed)
    with tempfile.TemporaryDirectory() as name:
        plug_in(Path(name))
        wanted, seconds = undisturbed(Path(name), asked)
    print(f"undisturbed: {seconds:.1f} s, {wanted}", flush=True)
    wrong = 0
    for moment in range(given.moments):
        whom, delay = WHOM[moment % len(WHOM)], random.uniform(0.5, seconds)
        with tempfile.TemporaryDirectory() as name:
            plug_in(Path(name))
            found, missing = disturbed(Path(name), asked, whom, partial(time.sleep, delay))
        right = same(found, wanted, whom)
        wrong += not right or bool(missing)
        came = f"{'same' if right else found}; lost: {missing or 'nothing'}"
        print(f"{moment + 1:3} {whom:6} after {delay:5.1f} s: {came}", flush=True)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
