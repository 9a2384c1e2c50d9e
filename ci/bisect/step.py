"""``kdafuzz bisect-step``: one judgement, with the exit codes that ``git bisect run`` wants."""

import re

import click

from ci.bisect.items import Item
from ci.bisect.probe import Probe, one_case
from ci.bisect.rule import Rule
from impl.contract import one_line
from impl.registry import split

CODES = {"good": 0, "bad": 1, "skip": 125}


def command(
    case: str,
    implementation: str,
    *,
    device: str | None,
    repeats: int,
    timeout: float,
    threshold: float | None,
    any_run: bool,
    like: str,
) -> int:
    """Judge the case once; returns the exit code."""
    names = split(implementation)
    if len(names) > 1 or not re.match(r"(triton|cute|fla|vllm)$|.+[:@].", names[0]):
        raise click.UsageError(f"--impl {implementation}: needs one implementation, as vllm:PATH")
    item = Item(names[0], names[0])
    seen = Probe(one_case(case), device, repeats, timeout)(item)
    outcome = Rule(threshold, like, any_run).outcome(seen)
    ratio = "" if seen.ratio is None else f", ratio {seen.ratio:.3g}"
    failure = next((run.failure for run in seen.runs if run.failure), "")
    way = f", failure {failure!r}" if failure else ""
    why = f": {outcome.why}" if outcome.why else ""
    told = {"good": "good", "bad": "bad", "skip": "cannot tell"}[outcome.kind]
    print(one_line(f"{names[0]} {told}{ratio}{way}{why}", 1000), flush=True)
    return CODES[outcome.kind]
