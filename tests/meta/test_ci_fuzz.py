"""What ``kdafuzz fuzz`` tells CI, what CI may demand of it, and findings that are none any more."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ci import asked, campaign, stale
from ci.fuzz import Run
from ci.known import Known, read_known
from ci.reporting.demands import MIN_EXAMPLES, REQUIRE_GPU, Demands
from ci.reporting.fuzz import summary
from ci.reporting.publish import BUILDKITE, GITHUB
from ci.search import Failure
from ci.worker import Options
from impl.contract import UnavailableError
from oracle.judge import Problem, Verdict
from tests.meta.ci_reports import fences, inline, install_agent, rows, told
from tests.meta.commands import CASE, here, plug_in
from tests.meta.test_known import KNOWN, PLUG_IN, written

WRONG = Verdict(7.0, problems=(Problem("value", "out", "output"),))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder in CI, with an implementation and a finding in it."""
    install_agent(tmp_path, monkeypatch)
    plug_in(tmp_path)
    (tmp_path / "known_outside.py").write_text(PLUG_IN)
    path = written(tmp_path / "corpus", KNOWN)
    monkeypatch.setattr(asked, "read_known", lambda: read_known(path))
    monkeypatch.setattr(stale, "locate", lambda name: list((tmp_path / "corpus").rglob(f"*-{name}.json")))
    monkeypatch.setenv(GITHUB, str(tmp_path / "sum.md"))
    monkeypatch.setenv(BUILDKITE, "true")
    return tmp_path


@pytest.mark.slow
def test_fuzz_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    """The table, a failure with its replay line, what is not offered, and a finding that is none any more."""
    monkeypatch.setenv(MIN_EXAMPLES, "4")
    options = ("--op", "verify,commit", "--examples", "4", "--jobs", "1", "--device", "cpu")
    names = "known_outside:mended,known_outside:later"
    result = here(monkeypatch, capsys, folder, "fuzz", "--impl", names, *options)
    assert (result.code, result.err) == (1, "")
    report = (folder / "sum.md").read_text()
    mended, without, later, _ = [row[2:] for row in rows(report)[1:]]
    assert mended[0] == "4"
    assert mended[3:] == ["0", "0", "-"]
    assert without == ["-"] * 5 + ["1"]
    assert later[3:] == ["0", "1", "-"]
    assert "known_outside:mended commit: known_outside:mended does not offer commit" in inline(report)
    (failure,) = fences(report)
    assert "boom" in failure
    assert "\nkdafuzz replay .kdafuzz/failures/verify/known-outside-later-raised-" in failure
    (passes,) = [said for said in inline(report) if said.startswith("stale: ")]
    assert passes.startswith(f"stale: known_outside:mended (1.5) passes case {KNOWN.case}, which")
    assert f"warning: {passes}\n" in result.out
    ((arguments, annotated),) = told(folder)
    assert arguments == ["annotate", "--style", "error", "--context", "kdafuzz"]
    assert f"{annotated}\n" == report


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        (MIN_EXAMPLES, "few", f"{MIN_EXAMPLES} takes a number of examples; found 'few'"),
        (REQUIRE_GPU, "1", f"{REQUIRE_GPU}=1 needs a CUDA GPU; found none"),
    ],
)
def test_fuzz_refuses(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    variable: str,
    value: str,
    sentence: str,
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = here(monkeypatch, capsys, folder, "fuzz", "--impl", "known_outside:raises", "--device", "cpu")
    assert result.code == 2
    assert result.err.startswith(f"kdafuzz: {sentence}")
    assert result.err.count("\n") == 1
    assert not (folder / "sum.md").exists()


def fuzzed(examples: int, **row: object) -> Run:
    """A run of ``a`` on verify and commit, of which it has the first."""
    run = Run(Options(("a",), ("verify", "commit"), "cpu", seed=3), {"a": "1.0"}, {})
    run.rows["a", "commit"].absent = "absent in 1.0"
    first = run.rows["a", "verify"]
    first.tally.examples = examples
    for name, value in row.items():
        setattr(first, name, value)
    return run


def test_too_few_examples_are_no_success() -> None:
    """Not even of a run that found nothing; what failed has failed all the same."""
    failed = fuzzed(4, failures=[(Failure(CASE, WRONG), Path("x.json"))])
    problem = f"a verify judged 4 examples; {MIN_EXAMPLES} asks for 5"
    assert campaign._conclude(fuzzed(4), Demands(examples=4)) == 0
    assert campaign._conclude(failed, Demands(examples=5)) == 1
    with pytest.raises(UnavailableError, match=problem):
        campaign._conclude(fuzzed(4), Demands(examples=5))
    assert campaign._problem(fuzzed(4), Demands(examples=5), None) == problem
    assert campaign._problem(fuzzed(4), Demands(), None) == ""
    assert campaign._problem(fuzzed(4), Demands(), KeyboardInterrupt()) == "interrupted"


def test_a_summary_of_a_run() -> None:
    passed = summary(fuzzed(4), [], "")
    assert passed.ok
    assert passed.facts == ("device cpu", "100 examples each", "seed 3")
    assert not summary(fuzzed(4), [], "interrupted").ok
    failed = fuzzed(4, failures=[(Failure(CASE, WRONG), Path("x.json"))], stopped="no memory")
    whole = summary(failed, ["stale"], "")
    assert not whole.ok
    assert whole.stale == ["stale"]
    verify, commit = whole.lines
    assert commit.skipped == {"absent in 1.0": 1}
    assert verify.skipped == {"stopped: no memory": 1}
    (shown,) = verify.failures
    assert shown.replay == "kdafuzz replay x.json --impl a --device cpu"
    assert shown.text.endswith(shown.replay)


def test_only_what_a_run_might_have_met_is_judged_again(folder: Path) -> None:
    """Not what it met, nor what is another's, of another version or operation, or not there."""
    options = Options(("known_outside:mended",), ("verify", "commit"), "cpu", known=(KNOWN,))

    def recheck(
        version: str, operation: str = "verify", entry: Known = KNOWN, known: dict[str, int] | None = None
    ) -> int:
        run = Run(replace(options, known=(entry,)), {"known_outside:mended": version}, {})
        tally = run.rows["known_outside:mended", operation].tally
        tally.examples, tally.known = 3, known or {}
        return len(stale.recheck(run))

    assert recheck("1.5") == 1
    assert recheck("1.5", known={KNOWN.case: 2}) == 0
    assert recheck("1.5", known={"other": 2}) == 1
    assert recheck("2.0") == 0
    assert recheck("1.5", "commit") == 0
    assert recheck("1.5", entry=replace(KNOWN, implementation="other")) == 0
    run = Run(options, {"known_outside:mended": "1.5"}, {})
    assert stale.recheck(run) == []  # nothing was judged
