"""``kdafuzz bench examples``: judged examples a second, and where their time goes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ci.asked import default_palette, numbers_of, operations_of
from ci.bench.pace import Pace, Task, pace
from ci.bench.stopwatch import PHASES, Stopwatch
from ci.campaign import console
from ci.check import check
from ci.failures import require_writable, write_json
from ci.query import probe
from ci.search import run
from impl.contract import UnavailableError
from impl.devices.registry import default, open_device
from impl.registry import resolve, split
from oracle.case import Case, Graph
from oracle.judge import Verdict

MIB = 1 << 20


@dataclass
class Speed:
    """One implementation on one operation: seconds per example, or why there are none.

    ``draw`` is Hypothesis's time alone, ``phases`` that of judging the same examples in this process.
    """

    implementation: str
    operation: str
    absent: str = ""
    examples: int = 0
    draw: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    paces: list[Pace] = field(default_factory=list)

    @property
    def judged(self) -> float:
        """Seconds to judge an example once it is drawn."""
        return sum(self.phases.values())


def command(
    *,
    implementations: str,
    operations: str,
    device: str | None,
    examples: int,
    seed: int,
    palette: int | None,
    jobs: str,
    timeout: float,
    json_path: Path | None,
) -> int:
    """Run what the options ask for. ``UnavailableError`` if nothing could run."""
    if json_path is not None:
        require_writable(json_path, "--json")
    names, ops, counts = split(implementations), operations_of(operations), numbers_of("--jobs", jobs, 512)
    found = device or default(names)
    out, speeds = console(), list[Speed]()
    torch.set_num_threads(1)
    out.print(f"kdafuzz bench examples: device {found}, {examples} examples, seed {seed}", markup=False)
    with out.status("..") as status:
        for name in names:
            offer = probe(name, found)
            for op in ops:
                status.update(f"{name} {op} ..")
                if op not in offer.domains:
                    speeds.append(Speed(name, op, absent=offer.absent.get(op, "absent")))
                    continue
                variants = default_palette(found, examples) if palette is None else palette
                task = Task(name, op, found, offer.domains[op], examples, seed, variants, timeout)
                speeds.append(_measured(task, counts))
    _show(out, speeds)
    if json_path is not None:
        facts = {"device": found, "seed": seed, "speeds": speeds}
        write_json(json_path, facts, indented=True)
    if all(speed.absent for speed in speeds):
        raise UnavailableError("nothing was run: see the lines above")
    return 0


def _measured(task: Task, counts: Sequence[int]) -> Speed:
    speed = Speed(task.implementation, task.operation)
    try:
        speed.paces = [pace(task, count) for count in counts]
        drawn = _drawn(task, speed)
        _judged(task, drawn, speed)
    except UnavailableError as error:
        speed.absent = str(error)
    return speed


def _drawn(task: Task, speed: Speed) -> list[Case]:
    """Draw the examples, the second time with a clock."""
    drawn: list[Case] = []

    def keep(case: Case) -> Verdict:
        drawn.append(case)
        return Verdict()

    run(task.search())
    began = time.perf_counter()
    run(replace(task.search(), judge=keep))
    speed.examples = len(drawn)
    speed.draw = (time.perf_counter() - began) / len(drawn)
    return drawn


def _judged(task: Task, drawn: Sequence[Case], speed: Speed) -> None:
    """Judge them in this process, the second time with a clock."""
    device = open_device(task.device)
    implementation = resolve(task.implementation)
    # A graph's capture cannot be waited for in its middle: such a case is judged without its replay.
    judged = [_without_graph(case) for case in drawn]
    for case in judged:
        check(case, implementation, device)
    stopwatch = Stopwatch()
    with stopwatch.watching(device):
        for case in judged:
            check(case, implementation, device)
    speed.phases = {phase: seconds / len(drawn) for phase, seconds in stopwatch.seconds.items()}


def _without_graph(case: Case) -> Case:
    return msgspec.structs.replace(case, relation=None) if isinstance(case.relation, Graph) else case


def _show(out: Console, speeds: Sequence[Speed]) -> None:
    drawn = Table(title="ms an example, in one process", title_justify="left")
    for title in ("implementation", "operation"):
        drawn.add_column(title)
    for title in ("draw", *PHASES, "judged/s", "of draw only/s"):
        drawn.add_column(title, justify="right")
    paces = Table(title="judged examples a second, whole processes", title_justify="left")
    for title in ("implementation", "operation"):
        paces.add_column(title)
    for title in ("processes", "examples/s", "of one", "MiB early", "MiB at the end", "GPU MiB"):
        paces.add_column(title, justify="right")
    for speed in speeds:
        name = escape(speed.implementation), speed.operation
        if speed.absent:
            continue
        times = [f"{1e3 * x:.1f}" for x in (speed.draw, *(speed.phases[phase] for phase in PHASES))]
        whole = 1 / (speed.draw + speed.judged)
        drawn.add_row(*name, *times, f"{whole:.1f}", f"{whole * speed.draw:.0%}")
        for each in speed.paces:
            gpu = "-" if each.gpu is None else f"{each.gpu / MIB:.0f}"
            cells = f"{each.rate:.1f}", f"{each.rate / speed.paces[0].rate:.1f}x"
            paces.add_row(
                *name, str(each.jobs), *cells, f"{each.early / MIB:.0f}", f"{each.resident / MIB:.0f}", gpu
            )
    for table in (drawn, paces):
        if table.row_count:
            out.print(table)
    for speed in speeds:
        if speed.absent:
            out.print(f"- {speed.implementation} {speed.operation}: {speed.absent}", markup=False)
