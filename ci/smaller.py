"""``kdafuzz minimize``: make a saved failing case, or a dump of a call that fails, smaller."""

import time
from pathlib import Path

from ci.campaign import console
from ci.candidates import measure
from ci.executor import Executor
from ci.failures import load, require_writable, save, slim
from ci.maps.told import Dumps
from ci.minimize import minimize
from ci.report import describe
from impl.contract import UnavailableError
from impl.devices.registry import default
from oracle.case import Case
from oracle.judge import Verdict


def command(
    path: Path,
    implementation: str,
    device: str | None,
    timeout: float,
    seconds: float,
    folder: Path,
    dump: Path | None = None,
) -> int:
    """Minimise the case in a file; returns 1 with the smallest failing case saved, 0 if it passes.

    ``dump`` is where maps and numbers of the smallest one go.
    """
    entry, out = load(path), console()
    name = implementation or entry.found.get("implementation", "triton")
    on = device or entry.found.get("device") or default((name,))
    require_writable(folder, "--save")
    dumps = Dumps(dump)
    with Executor(name, on, timeout=timeout) as executor:
        verdict = executor.check(entry.case)
        if verdict.ok:
            out.print(f"{path} passes on {name} ({on}): nothing to make smaller", markup=False)
            return 0
        steps = judged = 0
        began = time.monotonic()

        def judge(case: Case) -> Verdict:
            nonlocal judged
            judged += 1
            return executor.check(case)

        def told(case: Case, verdict: Verdict) -> None:
            nonlocal steps
            steps += 1
            out.print(f"{steps:4}: {case.call.describe()}", soft_wrap=True, markup=False)

        case, last = minimize(entry.case, verdict, judge, told, calls=_UNLIMITED, seconds=seconds)
        seconds_taken = time.monotonic() - began
        case = slim(case)
        alone = _alone(executor, case)
        saved = save(folder, case, last, {"implementation": name, "device": on})
        again = dumps.judge(executor, case, saved, on) if dump is not None else last
    if measure(case) == measure(entry.case):
        out.print("it is as small as it gets")
    out.print(f"{judged} cases judged in {seconds_taken:.0f} s")
    out.print(f"minimal case {saved}{alone}", soft_wrap=True, markup=False)
    for line in describe(case, last, saved, name, on):
        out.print(f"  {line}", soft_wrap=True, markup=False)
    dumps.tell(out, case, name, again)
    return 1


_UNLIMITED = 1 << 30


def _alone(executor: Executor, case: Case) -> str:
    """What to add if the case passes as the only one of a new process."""
    try:
        return " (not reproducible: it passes in a new process)" if executor.alone(case).ok else ""
    except UnavailableError as error:
        return f" (not run again: {error})"
