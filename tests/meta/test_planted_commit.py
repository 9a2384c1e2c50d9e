"""The suite finds every fault planted in commit, within a budget; a sound kernel passes."""

from collections.abc import Iterator

import pytest

from tests.meta.faults import Fault, plant
from tests.meta.faults_commit import FAULTS
from tests.meta.planted import EXAMPLES, Bench, search, seed_of, source_of
from tests.meta.stages import is_named, named

CLASSES = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 21, 22, 23, 24, 25, 26, 27, 28}
"""Classes of FAULT_CLASSES.md that one commit can show; the others are about a GPU or many calls."""
SERVED = (
    "query_for_count",
    "columns_not_moved",
    "boundary_columns_by_count",
    "fold_one_token_too_many",
    "fold_boundary_of_all_tokens",
)
"""Faults of class 4 that serving must find as well."""
SERVED_EXAMPLES = 40


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("planted")) as bench:
        yield bench


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.name)
def test_fault_is_found(fault: Fault, bench: Bench) -> None:
    bench.select(fault)
    _, failure = search(bench.check, seed=seed_of(fault.name), operation=fault.operation)
    assert failure is not None, f"{fault.name} survived {EXAMPLES} examples"
    assert is_named(bench, fault, failure), named(failure)


@pytest.mark.parametrize("name", SERVED)
def test_rejected_tokens_are_found_by_serving(name: str, bench: Bench) -> None:
    assert 4 in FAULTS[name].classes
    bench.select(FAULTS[name])
    _, failure = search(bench.check, seed=seed_of(name), operation="serve", examples=SERVED_EXAMPLES)
    assert failure is not None, f"{name} survived {SERVED_EXAMPLES} scripts"


@pytest.mark.parametrize(("operation", "examples"), [("commit", 10), ("serve", 2)])
def test_sound_kernel_passes_the_same_search(operation: str, examples: int, bench: Bench) -> None:
    bench.select(None)
    tally, failure = search(bench.check, seed=seed_of("sound"), operation=operation, examples=examples)
    assert failure is None, failure
    assert tally.examples == examples


def test_table_covers_every_class_that_commit_can_show() -> None:
    assert {number for fault in FAULTS.values() for number in fault.classes} >= CLASSES


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.name)
def test_every_edit_matches_once_and_compiles(fault: Fault) -> None:
    compile(plant(source_of(fault), fault), fault.name, "exec")
