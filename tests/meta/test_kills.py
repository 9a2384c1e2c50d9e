"""A run that is killed in part or as a whole comes to what an undisturbed one does; a short ``kills.py``."""

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ci.failures import load
from tests.meta.calls import verify_of
from tests.meta.commands import gone, kdafuzz, plug_in, tree
from tests.meta.kills import SAVE, WHOM, Outcome, disturbed, outcome, same

ASKED = (
    *("--impl", "zoo_outside:large", "--op", "verify", "--device", "cpu", "--jobs", "1", "--keep-going"),
    *("--examples", "101", "--seed", "1", "--save", str(SAVE)),
)
"""Two parts: one that finds something and shrinks it, and one of a single example."""


@dataclass(frozen=True)
class Undisturbed:
    """A run, where it ran, and what it came to."""

    folder: Path
    said: str
    rows: list[dict[str, Any]]
    outcome: Outcome


def facts(path: Path) -> list[dict[str, Any]]:
    """What a run wrote of itself, but how fast it was, and in which order its parts came."""
    rows = json.loads(path.read_text())["rows"]
    for row in rows:
        del row["rate"]
        row["tally"]["ratios"].sort()
    return rows  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The run as it should be."""
    folder = tmp_path_factory.mktemp("undisturbed")
    plug_in(folder)
    done = kdafuzz("fuzz", *ASKED, "--json", "told.json", cwd=folder)
    assert (done.code, done.err) == (1, "")
    return Undisturbed(folder, done.out, facts(folder / "told.json"), outcome(folder, done.out))


def lines(said: str) -> list[str]:
    """What a run said below its table."""
    return said.partition("└")[2].splitlines()[1:]


def test_a_finished_run_has_nothing_left_to_do(undisturbed: Undisturbed) -> None:
    """It says what it said, with the same end; nothing is judged, and no file changes."""
    before = tree(undisturbed.folder / SAVE)
    again = kdafuzz(
        "fuzz", "--resume", "latest", "--save", str(SAVE), "--json", "again.json", cwd=undisturbed.folder
    )
    assert (again.code, again.err) == (1, "")
    assert lines(again.out) == lines(undisturbed.said)
    assert facts(undisturbed.folder / "again.json") == undisturbed.rows
    assert tree(undisturbed.folder / SAVE) == before
    assert re.search(
        r"^resumed from \S+: \d+ examples in 2 finished parts, 1 failing cases \(", again.out, re.M
    )


def shrinks(folder: Path) -> None:
    """Wait until a run has found something that can be smaller."""
    end = time.monotonic() + 100.0
    while not any('"failure"' in path.read_text() for path in (folder / SAVE / "runs").glob("*.jsonl")):
        assert time.monotonic() < end, tree(folder).keys()
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("whom", WHOM)
def test_a_kill_loses_nothing(undisturbed: Undisturbed, tmp_path: Path, whom: str) -> None:
    """Of a kernel's process, a worker, or the run, which is resumed, while a failing case is being shrunk."""
    plug_in(tmp_path)
    found, missing = disturbed(tmp_path, ASKED, whom, lambda: shrinks(tmp_path))
    assert missing == []
    assert same(found, undisturbed.outcome, whom), found
    assert gone(tmp_path)


DEADLY = """
import os, signal
from pathlib import Path
from zoo_outside import _made

def parent(pid): return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

def deadly():
    def step(given, out):
        if out.shape[2] > 1:
            os.kill(parent(os.getppid()), signal.SIGKILL)
        return out
    return _made(step)
"""


@pytest.mark.slow
def test_a_case_that_kills_its_worker(tmp_path: Path) -> None:
    """It is named, as soundly as any that failed; its row ends, and the others do not."""
    plug_in(tmp_path)
    (tmp_path / "deadly_outside.py").write_text(DEADLY)
    names = "deadly_outside:deadly,zoo_outside:right"
    asked = ("--impl", names, "--op", "verify", "--device", "cpu", "--examples", "20", "--seed", "1")
    done = kdafuzz("fuzz", *asked, "--jobs", "1", "--json", "told.json", cwd=tmp_path)
    told = re.search(
        r"deadly verify stopped: 3 workers .*; the last while it judged (\S+): .* SIGKILL$", done.err
    )
    assert told, done
    assert done.code == 2
    entry = load(tmp_path / told[1])
    assert verify_of(entry.case).heads > 1
    assert entry.checksum
    assert (
        done.out.count("a worker was lost (the process died of SIGKILL); another one does its part again")
        == 2
    )
    rows = json.loads((tmp_path / "told.json").read_text())["rows"]
    assert [row["tally"]["examples"] for row in rows] == [0, 20]
    assert gone(tmp_path)
