"""Profiles have the settings that their page promises, on any machine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import SkipTest

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase, MultiplexedDatabase

from tests.meta.commands import at_a_desk
from tests.profiles import dev, repro

ALL = ["explicit", "reuse", "generate", "target", "shrink", "explain"]
EVERY = {"deadline": None, "print_blob": False, "unchecked": len(list(hypothesis.HealthCheck))}
FOLDER = ["DirectoryBasedExampleDatabase", ".hypothesis/examples"]
TABLE: dict[str, dict[str, Any]] = {
    "dev": {"max_examples": 25, "derandomize": False, "database": FOLDER, "phases": ALL},
    "ci": {"max_examples": 100, "derandomize": True, "database": None, "phases": ALL},
    "nightly": {"max_examples": 200, "derandomize": False, "database": FOLDER, "phases": ALL},
    "repro": {
        "max_examples": 10_000,
        "derandomize": False,
        "database": FOLDER,
        "phases": ["explicit", "reuse"],
    },
}
PRINTING = """
import json
import os
from pathlib import Path

from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase


def shown():
    chosen = settings()
    folder = chosen.database
    if folder is not None:
        assert isinstance(folder, DirectoryBasedExampleDatabase)
        folder = ["DirectoryBasedExampleDatabase", os.path.relpath(folder.path)]
    return {
        "max_examples": chosen.max_examples,
        "derandomize": chosen.derandomize,
        "database": folder,
        "phases": [phase.name for phase in chosen.phases],
        "deadline": chosen.deadline,
        "print_blob": chosen.print_blob,
        "unchecked": len(chosen.suppress_health_check),
    }


def test_print():
    found = {"chosen": settings.get_current_profile_name(), "settings": shown()}
    for name in ("dev", "ci", "nightly", "repro"):
        settings.load_profile(name)
        found[name] = shown()
    Path("found.json").write_text(json.dumps(found))
"""


def pytest_run(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in ``folder``, on a machine with these variables."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env=at_a_desk() | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def borrow_conftest(folder: Path) -> None:
    """Have the suite's own conftest in a folder."""
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "pytest.ini").write_text("[pytest]\n")


@pytest.mark.parametrize(
    ("environment", "options", "chosen"),
    [
        pytest.param({}, [], "dev", id="at-a-desk"),
        pytest.param({"CI": "true"}, [], "ci", id="CI"),
        pytest.param({"GITHUB_ACTIONS": "true"}, [], "dev", id="GITHUB_ACTIONS-alone"),
        pytest.param(
            {"CI": "true", "GITHUB_ACTIONS": "true"},
            ["--hypothesis-profile", "nightly"],
            "nightly",
            id="nightly-on-GitHub",
        ),
    ],
)
def test_effective_settings(
    tmp_path: Path, environment: dict[str, str], options: list[str], chosen: str
) -> None:
    """Hypothesis's own profile for CI machines changes nothing of ours."""
    (tmp_path / "test_print.py").write_text(PRINTING)
    borrow_conftest(tmp_path)
    ran = pytest_run(tmp_path, *options, **environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    table = {name: row | EVERY for name, row in TABLE.items()}
    assert found == {"chosen": chosen, "settings": table[chosen], **table}


def run(profile: hypothesis.settings, *wrong: str) -> None:
    """A property of integers that may have two faults; ``wrong`` says which there are."""

    @profile
    @hypothesis.given(st.integers(-5000, 5000))
    def holds(x: int) -> None:
        if x > 100 and "high" in wrong:
            raise ValueError(x)
        if x < -100 and "low" in wrong:
            raise TypeError(x)

    try:
        holds()
    except SkipTest:  # what Hypothesis raises where no example was run
        pytest.fail("nothing was replayed")


@pytest.mark.parametrize(("left", "error"), [("high", ValueError), ("low", TypeError)])
def test_repro_comes_to_what_still_fails(left: str, error: type[Exception]) -> None:
    """Whichever of two remembered examples passes by now, the other one is replayed."""
    high, low = InMemoryExampleDatabase(), InMemoryExampleDatabase()
    with pytest.raises(ValueError, match=r"^101\b"):
        run(hypothesis.settings(dev(high), max_examples=1000), "high")
    with pytest.raises(TypeError, match=r"^-101\b"):
        run(hypothesis.settings(dev(low), max_examples=1000), "low")
    with pytest.raises(error, match=r"^-?101\b"):
        run(repro(MultiplexedDatabase(high, low)), left)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        pytest.param(
            ["--hypothesis-profile", "ci", "--database", "shared"],
            "ERROR: --database is of no use where nothing is remembered: the profile ci draws",
            id="ci-remembers-nothing",
        ),
        pytest.param(
            ["--hypothesis-seed", "3", "--database", "shared"],
            "ERROR: --database is of no use where nothing is remembered: with --hypothesis-seed",
            id="a-seed-remembers-nothing",
        ),
        pytest.param(
            ["--hypothesis-profile", "nosuch"],
            "ERROR: Profile 'nosuch' is not registered",
            id="unknown-profile",
        ),
        pytest.param(
            ["--database", "http://somewhere"],
            "ERROR: unknown database 'http://somewhere'; a database is a folder, or redis://..",
            id="unknown-database",
        ),
    ],
)
def test_a_wrong_option_is_one_sentence(tmp_path: Path, options: list[str], sentence: str) -> None:
    borrow_conftest(tmp_path)
    ran = pytest_run(tmp_path, *options)
    said = (ran.stdout + ran.stderr).strip()
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR, said
    assert said.startswith(sentence)
    assert "\n" not in said
    assert not (tmp_path / "shared").exists()


def test_corpora_come_first() -> None:
    """Saved cases run before any property, and no other test of an implementation changes its place."""
    files = [f"tests/test_{name}.py" for name in ("conv", "corpora", "verify")]
    root = Path(__file__).parents[2]
    ran = pytest_run(root, "--collect-only", "-n", "0", "--impl", "triton,other", *files)
    modules = [line.partition("::")[0] for line in ran.stdout.splitlines() if "::" in line]
    corpora = modules.count("tests/test_corpora.py")
    assert corpora > 10
    assert set(modules[:corpora]) == {"tests/test_corpora.py"}
    assert [name for n, name in enumerate(modules) if n == 0 or name != modules[n - 1]] == [
        "tests/test_corpora.py",
        *["tests/test_conv.py", "tests/test_verify.py"] * 2,
    ]


ORDERED = """
import pytest

def test_plain(): pass

@pytest.mark.slow
def test_slow(): pass
"""


def test_saved_cases_come_first_then_implementations_then_slow_files(tmp_path: Path) -> None:
    """No worker is left alone with what takes long, and the tests of a file stay together."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    borrow_conftest(tmp_path)
    (tmp_path / "test_a.py").write_text("def test_plain(): pass\n")
    (tmp_path / "test_b.py").write_text(ORDERED)
    (tmp_path / "test_c.py").write_text(
        "import pytest\n\n@pytest.fixture\ndef case_file(): pass\n\ndef test_saved(case_file): pass\n"
    )
    (tmp_path / "test_d.py").write_text("def test_property(subject): pass\n")
    done = pytest_run(tmp_path, "--collect-only")
    assert done.returncode == 0, done
    found = [line for line in done.stdout.splitlines() if "::" in line]
    assert found == [
        "test_c.py::test_saved",
        "test_d.py::test_property[triton]",
        "test_b.py::test_plain",
        "test_b.py::test_slow",
        "test_a.py::test_plain",
    ]
