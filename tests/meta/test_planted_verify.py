"""The suite finds every fault planted in verify, within a budget, and shrinks it; a sound kernel passes."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.meta.calls import verify_of
from tests.meta.faults import FAULTS, Fault, plant
from tests.meta.planted import EXAMPLES, Bench, search, seed_of, source_of
from tests.meta.stages import is_named, named

SEARCHED = [fault for fault in FAULTS.values() if not fault.beyond]
SHRUNK = (
    "empty_row_writes_a_token",
    "null_outputs_unwritten",
    "records_always_by_row",
    "records_by_the_wrong_block",
    "last_tokens_beta",
    "one_A_log_for_all_heads",
    "zero_bound_is_no_bound",
    "key_by_query_norm",
    "decay_after_the_update",
    "scale_missing",
)
"""Faults found early that never crash: a crash costs a new process at every step of the shrinker."""
CLASSES = {3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 21, 22, 23, 24, 25, 27}
"""Classes of FAULT_CLASSES.md that one verify call can show; the others are about commit, conv or a GPU."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("planted")) as bench:
        yield bench


@pytest.mark.parametrize("fault", SEARCHED, ids=lambda fault: fault.name)
def test_fault_is_found(fault: Fault, bench: Bench) -> None:
    bench.select(fault)
    _, failure = search(bench.check, seed=seed_of(fault.name))
    assert failure is not None, f"{fault.name} survived {EXAMPLES} examples"
    assert is_named(bench, fault, failure), named(failure)


@pytest.mark.parametrize("name", SHRUNK)
def test_failure_shrinks_to_the_smallest_batch(name: str, bench: Bench) -> None:
    fault = FAULTS[name]
    bench.select(fault)
    _, failure = search(bench.check, seed=seed_of(name), shrink_seconds=30.0)
    assert failure is not None
    call = verify_of(failure.case)
    assert call.rows <= fault.rows
    assert call.heads <= fault.heads
    assert call.tokens <= fault.tokens


def test_sound_kernel_passes_the_same_search(bench: Bench) -> None:
    bench.select(None)
    tally, failure = search(bench.check, seed=seed_of("sound"), examples=100)
    assert failure is None, failure
    assert tally.examples == 100


@pytest.mark.parametrize(("name", "answer"), [("", "same"), ("state_address_in_32_bits", "differs")])
def test_address_past_32_bits(name: str, answer: str, bench: Bench) -> None:
    path = bench.select(FAULTS.get(name))
    command = [sys.executable, "-m", "tests.meta.giant", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [answer]


def test_table_covers_every_class_that_verify_can_show() -> None:
    assert {number for fault in FAULTS.values() for number in fault.classes} >= CLASSES
    assert len(SEARCHED) >= 28


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.name)
def test_every_edit_matches_once_and_compiles(fault: Fault) -> None:
    compile(plant(source_of(fault), fault), fault.name, "exec")


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("in_q = ks < Q", "in_q = ks <= Q", 0),
        ("other=0.0", "other=1.0", 6),
        ("in_k = ks < K", "in_k = ks < K", 1),
    ],
    ids=["nowhere", "several times", "no change"],
)
def test_edit_that_does_not_match_once_is_an_error(old: str, new: str, found: int) -> None:
    stale = Fault("stale", (25,), old, new)
    with pytest.raises(ValueError, match=f"must match exactly once and change the text; found {found}"):
        plant(source_of(stale), stale)
