"""The suite's properties draw in rounds: many different cases, by the seed, after those remembered."""

import sys
from collections.abc import Callable
from contextlib import suppress
from math import ceil, inf
from pathlib import Path
from unittest import SkipTest

import hypothesis
import pytest
from hypothesis import Phase
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.errors import StopTest

from ci.check import crashed
from ci.query import Offer
from ci.rounds import ROUND
from oracle.case import Case
from oracle.codec import canonical, read
from oracle.judge import Verdict
from tests.meta.calls import verify_of
from tests.meta.commands import plug_in
from tests.meta.test_database_keys import Fake, current, search
from tests.meta.test_profiles import borrow_conftest, pytest_run
from tests.profiles import ci, dev, nightly, repro
from tests.subject import Subject
from tests.test_serving import test_state_machine as state_machine

Judged = list[Case]


def right(case: Case) -> bool:
    """Whether an implementation without a fault gets the case wrong."""
    del case
    return False


def wide(case: Case) -> bool:
    """Whether one that is wrong with many value channels does."""
    return verify_of(case).value_dim > 16


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Judged]:
    """What a property judges under a profile, in order."""
    monkeypatch.setattr("tests.subject.offer_of", lambda name, device: Offer())

    def cases(
        profile: hypothesis.settings,
        wrong: Callable[[Case], bool] = right,
        test: str = "test_it[fake]",
        seed: str = "",
        box: float = 0.0,
        of: Callable[[Subject], None] = search,
    ) -> Judged:
        monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{test} (call)")
        subject = Fake(tmp_path, wrong, box=box, seed=seed)
        subject.name = test.partition("[")[2].rstrip("]")
        with current(profile), suppress(pytest.fail.Exception):
            of(subject)
        return subject.judged

    return cases


def told(cases: Judged) -> list[bytes]:
    return [canonical(case) for case in cases]


@pytest.mark.parametrize(
    ("make", "examples", "of"),
    [(dev, 25, search), (ci, 100, search), (nightly, 200, search), (dev, 25, state_machine)],
)
def test_the_cases_are_distinct_calls(
    make: Callable[..., hypothesis.settings],
    examples: int,
    of: Callable[[Subject], None],
    judged: Callable[..., Judged],
) -> None:
    """But for one a round: of the two that open it, variations of the simplest, one is judged."""
    found = judged(make(InMemoryExampleDatabase()), seed="1", of=of)
    assert len(found) == examples
    assert len({repr(case.call) for case in found}) >= examples - ceil(examples / ROUND)


def test_the_seed_or_the_name_says_what_is_drawn(judged: Callable[..., Judged]) -> None:
    """The name of the property: versions of an implementation are compared on the same cases."""

    def fixed(database: InMemoryExampleDatabase) -> hypothesis.settings:
        return hypothesis.settings(ci(database), max_examples=25)

    def drawn(make: Callable[..., hypothesis.settings], **options: str) -> list[bytes]:
        return told(judged(make(InMemoryExampleDatabase()), **options))

    same = drawn(fixed)
    assert drawn(fixed) == same
    assert drawn(fixed, test="test_it[other@2]") == same
    assert drawn(fixed, test="test_other[fake]") != same
    assert drawn(dev) != drawn(dev)


@pytest.mark.parametrize("of", [search, state_machine])
def test_an_option_says_what_is_drawn(of: Callable[[Subject], None], judged: Callable[..., Judged]) -> None:
    def drawn(seed: str) -> list[bytes]:
        return told(judged(dev(InMemoryExampleDatabase()), seed=seed, of=of))

    seeded = drawn("3")
    assert drawn("3") == seeded
    assert drawn("4") != seeded


def test_what_is_remembered_comes_first_and_once(judged: Callable[..., Judged]) -> None:
    """Also where it is more than a round has; it takes no new example's place."""
    database = InMemoryExampleDatabase()
    unshrunk = hypothesis.settings(dev(database), phases=[Phase.generate])
    failing = {told(judged(unshrunk, wide, seed=str(n)))[-1] for n in range(2 * ROUND)}
    assert len(failing) > ROUND
    again = told(judged(dev(database)))
    assert set(again[: len(failing)]) == failing
    assert all(again.count(case) == 1 for case in failing)
    assert len(again) >= len(failing) + 25
    with pytest.raises(SkipTest):
        judged(repro(database), test="test_new[fake]")


