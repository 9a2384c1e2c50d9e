"""Which step planted faults are in, and which the suite names: ``python -m tests.meta.stages [NAME ...]``.

A line a fault: the step that it was planted in, what the verdict names on the smallest case, and
that case's size. The suite is right where its cause, or without one its first stage to diverge,
is that step.
"""

import argparse
import tempfile
import time
from pathlib import Path

from ci.search import Failure
from tests.meta.faults import Fault
from tests.meta.planted import Bench, search, seed_of
from tests.meta.planted_report import FAULTS

TRUTH = {
    "beta_not_squashed": "gate",
    "last_tokens_beta": "gate",
    "key_eps": "norm",
    "key_eps_outside_the_root": "norm",
    "key_by_query_norm": "norm",
    "query_eps": "norm",
    "scale_missing": "norm",
    "scale_by_value_dim": "norm",
    "softplus_threshold": "decay",
    "gate_bias_dropped": "decay",
    "one_bias_for_all_heads": "decay",
    "zero_bound_is_no_bound": "decay",
    "decay_after_the_correction": "decay",
    "beta_on_value_only": "correction",
    "correction_one_position_late": "correction",
    "state_by_row": "correction",
    "output_of_the_old_state": "output",
    "query_by_value_stride": "output",
    "key_recorded_normalised": "record",
    "gate_recorded_with_bias": "record",
    "query_for_count": "plan",
    "boundary_only_when_passed": "plan",
    "columns_one_late": "roll",
    "boundary_columns_by_count": "roll",
    "fold_without_gate_bias": "decay",
    "fold_softplus_threshold": "decay",
    "fold_bias_of_one_head": "decay",
    "fold_key_eps": "norm",
    "fold_key_by_gate_norm": "norm",
    "fold_one_token_too_many": "fold",
    "fold_state_strides_swapped": "fold",
    "fold_correction_head_stride": "fold",
}
"""Faults by name. Scaling a query belongs to its normalisation."""
UNNAMED = {"beta_on_value_only", "fold_one_token_too_many"}
"""Those whose smallest case has another explanation: of one token, keys of another norm do as well, and a
token too many in a fold of one is a decay and an update too many."""
SHRINK_SECONDS = 20.0


def named(failure: Failure) -> str:
    """The step that a failure names."""
    return failure.verdict.cause or failure.verdict.stage


def smallest(bench: Bench, fault: Fault, seconds: float) -> Failure | None:
    """What a search for the planted fault ends in, shrunk for so long; 0: as found."""
    bench.select(fault)
    return search(bench.check, seed=seed_of(fault.name), operation=fault.operation, shrink_seconds=seconds)[1]


def is_named(bench: Bench, fault: Fault, failure: Failure) -> bool:
    """Whether the first failing case, or else the smallest, names the step that the fault is planted in.

    A first one may have more than one explanation.
    """
    if fault.name not in TRUTH.keys() - UNNAMED or named(failure) == TRUTH[fault.name]:
        return True
    again = smallest(bench, fault, SHRINK_SECONDS)
    return again is not None and named(again) == TRUTH[fault.name]


def main() -> None:
    """Print a line a fault and how many were named rightly."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults; all of the table by default")
    parser.add_argument("--seconds", type=float, default=SHRINK_SECONDS, help="for shrinking; 0: as found")
    options = parser.parse_args()
    right, names = 0, options.names or list(TRUTH)
    print(f"{'fault':32} {'planted in':11} {'named':11} rows heads tokens   K   V      s")
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder)) as bench:
        for name in names:
            fault, started = FAULTS[name], time.monotonic()
            failure = smallest(bench, fault, options.seconds)
            if failure is None:
                print(f"{name:32} {TRUTH[name]:11} not found")
                continue
            call = failure.case.call
            right += named(failure) == TRUTH[name]
            print(
                f"{name:32} {TRUTH[name]:11} {named(failure):11} {call.rows:4} {getattr(call, 'heads', 1):5} "
                f"{call.tokens:6} {getattr(call, 'key_dim', 0):3} {getattr(call, 'value_dim', 0):3} "
                f"{time.monotonic() - started:6.1f}",
                flush=True,
            )
    print(f"{right} of {len(names)} named rightly")


if __name__ == "__main__":
    main()
