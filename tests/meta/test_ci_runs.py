"""What pytest runs tell CI, with workers and without: JUnit properties, the summary, and demands."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from ci.reporting.demands import MIN_EXAMPLES, REQUIRE_GPU
from ci.reporting.publish import BUILDKITE, GITHUB
from tests.meta.ci_reports import fences, inline, rows
from tests.meta.commands import at_a_desk, plug_in

pytest_plugins = "pytester"
REPOSITORY = Path(__file__).resolve().parents[2]
PLUG_IN = """
from dataclasses import replace
import zoo_outside

def large(): return replace(zoo_outside.large(), version="2.5")
"""


def run(
    folder: Path, environment: dict[str, str], *arguments: str, cwd: Path = REPOSITORY
) -> tuple[int, str]:
    """A pytest run in a process of its own, in which ``folder`` is on the path."""
    inherited = at_a_desk()
    paths = (str(folder), *filter(None, [inherited.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments],
        cwd=cwd,
        env=inherited | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_worker_reports_to_the_controller(tmp_path: Path) -> None:
    """Every property test's properties are in the JUnit file, and their sums in the summary."""
    plug_in(tmp_path)
    (tmp_path / "report_outside.py").write_text(PLUG_IN)
    name, junit, saved = "report_outside:large", tmp_path / "junit.xml", tmp_path / "saved"
    options = ["--impl", name, "--device", "cpu", "-n", "1", "--hypothesis-seed", "2"]
    options += ["--junitxml", str(junit), "--save-failures", str(saved)]
    tests = ["tests/test_verify.py", "tests/test_fused_verify.py"]
    options += ["-k", "no-rows or differential or forty-rows or one-by-one or one-head"]
    environment = {GITHUB: str(tmp_path / "sum.md"), BUILDKITE: "true", MIN_EXAMPLES: "1000"}
    code, said = run(tmp_path, environment, *options, *tests)
    assert code == 1, said

    cases = list(ElementTree.parse(junit).iter("testcase"))  # noqa: S314 (it is ours)
    properties = {
        case.get("name"): {item.get("name"): item.get("value") or "" for item in case.iter("property")}
        for case in cases
        if case.get("classname") == "tests.test_verify"
    }
    failing = properties.pop(f"test_differential[{name}]")
    assert len(properties) == 3
    common = {"implementation": name, "version": "2.5", "device": "cpu", "profile": "dev", "seed": "2"}
    for passing in properties.values():
        assert passing.items() >= {**common, "operation": "verify", "examples": "1", "known": "0"}.items()
        assert 0.0 <= float(passing["largest_ratio"]) <= 1.0
        assert float(passing["seconds"]) > 0.0
        assert not passing.keys() & {"case", "replay", "absent", "stale", "gpu"}
    assert failing.items() >= common.items()
    assert 1 <= int(failing["examples"]) <= 25
    (case,) = saved.rglob("*.json")
    assert failing["case"] == str(case)
    assert failing["replay"] == f"kdafuzz replay {case} --impl {name} --device cpu"
    absent = [case for case in cases if case.get("classname") == "tests.test_fused_verify"]
    assert absent
    assert all(item.find("skipped") is not None for item in absent)
    assert all("absent" in {found.get("name") for found in item.iter("property")} for item in absent)

    report = (tmp_path / "sum.md").read_text()
    verify, fused = rows(report)[1:]
    assert verify[:3] == [f"{name} (2.5)", "verify", str(3 + int(failing["examples"]))]
    assert verify[5:] == ["0", "1", "-"]
    assert fused == [f"{name} (2.5)", "fused_verify", *["-"] * 5, str(len(absent))]
    (failure,) = fences(report)
    assert failing["replay"] in [line.strip() for line in failure.splitlines()]
    unmet = f"{name} verify judged {verify[2]} examples; {MIN_EXAMPLES} asks for 1000"
    assert unmet in inline(report)
    assert [line for line in said.splitlines() if MIN_EXAMPLES in line] == [unmet]


