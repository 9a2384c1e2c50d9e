"""``kdafuzz bisect-step``: its exit codes, alone and under ``git bisect run``."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ci.bisect import step
from ci.bisect.rule import Run, Seen
from ci.executor import SuiteError
from ci.failures import CORPORA
from tests.fake_vllm import git
from tests.meta.bisect_history import Revision, write_history
from tests.meta.commands import Result, command_line, here

CASE = str(CORPORA / "conv_update" / "rounded-products-4650af6a.json")
Judged = Callable[..., Result]


@pytest.fixture
def judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """The command in this process, its one judgement made up."""

    def run(outcome: Seen | BaseException, *arguments: str) -> Result:
        def probe(item: object) -> Seen:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(step, "Probe", lambda *asked: probe)
        return here(monkeypatch, capsys, tmp_path, "bisect-step", *arguments)

    return run


RIGHT, WRONG = Run("", 0.5), Run("value conv out", 30.0, "conv: is wrong")


@pytest.mark.parametrize(
    ("seen", "options", "code", "said"),
    [
        (Seen((RIGHT, RIGHT)), (), 0, "vllm:. good, ratio 0.5\n"),
        (Seen((WRONG,)), (), 1, "vllm:. bad, ratio 30, failure 'value conv out': conv: is wrong\n"),
        (Seen((WRONG, RIGHT)), (), 125, "mixed: 1 of 2 runs fail"),
        (Seen((WRONG, RIGHT)), ("--mixed", "bad"), 1, "mixed: 1 of 2 runs fail"),
        (Seen(why="absent"), (), 125, "vllm:. cannot tell: absent\n"),
        (Seen((WRONG,)), ("--like", "value conv out"), 1, "bad"),
        (Seen((WRONG,)), ("--like", "copy roll"), 125, "another failure"),
        (Seen((WRONG,)), ("--metric", "ratio", "--threshold", "40"), 0, "good"),
        (Seen((WRONG,)), ("--metric", "ratio", "--threshold", "20"), 1, "bad"),
        (Seen((RIGHT,)), ("--impl", "using:factory"), 0, "using:factory good"),
    ],
)
def test_verdicts(judged: Judged, seen: Seen, options: tuple[str, ...], code: int, said: str) -> None:
    done = judged(seen, CASE, *options)
    assert (done.code, done.err) == (code, "")
    assert said in done.out


@pytest.mark.parametrize(
    ("outcome", "arguments", "said"),
    [
        (SuiteError("a traceback"), (CASE,), "the suite itself failed"),
        (RuntimeError("a fault of ours"), (CASE,), "the suite itself failed"),
        (MemoryError(), (CASE,), "the suite itself failed"),
        (OSError("no space left"), (CASE,), "no space left"),
        (Seen(), (), "Missing argument"),
        (Seen(), ("00000000",), "no case of this id"),
        (Seen(), (CASE, "--bogus"), "No such option"),
        (Seen(), (CASE, "--repeats", "0"), "--repeats"),
        (Seen(), (CASE, "--metric", "ratio"), "go together"),
        (Seen(), (CASE, "--impl", "bogus"), "needs one implementation"),
        (Seen(), (CASE, "--impl", "triton,vllm"), "needs one implementation"),
        (Seen(), (CASE, "--impl", ","), "--impl names nothing"),
        (Seen(), (str(CORPORA),), "a bisection takes one"),
    ],
)
def test_whatever_is_no_verdict_stops_git(
    judged: Judged, outcome: Seen | BaseException, arguments: tuple[str, ...], said: str
) -> None:
    """An exit code of 1 to 127 would be taken for one."""
    done = judged(outcome, *arguments)
    assert (done.code, done.out) == (255, "")
    assert said in done.err


def test_interrupts_and_help(judged: Judged) -> None:
    assert judged(KeyboardInterrupt(), CASE).code == 130
    assert judged(Seen(), "--help").code == 0


def test_git_bisect_run(tmp_path: Path) -> None:
    """In a checkout, without building anything: good, bad, and a revision that cannot be loaded."""
    repo = tmp_path / "repo"
    names = write_history(repo, [Revision(b) for b in ("right", "right", "import", "right", "wrong")])
    git(repo, "bisect", "start", names[4], names[0])
    step_line = command_line("bisect-step", CASE, "--repeats", "1", "--like", "value conv out")
    said = git(repo, "bisect", "run", *step_line)
    assert f"{names[4]} is the first bad commit" in said
    assert "vllm:. cannot tell" in said
    assert "vllm:. good" in said
    assert git(repo, "status", "--porcelain") == ""


def test_a_tree_that_is_no_vllm_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = here(monkeypatch, capsys, tmp_path, "bisect-step", CASE)
    assert (done.code, done.err) == (125, "")
    assert "is not a vLLM tree" in done.out
