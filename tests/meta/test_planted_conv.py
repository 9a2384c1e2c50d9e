"""The suite finds every fault planted in the convolutions, within a budget; sound kernels pass."""

from collections.abc import Iterator

import pytest

from oracle.calls.conv import ConvPrefill
from oracle.case import Case
from tests.meta import faults_conv, faults_prefill
from tests.meta.faults import Fault, plant
from tests.meta.planted import EXAMPLES, Bench, search, seed_of, source_of

FAULTS = faults_conv.FAULTS | faults_prefill.FAULTS
SEARCHED = [fault for fault in FAULTS.values() if not fault.beyond]
CLASSES = {
    "conv_update": {1, 3, 4, 6, 7, 8, 9, 10, 11, 12, 15, 21, 22, 23, 25, 27, 28},
    "conv_prefill": {3, 4, 5, 7, 9, 10, 11, 12, 21, 22, 25, 27},
    "packed_conv": {4, 6, 8, 10, 11, 12, 21, 28},
}
"""Classes of FAULT_CLASSES.md that one call can show; the others are about commit, records or a GPU."""
SERVED = ("history_not_shifted", "zeros_not_stored", "short_rows_lose_their_history")
"""Faults of class 4 that serving must find as well."""
SERVED_EXAMPLES = 40
SOUND = {"conv_update": 40, "conv_prefill": 10, "packed_conv": 10}
"""Examples of a search that a sound kernel passes."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("planted")) as bench:
        yield bench


@pytest.mark.parametrize("fault", SEARCHED, ids=lambda fault: fault.name)
def test_fault_is_found(fault: Fault, bench: Bench) -> None:
    bench.select(fault)
    _, failure = search(bench.check, seed=seed_of(fault.name), operation=fault.operation)
    assert failure is not None, f"{fault.name} survived {EXAMPLES} examples"


@pytest.mark.parametrize("name", SERVED)
def test_stale_history_is_found_by_serving(name: str, bench: Bench) -> None:
    assert 4 in FAULTS[name].classes
    bench.select(FAULTS[name])
    _, failure = search(bench.check, seed=seed_of(name), operation="serve", examples=SERVED_EXAMPLES)
    assert failure is not None, f"{name} survived {SERVED_EXAMPLES} scripts"


@pytest.mark.parametrize(("name", "ok"), [("", True), ("search_forgets_its_first_level", False)])
def test_batch_of_more_rows_than_a_level_finds(name: str, ok: bool, bench: Bench) -> None:
    live = {row: 1 + i for i, row in enumerate((0, 31, 32, 1023, 1024, 1055))}
    call = ConvPrefill(
        pool=len(live) + 1,
        qlens=tuple(int(row in live) for row in range(1056)),
        slots=tuple(live.get(row, 0) for row in range(1056)),
        ids=tuple(range(1056)),
        initial=(False,) * 1056,
        most_tokens=1,
        channels=1,
        state_len=3,
    )
    bench.select(FAULTS.get(name))
    assert bench.check(Case(call=call)).ok is ok


@pytest.mark.parametrize("operation", SOUND)
def test_sound_kernel_passes_the_same_search(operation: str, bench: Bench) -> None:
    bench.select(None)
    examples = SOUND[operation]
    tally, failure = search(bench.check, seed=seed_of("sound"), operation=operation, examples=examples)
    assert failure is None, failure
    assert tally.examples == examples


@pytest.mark.parametrize("operation", CLASSES)
def test_table_covers_every_class_that_the_operation_can_show(operation: str) -> None:
    faults = [fault for fault in FAULTS.values() if fault.operation == operation]
    assert {number for fault in faults for number in fault.classes} >= CLASSES[operation]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.name)
def test_every_edit_matches_once_and_compiles(fault: Fault) -> None:
    compile(plant(source_of(fault), fault), fault.name, "exec")