CONFTEST = """
import torch, pytest
from ci.query import Offer
from ci.reporting import plugin
from ci.reporting.record import Record
from oracle.judge import Verdict

OFFER = Offer("1.0", gpu="GPU X", gpu_uuid="GPU-0")

def pytest_addoption(parser):
    parser.addoption("--subjects", default="a")
    plugin.add_options(parser.getgroup("kdafuzz"))

def pytest_configure(config):
    names = config.getoption("--subjects").split(",")
    plugin.register(config, names, lambda name: OFFER, Record(device="cuda", profile="p", seed="s"))

def pytest_generate_tests(metafunc):
    if "subject" in metafunc.fixturenames:
        names = metafunc.config.getoption("--subjects").split(",")
        metafunc.parametrize("subject", names, indirect=True, scope="session")

@pytest.fixture
def subject(request):
    reporter = plugin.reporter(request.config)
    reporter.check_device("cuda")
    def judge(count):
        reporter.ledger.needs("verify", "")
        for _ in range(count):
            reporter.ledger.judged(Verdict(0.5), 0.1, known=False)
    return judge
"""
TESTS = """
import os, pytest

def test_plain(): pass
def test_skipped(): pytest.skip("needs x; found y")
def test_expected(): pytest.xfail("known")
def test_idle(subject): subject(0)
def test_judging(subject): subject(3)
def test_more(subject): subject(4)
def test_leaves(subject): pytest.skip("needs z; found none")
def test_environment(): assert not {names} & os.environ.keys()
"""
FAKE_GPU = """
import os, torch
torch.cuda.is_available = lambda: "PYTEST_XDIST_WORKER" not in os.environ or "BLIND" not in os.environ
"""


