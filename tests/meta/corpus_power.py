"""What the saved cases catch of the planted faults: ``python -m tests.meta.corpus_power [--op OP]``.

A case says in its ``why`` which classes of FAULT_CLASSES.md it is there for ("class 7", "classes 7, 8").
It must then catch a fault of that class planted in the kernel of its operation. The command replays
every case of an operation against every fault of its kernels and prints, per class and operation, how
many faults are caught: by the cases of the class, and by any.
"""

import argparse
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ci.check import check
from ci.failures import CORPORA, load
from impl.contract import OPERATIONS
from impl.devices.registry import open_device
from oracle.case import Case
from tests.meta import fused_fake
from tests.meta.planted import Bench
from tests.meta.planted_report import FAULTS

_CLASSES = re.compile(r"[Cc]lass(?:es)? (\d+(?:(?:,| and) \d+)*)")
FUSED = {
    "eps": (24,),
    "no scale": (6,),
    "couplings swapped": (24,),
    "low half dropped": (21,),
    "decay of the token before": (6,),
    "own correction left out": (24,),
    "one column less rolls": (4, 25),
    "whole row rolls": (27,),
    "no SiLU": (6,),
    "history from the first column": (4,),
    "beta of the last token": (23,),
    "products unrounded": (21,),
    "record of the raw key": (4, 6),
    "gate record normalised": (6,),
    "tail of records": (5, 27),
    "null is 0 alone": (7,),
    "null outputs unwritten": (8,),
    "empty row rolls": (9, 25),
    "never declines": (14,),
    "writes before it declines": (14,),
    "path by the first stride alone": (14,),
    "work counter": (18,),
    "returns nothing": (14,),
}
"""Classes of the faults in ``fused_fake``."""


PROOFS: dict[str, dict[str, tuple[int, ...]]] = {
    "verify": {
        "state_by_row": (3,),
        "checkpoint_written_back": (4,),
        "record_tail_zeroed": (5,),
        "softplus_threshold": (6, 22),
        "null_strictly_below": (7,),
        "null_zeros_one_too_many": (8, 27),
        "empty_row_writes_a_token": (9,),
        "state_k_stride_ignored": (10, 12),
        "state_mask_without_k": (11, 25),
        "output_rounded_twice": (21,),
        "last_tokens_beta": (23,),
        "output_of_the_old_state": (24,),
        "zero_bound_is_no_bound": (28,),
    },
    "conv_update": {
        "history_one_column_late": (1, 4),
        "counts_of_the_first_row": (3,),
        "bias_dropped": (6,),
        "update_null_strictly_below": (7,),
        "result_never_in_place": (8,),
        "empty_row_rolls": (9,),
        "update_weight_rows_taken_for_dense": (10, 12),
        "strided_taps_reversed": (11,),
        "roll_after_the_outputs": (15,),
        "product_not_rounded": (21,),
        "silu_overflows": (22,),
        "first_row_longer_by_its_start": (23,),
        "one_output_too_many": (25, 27),
        "six_taps_refused": (28,),
    },
    "conv_prefill": {
        "prefill_token_relative_to_row": (3,),
        "state_of_the_first_chunk": (4, 25),
        "initial_flag_ignored": (5,),
        "prefill_null_zero_only": (7,),
        "empty_sequence_stores_its_state": (9,),
        "prefill_first_token_stride_ignored": (10,),
        "prefill_channel_by_column_stride": (11,),
        "prefill_page_stride_for_length": (12,),
        "bias_after_the_activation": (21,),
        "silu_sign": (22,),
        "prefill_channel_mask": (27,),
    },
    "packed_conv": {
        "packed_never_initial": (4,),
        "packed_bias_dropped": (6,),
        "packed_in_conv_dtype": (8, 21),
        "packed_input_taken_for_dense": (10, 12),
        "planes_interleaved": (11,),
        "packed_always_silu": (28,),
    },
    "commit": {
        "count_of_zero_is_live": (1,),
        "count_past_the_query": (2,),
        "fold_record_always_by_slot": (3, 27),
        "fold_boundary_of_all_tokens": (4, 23, 26),
        "fold_one_token_too_many": (5,),
        "fold_softplus_threshold": (6, 22),
        "null_rows_keep_their_count": (7,),
        "plan_left_to_the_second_layer": (8,),
        "dead_rows_are_read": (9, 25),
        "slot_stride_ignored_by_plan": (10,),
        "conv_strides_swapped": (11,),
        "one_layer_for_all": (12,),
        "columns_from_the_last": (15,),
        "fold_key_norm_in_activation_dtype": (21,),
        "fold_key_by_gate_norm": (24,),
        "conv_of_one_column_refused": (28,),
    },
    "fused_verify": {
        "record of the raw key": (4, 6),
        "tail of records": (5, 27),
        "null is 0 alone": (7,),
        "null outputs unwritten": (8,),
        "empty row rolls": (9, 25),
        "writes before it declines": (14,),
        "products unrounded": (21,),
        "beta of the last token": (23,),
        "couplings swapped": (24,),
    },
    "serve": {
        "fold_record_always_by_slot": (3,),
        "empty_row_rolls": (9,),
        "columns_not_moved": (4,),
        "fold_boundary_one_token_late": (26,),
    },
}
"""Per operation, few faults that stand for all of its classes, each with those that it proves."""


