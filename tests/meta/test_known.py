"""Known findings: what they explain and what they do not, and how every command goes on past them."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest

from ci.failures import case_id
from ci.known import ALL_STAGES, Known, explained, named, problems_of, read_known
from ci.search import Search, run
from oracle.calls.conv import ConvUpdate
from oracle.case import Case, Prefix
from oracle.codec import CaseError, dumps
from oracle.expectation import Expected, Observation, Stray
from oracle.judge import Problem, Verdict, judge
from tests.meta.calls import verify_of
from tests.meta.commands import CASE, at_a_desk, entry, here, plug_in
from tests.strategies.verify import verify_cases

CPU = ("--device", "cpu")
REPOSITORY = Path(__file__).resolve().parents[2]
KNOWN = Known("known_outside", ">=1.5,<2", "verify", case_id(CASE), "raised", "records: row", "it is\nso.")
RAISED = Verdict(1e9, problems=(Problem("raised", text="boom"),))
WRONG = Verdict(2.0, problems=(Problem("value", "out", "output"),))
PLUG_IN = """
from dataclasses import replace
import zoo_outside

def raises(): return replace(zoo_outside.raises(), version="1.5")
def mended(): return replace(zoo_outside.right(), version="1.5")
def later(): return replace(zoo_outside.raises(), version="2.0")
def later_mended(): return replace(zoo_outside.right(), version="2.0")
"""


def written(folder: Path, *entries: Known) -> Path:
    """A corpus of one case and a list of these findings."""
    case = folder / "verify" / f"known-{case_id(CASE)}.json"
    case.parent.mkdir(parents=True, exist_ok=True)
    case.write_bytes(dumps(entry()))
    path = folder / "known.toml"
    lines = [f"{name} = {json.dumps(value)}\n" for item in entries for name, value in asdict(item).items()]
    size = len(asdict(KNOWN))
    path.write_text("".join("[[known]]\n" * (i % size == 0) + line for i, line in enumerate(lines)))
    return path


@pytest.mark.parametrize(
    ("name", "version", "covered"),
    [
        ("known_outside", "1.5", True),
        ("known_outside:raises", "1.5.3", True),
        ("known_outside@1.5", "1.5", True),
        ("known_outside:raises", "1.6.dev3+gabc", True),
        ("known_outside:raises", "1.4", False),
        ("known_outside:raises", "2.0", False),
        ("known_outside:raises", "unknown", False),
        ("known_outside:raises", "", False),
        ("known_outside_too:raises", "1.5", False),
        ("known", "1.5", False),
        ("other", "1.5", False),
    ],
)
def test_whom_a_finding_covers(name: str, version: str, covered: bool) -> None:
    assert KNOWN.covers(name, version) == covered
    assert (explained([KNOWN], name, version, CASE, RAISED) is KNOWN) == covered
    assert (named([KNOWN], name, version, CASE) is KNOWN) == covered


@pytest.mark.parametrize(
    ("name", "covered"),
    [
        ("vllm@0.33.0:cute", True),
        ("vllm:cute", True),
        ("vllm:../vllm@main:cute", True),
        ("vllm@0.33.0", False),
        ("vllm", False),
        ("vllm2:cute", False),
        ("cute", False),
        ("fla:cute", False),
    ],
)
def test_a_finding_may_be_of_the_cute_kernels_alone(name: str, covered: bool) -> None:
    finding = replace(KNOWN, implementation="vllm:cute")
    assert finding.covers(name, "1.5") == covered
    assert replace(KNOWN, implementation="vllm").covers(name, "1.5") == (
        name[:5] in ("vllm", "vllm:", "vllm@")
    )


@pytest.mark.parametrize(
    "other",
    [
        replace(KNOWN, operation="commit"),
        replace(KNOWN, stage="output"),
        replace(KNOWN, bucket="records: slot"),
        replace(KNOWN, versions="<1"),
    ],
)
def test_a_finding_explains_no_more_than_it_says(other: Known) -> None:
    call = ("known_outside:raises", "1.5", CASE)
    assert explained([other], *call, RAISED) is None
    assert explained([other, KNOWN], *call, RAISED) is KNOWN
    assert explained([KNOWN], *call, WRONG) is None
    assert explained([KNOWN], *call, Verdict()) is None


def test_the_image_of_a_case_may_be_what_fails() -> None:
    """Full rows pass; cut to one token they are the finding."""
    call = ConvUpdate(pool=2, qlens=(2,), slots=(1,), ids=(0,), channels=1, state_len=3, window=2)
    full = Case(call=call)
    finding = replace(KNOWN, operation="conv_update", bucket="counts: none, short row")
    arguments = ("known_outside", "1.5")
    assert explained([finding], *arguments, full, RAISED) is None
    assert explained([finding], *arguments, msgspec.structs.replace(full, relation=Prefix(1)), RAISED)


def test_whatever_a_judge_says_can_be_listed() -> None:
    """Also what is no step of the algorithm."""
    seen = Observation({}, {}, strays=(Stray("q", 8, 1),), differs="schedules differ", path="other")
    verdict = judge(Expected({}, path="this"), seen)
    assert {problem.kind for problem in verdict.problems} == {"path", "schedule", "stray"}
    assert {replace(verdict, problems=(problem,)).stage for problem in verdict.problems} <= set(ALL_STAGES)


BAD: dict[str, tuple[dict[str, str], str]] = {
    "versions": ({"versions": "0.29 or so"}, "needs versions such as"),
    "operation": ({"operation": "dance"}, "names no operation"),
    "stage": ({"stage": "fourth"}, "names no stage"),
    "bucket": ({"bucket": "counts: zero"}, "which verify does not have"),
    "bucket not reached": ({"bucket": "records: slot"}, "does not fall into bucket 'records: slot'"),
    "another operation": ({"operation": "commit"}, "which is a case of verify"),
    "no cause": ({"cause": " "}, "needs text in every field"),
    "no such case": ({"case": "00000000"}, "which is not in the corpus"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_entry_is_told(tmp_path: Path, bad: str) -> None:
    changes, sentence = BAD[bad]
    path = written(tmp_path, KNOWN, replace(KNOWN, **changes))
    (problem,) = problems_of(path, {case_id(CASE): CASE})
    assert f"entry 2 {'' if sentence.startswith('n') else 'names'}" in problem
    assert sentence in problem
    by_itself = bad in ("versions", "operation", "stage", "bucket", "no cause")
    if by_itself:
        with pytest.raises(CaseError, match=r"known\.toml: entry 2"):
            read_known(path)
    else:
        assert len(read_known(path)) == 2


def test_lists_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, KNOWN, replace(KNOWN, stage="hang"))
    assert read_known(path) == (KNOWN, replace(KNOWN, stage="hang"))
    assert problems_of(path, {case_id(CASE): CASE}) == []
    path.unlink()
    assert read_known(path) == ()
    (problem,) = problems_of(written(tmp_path, KNOWN), {})
    assert "not in the corpus" in problem


# Searches


def search(judge: Callable[[Case], Verdict]) -> Search:
    def known(case: Case, verdict: Verdict) -> str:
        return "abcd" if verdict.stage == "raised" else ""

    return Search(verify_cases(), judge, 3, 60, known=known)


def test_a_search_counts_known_findings_and_goes_on() -> None:
    def judge(case: Case) -> Verdict:
        return RAISED if verify_of(case).window > 2 else Verdict(0.25)

    tally, failure = run(search(judge))
    assert failure is None
    assert tally.examples == tally.executions == 60
    assert 0 < tally.known["abcd"] < 60
    assert len(tally.ratios) == 60 - tally.known["abcd"]
    assert max(tally.ratios) == tally.ratio == 0.25


def test_a_failure_does_not_shrink_into_a_known_finding() -> None:
    """Below 9 value channels the case fails in the known way: no step towards that is taken."""

    def judge(case: Case) -> Verdict:
        return RAISED if verify_of(case).value_dim < 9 else WRONG

    _, failure = run(search(judge))
    assert failure is not None
    assert failure.verdict == WRONG
    assert verify_of(failure.case).value_dim >= 9


def test_the_minimiser_takes_no_known_finding_either() -> None:
    """Two kinds of one signature, told apart by the finding alone."""

    def judge(case: Case) -> Verdict:
        return WRONG

    def known(case: Case, verdict: Verdict) -> str:
        return "abcd" if sum(verify_of(case).qlens) < 3 else ""

    tally, failure = run(Search(verify_cases(), judge, 3, 60, known=known))
    assert failure is not None
    assert sum(verify_of(failure.case).qlens) >= 3
    assert tally.examples > sum(tally.known.values())


# Commands


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an implementation of version 1.5, a corpus and a list of its findings."""
    plug_in(tmp_path)
    (tmp_path / "known_outside.py").write_text(PLUG_IN)
    path = written(tmp_path / "corpus", KNOWN)
    for module in ("ci.asked", "ci.replay"):
        monkeypatch.setattr(f"{module}.read_known", lambda: read_known(path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "options", "code", "count"),
    [("raises", (), 0, 4), ("raises", ("--no-known",), 1, 0), ("later", (), 1, 0)],
)
def test_fuzz(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    name: str,
    options: tuple[str, ...],
    code: int,
    count: int,
) -> None:
    """Known findings are counted, told once below the table, and leave the run clean."""
    arguments = [
        "--op",
        "verify",
        "--examples",
        "4",
        "--jobs",
        "1",
        "--json",
        "out.json",
        *options,
    ]
    result = here(
        monkeypatch, capsys, folder, "fuzz", "--impl", f"known_outside:{name}", "--device", "cpu", *arguments
    )
    assert (result.code, result.err) == (code, "")
    line = f"known finding, {count} examples: {KNOWN.case} (verify of known_outside >=1.5,<2): it is so.\n"
    assert (line in result.out) == (count > 0)
    assert ("known finding" in result.out) == (count > 0)
    (row,) = json.loads((folder / "out.json").read_bytes())["rows"]
    assert row["tally"]["known"] == ({KNOWN.case: count} if count else {})
    assert bool(row["failures"]) == bool(code) == bool(list((folder / ".kdafuzz").rglob("*.json")))