@pytest.mark.parametrize("examples", [15, 250], ids=["another-round", "while-there-is-time"])
def test_a_late_failure_is_shrunk_and_remembered(examples: int, judged: Callable[..., Judged]) -> None:
    database = InMemoryExampleDatabase()
    seen = 0

    def later(case: Case) -> bool:
        nonlocal seen
        seen += 1
        return seen > examples and wide(case)

    box = inf if examples > 200 else 0.0
    phases = [Phase.generate, Phase.shrink]
    profile = hypothesis.settings((nightly if box else dev)(database), phases=phases)
    found = judged(profile, later, seed="1", box=box)
    assert len(found) > examples
    failing = told([case for case in found[examples:] if wide(case)])
    first = judged(repro(database), wide)[0]
    assert canonical(first) in failing
    assert len(canonical(first)) < len(failing[0])
    assert (verify_of(first).value_dim, verify_of(first).heads) == (32, 1)


class Killed(Fake):
    """A subject whose process is killed once, so many judgements after the first failure."""

    def __init__(self, folder: Path, at: int) -> None:
        super().__init__(folder, wide, seed="1")
        self._left = at

    def check(self, case: Case) -> Verdict:
        """Wrong with many value channels, or killed."""
        before = any(map(wide, self.judged))
        verdict = super().check(case)
        self._left -= before
        return crashed("the process died of SIGKILL") if before and self._left == 0 else verdict


def test_a_process_killed_while_shrinking_loses_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told and saved is the smallest wrong case, not that of the kill."""
    monkeypatch.setattr("tests.subject.offer_of", lambda name, device: Offer())
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "test_it[fake] (call)")
    subject = Killed(tmp_path, at=9)
    with current(dev(InMemoryExampleDatabase())), pytest.raises(pytest.fail.Exception, match="stage to"):
        search(subject)
    (saved,) = tmp_path.rglob("*.json")
    assert saved.name.startswith("fake-value-")
    assert verify_of(read(saved).case).value_dim == 32


def test_what_fails_once_is_told_with_its_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nondeterministic kernel: what is on disk, its replay line, and that it passed after that."""
    monkeypatch.setattr("tests.subject.offer_of", lambda name, device: Offer())
    failed: list[Case] = []

    def once(case: Case) -> bool:
        failed.extend([case] if not failed and wide(case) else [])
        return failed == [case] and subject.judged.count(case) == 1

    subject = Fake(tmp_path, once, seed="1")
    with current(dev(InMemoryExampleDatabase())), pytest.raises(pytest.fail.Exception) as caught:
        search(subject)
    (saved,) = tmp_path.rglob("*.json")
    assert read(saved).case == failed[0]
    assert f"kdafuzz replay {saved}" in str(caught.value)
    assert "Not reproducible: it passed when it was run again" in str(caught.value)


def test_no_script_is_judged_that_hypothesis_has_given_up(judged: Callable[..., Judged]) -> None:
    """It would be told of a failure in vain: the test would pass."""
    given_up: list[bool] = []

    def wrong(_: Case) -> bool:
        given_up.append(isinstance(sys.exc_info()[1], StopTest))
        return False

    for seed in ("1", "2"):
        judged(dev(InMemoryExampleDatabase()), wrong, seed=seed, of=state_machine)
    assert len(given_up) == 50
    assert not any(given_up)


def two_dimensions(case: Case) -> bool:
    """Whether an implementation that is wrong with several heads and many value channels is."""
    call = verify_of(case)
    return call.heads > 1 and call.value_dim > 16 and sum(call.qlens) > 0


def test_a_fault_of_two_dimensions_is_found_with_any_seed(judged: Callable[..., Judged]) -> None:
    """Three distinct cases in ten show it, so 25 of them miss it once in 7000 searches."""
    profile = dev(InMemoryExampleDatabase())
    unshrunk = hypothesis.settings(profile, database=None, phases=[Phase.generate, Phase.target])
    missed = [n for n in range(100) if not two_dimensions(judged(unshrunk, two_dimensions, seed=str(n))[-1])]
    assert missed == []


SEARCHES = """
import pytest
from hypothesis import Phase, settings

from tests.subject import Subject

settings.register_profile("unshrunk", settings.get_profile("dev"), phases=[Phase.generate, Phase.target])


@pytest.mark.parametrize("number", range(4))
def test_it(subject, number, monkeypatch):
    monkeypatch.setattr(Subject, "_unless_alone", lambda self: "")
    settings.load_profile("unshrunk")
    subject.search(subject.cases("verify"))
"""


def test_a_run_of_pytest_finds_it(tmp_path: Path) -> None:
    """Each number has a seed of its own."""
    borrow_conftest(tmp_path)
    (tmp_path / "test_it.py").write_text(SEARCHES)
    options = ("--impl", f"{plug_in(tmp_path)}:large", "--device", "cpu", "--hypothesis-seed", "1")
    ran = pytest_run(tmp_path, *options, PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[2]}")
    assert "4 failed" in ran.stdout.splitlines()[-1], ran.stdout
