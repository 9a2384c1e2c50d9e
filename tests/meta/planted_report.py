"""The kill table of the faults planted in verify: ``python -m tests.meta.planted_report [NAME ...]``."""

import argparse
import tempfile
import time
from pathlib import Path

from tests.meta.calls import verify_of
from tests.meta.faults import FAULTS, Fault
from tests.meta.planted import EXAMPLES, Bench, search, seed_of


def main() -> None:
    """Search every fault named, or all, shrink what is found, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults; all by default")
    parser.add_argument("--seeds", type=int, default=1, help="searches a fault, each with another seed")
    parser.add_argument("--seconds", type=float, default=60.0, help="shrink budget")
    options = parser.parse_args()
    unknown = set(options.names) - FAULTS.keys()
    if unknown:
        parser.error(f"unknown fault {min(unknown)}; there are {', '.join(FAULTS)}")
    print(
        f"{'fault':34} {'classes':8} {'examples':>14} {'stage kind':22} {'minimal':10} {'calls':>5} {'s':>6}"
    )
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder)) as bench:
        for name in options.names or FAULTS:
            fault = FAULTS[name]
            if fault.beyond:
                print(f"{name:34} {_classes(fault):8} not searched: {fault.beyond}")
            else:
                print(_line(bench, fault, options.seeds, options.seconds), flush=True)


def _classes(fault: Fault) -> str:
    return ",".join(map(str, fault.classes))


def _line(bench: Bench, fault: Fault, seeds: int, seconds: float) -> str:
    bench.select(fault)
    started = time.monotonic()
    tally, failure = search(bench.check, seed=seed_of(fault.name), shrink_seconds=seconds)
    counts = [tally.examples if failure else 0]
    for i in range(1, seeds):
        again, found = search(bench.check, seed=seed_of(fault.name) + i)
        counts.append(again.examples if found else 0)
    shown = " ".join(str(n) if n else f">{EXAMPLES}" for n in counts)
    stage = size = "-"
    if failure is not None:
        call = verify_of(failure.case)
        stage = f"{failure.verdict.stage} {failure.verdict.problems[0].kind}"
        size = f"{call.rows}/{call.heads}/{call.tokens}"
        if call.rows > fault.rows or call.heads > fault.heads or call.tokens > fault.tokens:
            size += " (!)"
    return (
        f"{fault.name:34} {_classes(fault):8} {shown:>14} {stage:22} {size:10} "
        f"{tally.executions:5} {time.monotonic() - started:6.1f}"
    )


if __name__ == "__main__":
    main()