def classes_of(why: str) -> frozenset[int]:
    """The classes that a case says it is there for."""
    return frozenset(int(number) for told in _CLASSES.findall(why) for number in re.findall(r"\d+", told))


@dataclass(frozen=True)
class Saved:
    """A case of the corpus."""

    path: Path
    case: Case
    classes: frozenset[int]


@cache
def corpus(operation: str) -> tuple[Saved, ...]:
    """The saved cases of an operation."""
    files = sorted((CORPORA / operation).glob("*.json"))
    entries = [(file, load(file)) for file in files]
    return tuple(Saved(file, entry.case, classes_of(entry.why)) for file, entry in entries)


def faults_of(operation: str) -> dict[str, tuple[int, ...]]:
    """The faults that an operation's cases may catch, and their classes; serving runs all the kernels."""
    if operation == "fused_verify":
        return FUSED
    return {
        name: fault.classes
        for name, fault in FAULTS.items()
        if fault.operation == operation or (operation == "serve" and fault.operation in SERVED)
    }


SERVED = ("verify", "conv_update", "conv_prefill", "commit")
"""What serving runs of the Triton kernels."""


class Table:
    """Judges saved cases on planted kernels; one bench serves all of them."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def caught(self, operation: str, name: str, saved: Saved) -> bool:
        """Whether the case fails on a kernel with this fault; on a sound one where the name is empty."""
        if operation == "fused_verify":
            return not check(saved.case, fused_fake.implementation(name), open_device("cpu")).ok
        self._bench.select(FAULTS[name] if name else None)
        return not self._bench.check(saved.case).ok


@dataclass(frozen=True)
class Line:
    """A fault, and which of an operation's cases caught it."""

    operation: str
    name: str
    classes: tuple[int, ...]
    caught: tuple[Saved, ...]

    def by_class(self, number: int) -> bool:
        """Whether a case of the class caught it."""
        return any(number in saved.classes for saved in self.caught)


def lines(table: Table, operation: str, names: tuple[str, ...] = ()) -> Iterator[Line]:
    """Every fault of the operation, or those named, against every case of it."""
    for name, classes in faults_of(operation).items():
        if names and name not in names:
            continue
        caught = [saved for saved in corpus(operation) if table.caught(operation, name, saved)]
        yield Line(operation, name, classes, tuple(caught))


def main() -> None:
    """Print a line for each fault, and then the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults; all by default")
    parser.add_argument("--op", choices=OPERATIONS, help="only faults and cases of this operation")
    options = parser.parse_args()
    found: list[Line] = []
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder)) as bench:
        for operation in [options.op] if options.op else OPERATIONS:
            for line in lines(Table(bench), operation, tuple(options.names)):
                found.append(line)
                numbers = ",".join(map(str, line.classes))
                stems = " ".join(saved.path.stem for saved in line.caught)
                print(f"{operation:12} {line.name:42} {numbers:9} {stems or '-'}", flush=True)
    print(render(found))


def render(found: list[Line]) -> str:
    """Class by operation: faults caught by cases of the class, by any case, and all there are."""
    operations = [name for name in OPERATIONS if any(line.operation == name for line in found)]
    rows = [f"{'class':6}" + "".join(f"{name:>16}" for name in operations)]
    for number in sorted({c for line in found for c in line.classes}):
        cells = []
        for operation in operations:
            here = [line for line in found if line.operation == operation and number in line.classes]
            own, most = sum(line.by_class(number) for line in here), sum(bool(line.caught) for line in here)
            cells.append(f"{f'{own}, {most} of {len(here)}' if here else '':>16}")
        rows.append(f"{number:<6}" + "".join(cells))
    return "\n".join(rows)


if __name__ == "__main__":
    main()
