"""Saved cases, replayed on every implementation that takes them."""

from pathlib import Path

import pytest

from ci.corpus import rules_broken
from ci.failures import load, locate
from ci.known import explained, named, stale
from impl.contract import UnavailableError
from oracle.codec import CaseError
from tests.subject import Subject


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case_file" not in metafunc.fixturenames:
        return
    corpus: Path = metafunc.config.getoption("--corpus")
    chosen = metafunc.config.getoption("--replay")
    try:
        files = [f for text in chosen for f in locate(text)] if chosen else sorted(corpus.rglob("*.json"))
    except CaseError as error:
        raise pytest.UsageError(str(error)) from None
    metafunc.parametrize("case_file", files, ids=[f.stem for f in files])


def test_replay(subject: Subject, case_file: Path) -> None:
    """A case passes; that of a known finding fails where its entry says so, and in that way."""
    case = load(case_file).case
    entry = named(subject.known, subject.name, subject.offer.version, case)
    try:
        if entry is None:
            subject.require(case)
            return
        verdict = subject.check(case)
        if verdict.ok:
            subject.ledger.current.stale = stale(entry, subject.name, subject.offer.version)
            pytest.fail(subject.ledger.current.stale, pytrace=False)
        if explained([entry], subject.name, subject.offer.version, case, verdict) is None:
            subject.require(case, excuse=False)
    except UnavailableError as error:
        pytest.skip(f"needs an implementation that takes the case; found {error}")


def test_rules(case_file: Path, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--replay"):
        pytest.skip("needs a corpus; found single cases given by --replay")
    assert rules_broken(case_file, pytestconfig.getoption("--corpus")) == []
