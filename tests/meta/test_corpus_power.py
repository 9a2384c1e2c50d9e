"""For every class of faults that an operation can show, a saved case of that class catches one."""

from collections.abc import Iterator

import pytest

from ci.failures import CORPORA
from tests.meta import test_planted_commit, test_planted_conv, test_planted_verify
from tests.meta.corpus_power import PROOFS, Line, Saved, Table, classes_of, corpus, faults_of, render
from tests.meta.planted import Bench

BEYOND = {("verify", 13): "tests.meta.giant and tests.far_memory: no case is as large"}
"""Classes that a test of their own shows, not a case."""
SHOWN = {
    "verify": test_planted_verify.CLASSES,
    **test_planted_conv.CLASSES,
    "commit": test_planted_commit.CLASSES,
    "fused_verify": {4, 5, 6, 7, 8, 9, 14, 21, 23, 24, 25, 27},
    "serve": {3, 4, 9, 26},
}
"""Classes of FAULT_CLASSES.md that each operation can show on a CPU."""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    with Bench(tmp_path_factory.mktemp("planted")) as bench:
        yield Table(bench)


@pytest.mark.parametrize("operation", SHOWN)
def test_every_class_is_proven(operation: str) -> None:
    proven = [number for classes in PROOFS[operation].values() for number in classes]
    wanted = {number for number in SHOWN[operation] if (operation, number) not in BEYOND}
    assert wanted <= set(proven), f"no proof of {wanted - set(proven)}"
    for name, classes in PROOFS[operation].items():
        assert set(classes) <= set(faults_of(operation)[name]), f"{name} is no fault of {classes}"


@pytest.mark.parametrize(
    ("operation", "name"), [(op, name) for op, faults in PROOFS.items() for name in faults]
)
def test_a_case_of_the_class_catches_the_fault(operation: str, name: str, table: Table) -> None:
    left = set(PROOFS[operation][name])
    of_class = [saved for saved in corpus(operation) if left & saved.classes]
    for saved in sorted(of_class, key=lambda saved: saved.case.call.effort):
        if left & saved.classes and table.caught(operation, name, saved):
            left -= saved.classes
    assert not left, f"no case of class {left} in corpora/{operation} catches {name}"


@pytest.mark.parametrize("operation", PROOFS)
def test_a_sound_kernel_passes(operation: str, table: Table) -> None:
    """Otherwise a case that always fails would catch everything."""
    assert not [s.path.name for s in corpus(operation)[:1] if table.caught(operation, "", s)]


def test_every_case_names_its_classes() -> None:
    files = sorted(CORPORA.rglob("*.json"))
    cases = [saved for operation in SHOWN for saved in corpus(operation)]
    assert len(cases) == len(files)
    assert [saved.path.name for saved in cases if not saved.classes] == []
    assert all(saved.classes <= set(range(1, 31)) for saved in cases)


@pytest.mark.parametrize(
    ("why", "classes"),
    [
        ("Class 4: accept patterns 4, 1, 2.", {4}),
        ("K = 48 (classes 6, 11).", {6, 11}),
        ("Classes 3, 9 and 26: 4 rows of 7", {3, 9, 26}),
        ("nothing of 5 is said", set()),
    ],
)
def test_classes_are_read(why: str, classes: set[int]) -> None:
    assert classes_of(why) == classes


def test_the_table_counts_own_cases_and_all() -> None:
    saved = corpus("verify")[0]
    own = Saved(saved.path, saved.case, frozenset({7}))
    found = [
        Line("verify", "one", (7, 8), (own,)),
        Line("verify", "two", (7,), ()),
        Line("commit", "three", (8,), ()),
    ]
    assert [line.split() for line in render(found).splitlines()] == [
        ["class", "verify", "commit"],
        ["7", "1,", "1", "of", "2"],
        ["8", "0,", "1", "of", "1", "0,", "0", "of", "1"],
    ]