@pytest.fixture
def small(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A small suite that reports as this one does, on a machine that says it has a GPU."""
    names = {REQUIRE_GPU, MIN_EXAMPLES, GITHUB, BUILDKITE}
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_small=TESTS.format(names=names), fake_gpu=FAKE_GPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(GITHUB, "sum.md")
    monkeypatch.setenv(BUILDKITE, "true")
    return pytester


def with_workers(small: pytest.Pytester, environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    return run(small.path, environment, "-p", "fake_gpu", "-rN", *arguments, cwd=small.path)


@pytest.mark.parametrize(
    ("chosen", "code", "reasons"),
    [
        ("skipped", 1, "needs x; found y"),
        ("idle or plain", 1, "none was chosen"),
        ("leaves or plain", 1, "needs z; found none"),
        ("nothing", 1, "none was chosen"),
        ("plain or environment", 0, ""),
        ("expected", 0, ""),
        ("judging or leaves or environment", 0, ""),
    ],
)
@pytest.mark.parametrize("option", [True, False])
def test_a_run_that_tested_nothing_is_an_error(
    small: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    chosen: str,
    code: int,
    reasons: str,
    option: bool,
) -> None:
    if not option:
        monkeypatch.setenv(REQUIRE_GPU, "1")
    told = f"{REQUIRE_GPU}=1 needs tests that run; found none that did: {reasons}"
    result = small.runpytest_inprocess("-k", chosen, *["--require-gpu"] * option)
    assert result.ret == code
    assert (told in result.outlines) == bool(code)
    report = (small.path / "sum.md").read_text()
    assert (told in inline(report)) == bool(code)
    assert f"kdafuzz, pytest: {'failed' if code else 'passed'}" in inline(report)
    assert ("GPU X (GPU-0)" in report.replace("&#45;", "-")) == any(
        w in chosen for w in ("judging", "leaves", "idle")
    )
    assert os.environ[GITHUB] == "sum.md"
    assert os.environ.get(REQUIRE_GPU, "") == ("" if option else "1")


def test_nothing_is_demanded_by_default(small: pytest.Pytester) -> None:
    assert small.runpytest_inprocess("-k", "skipped").ret == 0
    assert small.runpytest_inprocess("-k", "nothing").ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert small.runpytest_inprocess("--require-gpu", "--collect-only", "-k", "skipped").ret == 0


def test_a_missing_gpu_is_an_error(small: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any test, and with what asks for it left to be asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(REQUIRE_GPU, "1")
    result = small.runpytest_inprocess("-k", "plain")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line]
    assert line.startswith(f"ERROR: {REQUIRE_GPU}=1 needs a CUDA GPU; found none (torch ")
    assert os.environ[REQUIRE_GPU] == "1"
    assert not (small.path / "sum.md").exists()


def test_this_suite_refuses_before_its_workers_start(tmp_path: Path) -> None:
    arguments = ("-n", "2", "tests/test_verify.py", "--device", "cpu")
    code, said = run(tmp_path, {REQUIRE_GPU: "1", "CUDA_VISIBLE_DEVICES": ""}, *arguments)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert said.startswith(f"ERROR: {REQUIRE_GPU}=1 needs a CUDA GPU; found none")
    assert "bringing up nodes" not in said


def test_a_worker_without_the_gpu_fails(small: pytest.Pytester) -> None:
    """Its tests would fall back on the CPU."""
    result, said = with_workers(small, {"BLIND": "1"}, "-n", "1", "-k", "judging", "--require-gpu")
    assert result == 1
    assert f"{REQUIRE_GPU}=1 needs a CUDA GPU; found none" in said
    assert "1 error" in said


def test_workers_are_added_up(small: pytest.Pytester) -> None:
    """Also what they skipped, and the environment's demands reach no test."""
    chosen = ("-k", "judging or more or leaves or environment", "-n", "2", "--min-examples", "8")
    environment = {GITHUB: "sum.md", REQUIRE_GPU: "1", MIN_EXAMPLES: "1"}
    result, said = with_workers(small, environment, *chosen)
    assert result == 1
    assert f"a verify judged 7 examples; {MIN_EXAMPLES} asks for 8" in said
    assert "3 passed, 1 skipped" in said
    table = rows((small.path / "sum.md").read_text())
    assert table[1:] == [
        ["a (1.0)", "verify", "7", "10.0", "0.500", "0", "0", "-"],
        ["a (1.0)", "-", "-", "-", "-", "-", "-", "1"],
    ]


@pytest.mark.parametrize(
    ("arguments", "unmet"),
    [
        (("--subjects", "a,b", "--min-examples", "7"), []),
        (("--subjects", "b,a", "--min-examples", "8"), ["b verify judged 7", "a verify judged 7"]),
        (("--min-examples", "7", "-k", "judging or more or leaves"), []),
        (("--min-examples", "0"), []),
        ((), ["a verify judged 7"]),
        (("-k", "plain"), ["a (every operation) judged 0"]),
        (("-k", "idle"), ["a verify judged 0"]),
    ],
)
def test_too_few_examples_are_an_error(
    small: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], unmet: list[str]
) -> None:
    """For each implementation and operation; the option goes before the environment."""
    monkeypatch.setenv(MIN_EXAMPLES, "1000")
    result = small.runpytest_inprocess("-k", "judging or more", *arguments)
    assert result.ret == bool(unmet)
    pattern = re.compile(rf"^(.*) examples; {MIN_EXAMPLES} asks for \d+$")
    found = [match[1] for line in result.outlines if (match := pattern.match(line))]
    assert found == unmet


def test_other_failures_are_told(small: pytest.Pytester) -> None:
    """Of tests that are of no implementation, and of tests that cannot even start."""
    small.makepyfile(
        test_other="def test_wrong(): assert 'x' == '```'\n\ndef test_none(missing): pass\n",
        test_torn="import pytest\n@pytest.fixture\ndef torn(): yield; raise OSError('late')\n"
        "def test_it(torn): pass\n",
    )
    result = small.runpytest_inprocess("test_other.py", "test_torn.py")
    assert result.ret == 1
    wrong, none, late = fences((small.path / "sum.md").read_text())
    assert "'x' == '```'" in wrong
    assert "fixture 'missing' not found" in none
    assert "OSError: late" in late


def test_a_report_that_cannot_be_written_is_a_warning(
    small: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GITHUB, "no/such/folder/sum.md")
    result = small.runpytest_inprocess("-k", "plain")
    assert result.ret == 0
    assert [line for line in result.outlines if line.startswith(f"{GITHUB}: [Errno 2]")]
