"""``kdafuzz bisect``: the history from options, a line for every judgement, the answer and the exit code."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ci.bisect import log, releases
from ci.bisect.bisection import Phase, Result, bisect
from ci.bisect.items import History
from ci.bisect.plot import Point, svg
from ci.bisect.probe import Probe, one_case
from ci.bisect.revisions import revisions
from ci.bisect.rule import Kind, Outcome, Seen
from ci.campaign import console
from ci.failures import case_id, require_writable, write_atomically
from impl.contract import UnavailableError, one_line
from impl.vllm.source import split_flavour
from oracle.captured import path_of

NOT_ONE = 1
"""Exit code where the answer is not one item, or is not proven."""
_LISTED = 20
_VERBS: dict[Kind, str] = {"bad": "broken", "good": "fixed"}
_SHORT = 12


@dataclass(frozen=True)
class Where:
    """Which history is asked for: exactly one of a repository's, releases, wheels, or a package's."""

    repo: Path | None = None
    good: str | None = None
    bad: str | None = None
    first_parent: bool = False
    paths: tuple[str, ...] = ()
    versions: str | None = None
    wheels: Path | None = None
    package: str | None = None

    def history(self, implementation: str) -> History:
        """The history; ``UnavailableError`` if it cannot be had."""
        if self.package is not None:
            own = "cute" if self.package.startswith("nvidia-cutlass-dsl") else "triton"
            return releases.packages(self.package, implementation or own)
        name, flavour = split_flavour(implementation or "vllm")
        if name != "vllm":
            raise UnavailableError(
                f"--impl {implementation}: a history of vLLM needs --impl vllm or vllm:cute; others go with "
                "--package"
            )
        suffix = ":cute" if flavour == "cute" else ""
        if self.versions is not None:
            return releases.releases(self.versions, flavour=suffix)
        if self.wheels is not None:
            return releases.wheels(self.wheels, flavour=suffix)
        assert self.repo is not None
        assert self.good is not None
        assert self.bad is not None
        return revisions(
            self.repo, self.good, self.bad, flavour=suffix, first_parent=self.first_parent, paths=self.paths
        )


def command(
    case: str,
    where: Where,
    implementation: str,
    *,
    device: str | None,
    repeats: int,
    timeout: float,
    threshold: float | None,
    any_run: bool,
    save: Path,
    plot: Path | None,
) -> int:
    """Start a bisection; returns the exit code."""
    require_writable(save, "--save")
    if plot is not None:
        require_writable(plot, "--plot")
    found = one_case(case)
    history = where.history(implementation)
    sidecar = str(path_of(found.captured.digest)) if found.captured is not None else ""
    asked = log.Asked(found, history, device, repeats, timeout, threshold, any_run, sidecar)
    return _run(log.Log(log.new_path(save, case_id(found)), asked), asked, plot)


def resume(text: str, save: Path, plot: Path | None) -> int:
    """Go on with a bisection that was cut short; returns the exit code."""
    path = log.latest(save) if text == "latest" else Path(text)
    asked, past = log.read_log(path)
    return _run(log.Log(path, asked, past), asked, plot)


def _run(record: log.Log, asked: log.Asked, plot: Path | None) -> int:
    out = console()
    told = _Told(out, record, asked)
    told.head()
    probe = Probe(asked.case, asked.device, asked.repeats, asked.timeout)

    def ask(phase: Phase, place: int) -> Seen:
        return record.past.get((phase, place)) or probe(asked.history.items[place])

    result = None
    try:
        result = bisect(asked.history, asked.rule, ask, told)
        record.ended(result)
    finally:
        record.close()
        picture = plot or record.path.with_suffix(".svg")
        write_atomically(picture, told.plot(result).encode())
        if result is None:
            line = shlex.join(["kdafuzz", "bisect", "--resume", str(record.path)])
            out.print(f"not finished; to go on: {line}", soft_wrap=True, markup=False)
    for line in describe(asked.history, result):
        out.print(line, soft_wrap=True, markup=False)
    out.print(f"log {record.path}, plot {picture}", soft_wrap=True, markup=False)
    return 0 if result.found else NOT_ONE


class _Told:
    """Prints and logs judgements as they come, and remembers them for the picture."""

    def __init__(self, out: Console, record: log.Log, asked: log.Asked) -> None:
        self._out, self._record, self._asked = out, record, asked
        self._points: dict[int, Point] = {}

    def head(self) -> None:
        """What is searched."""
        history, case = self._asked.history, self._asked.case
        ends = f"{short(history.items[0].name)} to {short(history.items[-1].name)}"
        count = len(history.items) - history.known_old
        self._print(f"case {case_id(case)} ({case.op}), {ends}: {count} candidates")
        for note in history.notes:
            self._print(f"note: {note}")

    def __call__(self, phase: Phase, place: int, seen: Seen, outcome: Outcome, left: int) -> None:
        """One judgement."""
        self._record.judged(phase, place, seen, outcome)
        item = self._asked.history.items[place]
        self._points[place] = Point(place, item.name, outcome.kind, seen.ratio, outcome.why)
        ratio = "" if seen.ratio is None else f" ratio {seen.ratio:.3g}"
        why = f": {one_line(outcome.why, 160)}" if outcome.why else ""
        steps = f" ({left} to go)" if phase == "search" and left else ""
        self._print(f"{phase:6} {short(item.name)} {outcome.kind}{ratio} {seen.seconds:.1f} s{steps}{why}")
        if seen.note:
            self._print(f"note: {seen.note}")
        claim = self._asked.history.claim
        if phase == "end" and place == 0 and claim and outcome.kind not in (claim, "skip"):
            self._print(f"note: {short(item.name)} was given as {claim}; it is {outcome.kind}")

    def plot(self, result: Result | None) -> str:
        """The picture so far."""
        points = [self._points[place] for place in sorted(self._points)]
        case, history = self._asked.case, self._asked.history
        title = f"case {case_id(case)} ({case.op})"
        if result is not None:
            title = f"{title}: {describe(history, result)[0]}"
        threshold = 1.0 if self._asked.threshold is None else self._asked.threshold
        found = result.candidates if result else ()
        return svg(one_line(title, 100), len(history.items), points, found, threshold)

    def _print(self, line: str) -> None:
        self._out.print(line, soft_wrap=True, markup=False)


def describe(history: History, result: Result) -> list[str]:
    """What came out, in lines."""
    items, verb = history.items, _VERBS[result.new]
    first = items[result.candidates[-1]]
    parents = ", ".join(short(items[place].name) for place in result.boundary)
    if len(result.candidates) == 1:
        about = f" ({first.about})" if first.about else ""
        was = "bad" if result.new == "good" else "good"
        lines = [f"{verb} in {first.name}{about}: {parents} ({was}) -> {short(first.name)} ({result.new})"]
    else:
        oldest = items[result.candidates[0]]
        lines = [
            f"{verb} in one of {len(result.candidates)}, {short(oldest.name)} .. {short(first.name)}: "
            "those between tell nothing"
        ]
        for place in result.candidates[:_LISTED]:
            item, why = items[place], result.skips.get(place, f"the first that is known to be {result.new}")
            about = f" ({item.about})" if item.about else ""
            lines.append(f"  {item.name}{about}: {one_line(why, 160)}")
        if len(result.candidates) > _LISTED:
            lines.append(f"  and {len(result.candidates) - _LISTED} more")
    if result.doubts:
        lines += [f"not proven: {doubt}" for doubt in result.doubts]
    else:
        lines.append(f"asked again, {short(first.name)} and {parents} came out the same")
    told = f", {len(result.skips)} of them told nothing" if result.skips else ""
    return [*lines, f"{result.steps} steps{told}"]


def short(name: str) -> str:
    """A name for a line: of a revision's hash the beginning."""
    return name[:_SHORT] if len(name) == 40 and set(name) <= set("0123456789abcdef") else name