@pytest.mark.parametrize(
    ("name", "badge", "code", "sentence"),
    [
        ("raises", "KNOWN", 0, "known_outside >=1.5,<2): it is so."),
        ("mended", "STALE", 1, "passes case"),
        ("later", "FAIL", 1, "boom"),
        ("later_mended", "PASS", 0, ""),
    ],
)
def test_replay(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    name: str,
    badge: str,
    code: int,
    sentence: str,
) -> None:
    result = here(
        monkeypatch, capsys, folder, "replay", *["corpus"] * 2, "--impl", f"known_outside:{name}", *CPU
    )
    assert (result.code, result.err) == (code, "")
    assert result.out.startswith(f"{badge} {KNOWN.case} verify known_outside:{name} on cpu")
    assert sentence in result.out
    assert result.out.splitlines()[-1].startswith("warning: stale: known_outside") == (badge == "STALE")
    assert result.out.count("warning:") == (badge == "STALE")


def pytest_run(folder: Path, names: str, *arguments: str) -> tuple[int, str]:
    """A pytest run over the corpus of ``folder``, with implementations there."""
    given = ",".join(f"known_outside:{name}" for name in names.split())
    options = ["--impl", given, "--device", "cpu", "--corpus", str(folder / "corpus")]
    options += ["--save-failures", str(folder / "saved"), "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=REPOSITORY,
        env=at_a_desk() | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_pytest_over_the_corpus(folder: Path) -> None:
    """The case must fail where its entry says so, pass elsewhere, and fail in no other way."""
    replayed = ("tests/test_corpora.py", "-k", "test_replay")
    result, said = pytest_run(folder, "raises mended later", *replayed)
    assert result == 1
    assert "2 failed, 1 passed" in said
    stale = "stale: known_outside:mended (1.5) passes case"
    told, _, rest = said.partition("- stale known findings -")
    listed, _, _ = rest.partition("= short test summary info =")
    for name, sentence in (("mended", stale), ("later", "boom")):
        (found,) = re.findall(
            rf"^_+ test_replay\[\S+-known_outside:{name}\] _+\n((?:(?!_).*\n)+)", told, re.M
        )
        assert sentence in found
    assert (listed.count("stale: "), listed.count(stale)) == (1, 1)
    written(folder / "corpus", replace(KNOWN, stage="output"))
    result, said = pytest_run(folder, "raises", *replayed)
    assert result == 1
    assert "boom" in said


@pytest.mark.slow
def test_pytest_over_properties(folder: Path) -> None:
    """A search counts findings and goes on; a test of one case is an expected failure."""
    differential = ("tests/test_verify.py", "-k", "differential or no-rows")
    result, said = pytest_run(folder, "raises", *differential, "--hypothesis-show-statistics")
    assert result == 0, said
    assert "1 passed" in said
    assert "1 xfailed" in said
    assert f"known finding {KNOWN.case}" in said
    written(folder / "corpus")
    result, said = pytest_run(folder, "raises", *differential)
    assert result == 1
    assert "2 failed" in said
