"""The kill table of planted faults: ``python -m tests.meta.planted_report [--op OP] [NAME ...]``."""

import argparse
import tempfile
import time
from pathlib import Path

from oracle.calls import AnyCall
from tests.meta import faults, faults_commit, faults_conv, faults_prefill
from tests.meta.faults import Fault
from tests.meta.planted import EXAMPLES, Bench, search, seed_of

FAULTS = faults.FAULTS | faults_conv.FAULTS | faults_prefill.FAULTS | faults_commit.FAULTS
"""Every fault of every kernel file by name."""


def main() -> None:
    """Search every fault named, or all, shrink what is found, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults; all by default")
    operations = sorted({fault.operation for fault in FAULTS.values()})
    parser.add_argument("--op", choices=operations, help="only faults that this operation shows")
    parser.add_argument("--seeds", type=int, default=1, help="searches a fault, each with another seed")
    parser.add_argument("--seconds", type=float, default=60.0, help="shrink budget")
    options = parser.parse_args()
    unknown = set(options.names) - FAULTS.keys()
    if unknown:
        parser.error(f"unknown fault {min(unknown)}; there are {', '.join(FAULTS)}")
    print(
        f"{'fault':42} {'classes':8} {'examples':>14} {'stage kind':22} {'minimal':10} {'calls':>5} {'s':>6}"
    )
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder)) as bench:
        for name in options.names or FAULTS:
            fault = FAULTS[name]
            if options.op not in (None, fault.operation):
                continue
            if fault.beyond:
                print(f"{name:42} {_classes(fault):8} not searched: {fault.beyond}")
            else:
                print(_line(bench, fault, options.seeds, options.seconds), flush=True)


def _classes(fault: Fault) -> str:
    return ",".join(map(str, fault.classes))


def _size(call: AnyCall) -> tuple[int, int, int]:
    """Rows, heads (1 where a call has none) and tokens."""
    return call.rows, getattr(call, "heads", 1), call.tokens


def _line(bench: Bench, fault: Fault, seeds: int, seconds: float) -> str:
    bench.select(fault)
    started, first, operation = time.monotonic(), seed_of(fault.name), fault.operation
    tally, failure = search(bench.check, seed=first, operation=operation, shrink_seconds=seconds)
    counts = [tally.examples if failure else 0]
    for i in range(1, seeds):
        again, found = search(bench.check, seed=first + i, operation=operation)
        counts.append(again.examples if found else 0)
    shown = " ".join(str(n) if n else f">{EXAMPLES}" for n in counts)
    stage = size = "-"
    if failure is not None:
        problem, reached = failure.verdict.problems[0], _size(failure.case.call)
        stage = f"{failure.verdict.stage} {problem.kind}"
        size = "/".join(map(str, reached))
        if any(n > most for n, most in zip(reached, (fault.rows, fault.heads, fault.tokens), strict=True)):
            size += " (!)"
    return (
        f"{fault.name:42} {_classes(fault):8} {shown:>14} {stage:22} {size:10} "
        f"{tally.executions:5} {time.monotonic() - started:6.1f}"
    )


if __name__ == "__main__":
    main()
