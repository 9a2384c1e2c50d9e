"""A search keeps what it found, whatever stops it."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from ci.search import Failure, FoundError, InterruptedSearchError, Recorder, Search, run
from impl.contract import UnavailableError
from oracle.case import Case
from oracle.codec import canonical
from oracle.judge import Problem, Verdict
from tests.meta.calls import verify_of
from tests.meta.commands import CASE
from tests.strategies.verify import verify_cases

WRONG = Verdict(2.0, problems=(Problem("value", text="wrong"),))


def searched(judge: Callable[[Case], Verdict], until: float = float("inf"), seed: int = 3) -> Search:
    return Search(verify_cases(), judge, seed, 30, until)


def test_an_error_of_the_judge_ends_the_search_at_once() -> None:
    calls = []

    def judge(case: Case) -> Verdict:
        calls.append(case)
        if len(calls) == 4:
            raise UnavailableError("gone")
        return Verdict()

    with pytest.raises(UnavailableError, match="gone"):
        run(searched(judge))
    assert len(calls) == 4


def test_the_simplest_case_is_judged_in_the_first_round_alone() -> None:
    """Every round opens with it, often twice: of ten examples it would take one or two."""
    calls: list[bytes] = []

    def judge(case: Case) -> Verdict:
        calls.append(canonical(case))
        return Verdict()

    tally, _ = run(searched(judge))
    assert tally.examples == len(calls) == 30
    assert calls[0] not in calls[10:]


def test_a_failure_that_comes_once_is_not_lost() -> None:
    calls = []

    def judge(case: Case) -> Verdict:
        calls.append(canonical(case))
        return WRONG if len(calls) == 5 else Verdict()

    tally, failure = run(searched(judge))
    assert failure is not None
    assert (failure.flaky, failure.shrunk) == (True, False)
    assert canonical(failure.case) == calls[4]
    assert tally.examples == 5


def test_time_that_runs_out_while_shrinking_keeps_the_failure() -> None:
    until = time.monotonic() + 1.0
    judged = []

    def judge(case: Case) -> Verdict:
        assert time.monotonic() < until + 0.6
        if verify_of(case).value_dim <= 16:
            return Verdict()
        time.sleep(0.3)
        judged.append(canonical(case))
        return WRONG

    _, failure = run(searched(judge, until))
    assert failure is not None
    assert (failure.flaky, failure.shrunk) == (False, False)
    assert canonical(failure.case) in judged


def test_an_interruption_while_shrinking_keeps_the_failure() -> None:
    judged = []

    def judge(case: Case) -> Verdict:
        if verify_of(case).value_dim <= 16:
            return Verdict()
        judged.append(canonical(case))
        if len(judged) == 3:
            raise KeyboardInterrupt
        return WRONG

    with pytest.raises(InterruptedSearchError) as caught:
        run(searched(judge))
    assert canonical(caught.value.failure.case) in judged[:2]
    assert not caught.value.failure.shrunk


def test_a_case_that_fails_for_certain_is_not_judged_again() -> None:
    judged: list[bytes] = []

    def judge(case: Case) -> Verdict:
        judged.append(canonical(case))
        return WRONG

    _, failure = run(searched(judge))
    assert failure is not None
    assert failure.shrunk
    assert max(judged.count(case) for case in judged) == 2


def test_every_smaller_case_is_told_at_once() -> None:
    """The first before anything else is judged, the last is the result, and none is told twice."""
    judged: list[bytes] = []
    told: list[Failure] = []

    def judge(case: Case) -> Verdict:
        judged.append(canonical(case))
        return Verdict() if verify_of(case).value_dim <= 16 else WRONG

    def found(failure: Failure) -> None:
        assert canonical(failure.case) == judged[-1]
        assert (failure.verdict, failure.shrunk) == (WRONG, False)
        told.append(failure)

    _, failure = run(replace(searched(judge), found=found))
    assert failure is not None
    assert failure.shrunk
    assert len(told) > 2
    assert told[-1].case == failure.case
    assert len({canonical(each.case) for each in told}) == len(told)
    assert len(canonical(told[-1].case)) < len(canonical(told[0].case))


def test_a_failure_that_cannot_be_kept_ends_the_search() -> None:
    """It is no failure of the case, which nothing may go on to shrink."""
    judged = []

    def judge(case: Case) -> Verdict:
        judged.append(case)
        return WRONG

    def found(failure: Failure) -> None:
        raise UnavailableError("no room on the disk")

    with pytest.raises(UnavailableError, match="no room on the disk"):
        run(replace(searched(judge), found=found))
    assert len(judged) == 1


def test_a_search_that_does_not_shrink() -> None:
    judged = []

    def judge(case: Case) -> Verdict:
        judged.append(canonical(case))
        return Verdict() if verify_of(case).value_dim <= 16 else WRONG

    tally, failure = run(replace(searched(judge), shrink=False))
    assert failure is not None
    assert (failure.shrunk, failure.flaky) == (False, False)
    assert canonical(failure.case) == judged[tally.examples - 1]
    assert set(judged[tally.examples :]) <= {canonical(failure.case)}


ONCE = Verdict(float("inf"), problems=(Problem("raised", text="the device was busy"),))


@pytest.mark.parametrize("steady", [True, False])
def test_what_comes_once_does_not_hide_what_comes_again(steady: bool) -> None:
    """Such as what another process does to the device while a real failure is being shrunk."""
    wrong: list[bytes] = []
    once: list[bytes] = []
    told: list[Failure] = []

    def judge(case: Case) -> Verdict:
        if verify_of(case).value_dim <= 16:
            if len(wrong) < 3 or once:
                return Verdict()
            once.append(canonical(case))
            return ONCE
        wrong.append(canonical(case))
        return WRONG if steady or not once else Verdict()

    _, failure = run(replace(searched(judge), found=told.append))
    assert failure is not None
    assert len(once) == 1
    assert (failure.flaky, failure.shrunk) == (not steady, False)
    assert (failure.verdict == WRONG) == steady
    assert failure.case == told[-1].case
    keys = [canonical(each.case) for each in told if each.verdict == WRONG]
    again = [index for index, key in enumerate(keys) if key in keys[:index]]
    assert [keys[index] == keys[index - 1] for index in again] == [True] * steady, "the smallest one's"


def test_a_case_that_passed_in_between_is_not_steady() -> None:
    """Whatever it does when it is judged once more."""
    verdicts = [WRONG, Verdict(), WRONG]
    recorder = Recorder(searched(lambda case: verdicts.pop(0)))
    with pytest.raises(FoundError):
        recorder.run(CASE)
    recorder.run(CASE)
    assert not recorder.settle()
    assert recorder.failure == Failure(CASE, WRONG)


def test_an_interruption_of_a_last_look_keeps_the_failure() -> None:
    """Where the smallest case has passed, and the others are judged once more."""
    wrong: list[bytes] = []
    once: list[bytes] = []

    def judge(case: Case) -> Verdict:
        if canonical(case) in once:
            once.append(canonical(case))
        if len(once) > 1 and verify_of(case).value_dim > 16:
            raise KeyboardInterrupt
        if verify_of(case).value_dim <= 16:
            if len(wrong) < 3 or once:
                return Verdict()
            once.append(canonical(case))
            return ONCE
        wrong.append(canonical(case))
        return WRONG

    with pytest.raises(InterruptedSearchError) as caught:
        run(searched(judge))
    assert canonical(caught.value.failure.case) in {*wrong, *once}


@pytest.mark.parametrize("at", [1, 4, 9, 16, 25])
def test_a_process_killed_while_shrinking_changes_nothing(at: int) -> None:
    """The judgement so long after the first failure is a crash that does not come again."""

    def found(killed: int) -> tuple[Failure | None, int]:
        since = 0

        def judge(case: Case) -> Verdict:
            nonlocal since
            wrong = verify_of(case).value_dim > 16 and verify_of(case).rows > 0
            since += bool(since or wrong)
            if since == killed + 1:
                return Verdict(problems=(Problem("crash", text="killed"),))
            return WRONG if wrong else Verdict()

        tally, failure = run(searched(judge))
        return failure, tally.examples

    assert found(at) == found(10**9)
