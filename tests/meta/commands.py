"""Running the ``kdafuzz`` command in tests: in this process, or as a user does."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ci.cli import main
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.codec import SCHEMA, CaseFile
from oracle.values import checksum

CALL: dict[str, Any] = {
    "heads": 1,
    "key_dim": 4,
    "value_dim": 4,
    "window": 2,
    "pool": 3,
    "qlens": (2, 1),
    "slots": (1, 2),
    "ids": (0, 1),
    "capacity": 2,
}
CASE = Case(call=Verify(**CALL))
ZOO = Path(__file__).with_name("zoo.py")
CI_VARIABLES = (
    "CI",
    "GITHUB_ACTIONS",
    "GITLAB_CI",
    "TF_BUILD",
    "BUILDKITE",
    "CIRCLECI",
    "CIRRUS_CI",
    "CODEBUILD_BUILD_ID",
    "HEROKU_TEST_RUN_ID",
    "TEAMCITY_VERSION",
)
"""By which Hypothesis knows a CI machine."""


@dataclass(frozen=True)
class Result:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str


def entry(**fields: Any) -> CaseFile:
    """A sound case file with some fields replaced."""
    plain: dict[str, Any] = {"kdafuzz": SCHEMA, "case": CASE, "checksum": checksum(CASE), "why": "a test"}
    return CaseFile(**plain | fields)


def at_a_desk() -> dict[str, str]:
    """The environment without what pytest, Hypothesis and the suite make something else of.

    On a CI machine, or inside another run of pytest, a run that a test starts would draw other
    examples and print longer lines.
    """
    apart = (*CI_VARIABLES, "BUILD_NUMBER", "COLUMNS", "KDAFUZZ_DATABASE")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in apart and not name.startswith("PYTEST_")
    }


def command_line(*arguments: str) -> list[str]:
    """The command as a list for subprocess."""
    return [sys.executable, "-P", "-m", "ci.cli", *arguments]


def kdafuzz(*arguments: str, cwd: Path, timeout: float = 120.0) -> Result:
    """Run the command in a process of its own."""
    done = subprocess.run(
        command_line(*arguments), cwd=cwd, capture_output=True, timeout=timeout, check=False, text=True
    )
    return Result(done.returncode, done.stdout, done.stderr)


def here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cwd: Path, *arguments: str
) -> Result:
    """Run the command's entry point in this process, in the folder ``cwd``."""
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", ["kdafuzz", *arguments])
    capsys.readouterr()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        signal.signal(signal.SIGTERM, before)
    said = capsys.readouterr()
    return Result(int(str(ended.value.code)), said.out, said.err)


def plug_in(folder: Path, name: str = "zoo_outside") -> str:
    """Copy the zoo into ``folder`` as a module of this name; returns the name."""
    shutil.copy(ZOO, folder / f"{name}.py")
    return name


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with a file's bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


def processes_of(folder: Path) -> list[int]:
    """Living processes whose working directory is ``folder``: a run's own, wherever they hang."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                inside = (entry / "cwd").readlink() == folder
                inside &= b"resource_tracker" not in (entry / "cmdline").read_bytes()
                alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            except OSError:
                continue
            if inside and alive and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def gone(folder: Path, seconds: float = 5.0) -> bool:
    """Whether every process of a run ends within some seconds."""
    end = time.monotonic() + seconds
    while processes_of(folder) and time.monotonic() < end:
        time.sleep(0.1)
    return not processes_of(folder)
