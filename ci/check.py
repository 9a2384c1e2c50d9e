"""One case judged whole: against the oracle, byte by byte, and under its relation."""

import math
from dataclasses import replace

from ci.runs import Run, Watch, ignore
from ci.serving import serve
from ci.split import split
from impl.contract import Implementation, UnavailableError
from impl.devices.base import Device
from impl.observe import observe
from oracle.calls.serve import Serve
from oracle.case import Case, Graph, Split, image
from oracle.diagnosis import diagnose
from oracle.expect import expect
from oracle.expectation import Expected
from oracle.judge import Problem, Verdict, judge
from oracle.relations import differing, disagreements
from oracle.tracked import arithmetic
from oracle.values import Values, build


def check(case: Case, implementation: Implementation, device: Device, watch: Watch = ignore) -> Verdict:
    """Run the case, and its image if it claims a relation, and judge everything.

    ``watch`` is told of every single call. ``UnavailableError``: the implementation does not take
    the case.
    """
    if isinstance(case.call, Serve):
        refusal = implementation.takes(case)
        if refusal:
            raise UnavailableError(refusal)
        return serve(case, implementation, device, watch)
    values = build(case)
    run = _run(case, values, implementation, device, watch)
    seen, verdict = run.seen, run.verdict
    if case.relation is None or not verdict.ok:
        return verdict
    if isinstance(case.relation, Split):
        ar = arithmetic(seen.arithmetic, device.name)
        problems = split(case, run.expected, seen, implementation, device, ar, watch)
        return replace(verdict, problems=problems)
    related = image(case)
    # Where the call is the same, so are values and expectations: memory changes neither.
    same = related.call is case.call
    other = _run(
        related,
        values if same else build(related),
        implementation,
        device,
        watch,
        expected=run.expected if same else None,
        replayed=isinstance(case.relation, Graph),
    )
    second = other.verdict
    ratios = {name: max(ratio, second.ratios.get(name, 0.0)) for name, ratio in verdict.ratios.items()}
    problems = second.problems or tuple(disagreements(case, related.call, run.expected, seen, other.seen))
    if problems and second.ok:
        told = f"relation {type(case.relation).__name__}: where the case and its image differ"
        watch(replace(run, what=told, differs=differing(case, related.call, run.expected, seen, other.seen)))
    return Verdict(max(verdict.ratio, second.ratio), ratios, problems, verdict.path)


def _run(
    case: Case,
    values: Values,
    implementation: Implementation,
    device: Device,
    watch: Watch,
    *,
    expected: Expected | None = None,
    replayed: bool = False,
) -> Run:
    seen = observe(case, implementation, device, values, replayed=replayed)
    try:
        declared = arithmetic(seen.arithmetic, device.name)
    except ValueError as error:
        raise UnavailableError(f"{implementation.name}: {error}") from None
    expected = expected or expect(case, values, declared)
    axes = {name: spec.axes for name, spec in case.call.results().items()}
    verdict = judge(expected, seen, axes)
    if not verdict.ok:
        verdict = replace(verdict, cause=diagnose(case, values, expected, seen, verdict))
    run = Run(expected, seen, verdict, axes, case.call, values.tensors)
    watch(run)
    return run


def crashed(text: str, kind: str = "crash") -> Verdict:
    """The verdict on a run that did not return: the process died, or had to be stopped."""
    return Verdict(math.inf, problems=(Problem(kind, text=text),))


def died(verdict: Verdict) -> bool:
    """Whether the process that ran the case died, or had to be stopped."""
    return any(problem.kind in ("crash", "hang") for problem in verdict.problems)
