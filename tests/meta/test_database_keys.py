"""An example that failed is remembered for the test and the subject that it failed in, and no other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import SkipTest

import hypothesis
import pytest
from hypothesis.database import InMemoryExampleDatabase

from ci.database import KeyedDatabase, TolerantDatabase
from ci.query import Offer
from impl.contract import Domain
from oracle.case import Case
from oracle.codec import canonical
from oracle.judge import Problem, Verdict
from tests import test_serving
from tests.meta.test_profiles import borrow_conftest, pytest_run
from tests.profiles import dev, repro
from tests.strategies.verify import verify_cases
from tests.subject import Subject

WRONG = Verdict(2.0, problems=(Problem("value", text="wrong"),))


class Fake(Subject):
    """A subject whose judge is a function; ``judged`` has the cases it was asked for."""

    def __init__(
        self,
        folder: Path,
        wrong: Callable[[Case], bool],
        version: str = "1",
        *,
        box: float = 0.0,
        seed: str = "",
    ) -> None:
        super().__init__("fake", "cpu", folder, box, seed=seed)
        self.offer = Offer(version=version, domains={"verify": Domain(), "serve": Domain()})
        self.wrong, self.judged = wrong, list[Case]()

    def check(self, case: Case) -> Verdict:
        """Wrong, or right."""
        self.judged.append(case)
        return WRONG if self.wrong(case) else Verdict()

    def alone(self, case: Case) -> Verdict:
        """As ever: it has no process."""
        return WRONG if self.wrong(case) else Verdict()


@contextmanager
def current(profile: hypothesis.settings) -> Iterator[None]:
    """Have a profile for a while."""
    before = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.register_profile("a test's", profile)
    hypothesis.settings.load_profile("a test's")
    try:
        yield
    finally:
        hypothesis.settings.load_profile(before)


def search(subject: Subject) -> None:
    """A property with a given function."""
    subject.search(verify_cases())


@pytest.mark.parametrize(
    "prop", [pytest.param(search, id="given"), pytest.param(test_serving.test_state_machine, id="stateful")]
)
def test_examples_of_two_properties_do_not_mix(
    prop: Callable[[Subject], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed is the first that the same test on the same subject asks for, and no other's business."""
    monkeypatch.setattr("tests.subject.offer_of", lambda name, device: Offer())
    database = InMemoryExampleDatabase()

    def asked(profile: hypothesis.settings, name: str, *, wrong: bool, version: str = "1") -> list[Case]:
        monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{name} (call)")
        subject = Fake(tmp_path, lambda case: wrong, version)
        with current(profile), suppress(pytest.fail.Exception, SkipTest):
            prop(subject)
        return subject.judged

    unshrunk = hypothesis.settings(dev(database), phases=[hypothesis.Phase.generate])
    failing = asked(unshrunk, "test_it[fake]", wrong=True)[-1]
    everything = {key: set(values) for key, values in database.data.items()}
    for name, version in [("test_it[other]", "1"), ("test_other[fake]", "1"), ("test_it[fake]", "2")]:
        assert asked(repro(database), name, wrong=False, version=version) == []
    assert database.data == everything
    again = asked(repro(database), "test_it[fake]", wrong=True)
    assert again
    assert {canonical(case) for case in again} == {canonical(failing)}


def test_the_device_is_part_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on the CPU, where an example passes, does not make one on a GPU forget it."""
    monkeypatch.setattr("tests.subject.offer_of", lambda name, device: Offer())
    database = InMemoryExampleDatabase()
    subject = Fake(tmp_path, lambda case: False)
    with current(dev(database)):
        for subject.device in ("cpu", "cuda"):
            kept = subject.settings().database
            assert kept is not None
            kept.save(b"key", subject.device.encode())
            assert list(kept.fetch(b"key")) == [subject.device.encode()]


PROPERTY = """
from hypothesis import strategies as st
import msgspec

from oracle.judge import Problem, Verdict
from tests.meta.commands import CASE

WRONG = Verdict(2.0, problems=(Problem("value", text="wrong"),))
CASES = st.integers(0, 2**32 - 1).map(lambda seed: msgspec.structs.replace(CASE, seed=seed))


def test_it(subject, monkeypatch):
    def check(self, case):
        with open("judged", "a") as log:
            print(case.seed, file=log)
        return WRONG if case.seed >= 1234 else Verdict()

    monkeypatch.setattr(type(subject), "check", check)
    subject.search(CASES)
"""


def test_a_run_of_pytest_replays_first_what_another_one_found(tmp_path: Path) -> None:
    """The option names the database, or the variable; ``readonly:`` reads it."""
    borrow_conftest(tmp_path)
    (tmp_path / "test_it.py").write_text(PROPERTY)
    ran = pytest_run(tmp_path, "--database", "shared")
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout
    (tmp_path / "judged").unlink()
    options = ["--hypothesis-profile", "nightly"]
    ran = pytest_run(tmp_path, *options, CI="true", KDAFUZZ_DATABASE="readonly:shared")
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout
    assert (tmp_path / "judged").read_text().split()[0] == "1234"


def test_wrappers_pass_everything_on() -> None:
    inner = InMemoryExampleDatabase()
    database = TolerantDatabase(KeyedDatabase(inner, "a test"), "memory", OSError)
    database.save(b"k", b"1")
    database.save(b"k", b"2")
    database.move(b"k", b"l", b"1")
    database.delete(b"k", b"2")
    assert (list(database.fetch(b"k")), list(database.fetch(b"l"))) == ([], [b"1"])
    assert {key: values for key, values in inner.data.items() if values} == {b"a test\0l": {b"1"}}
