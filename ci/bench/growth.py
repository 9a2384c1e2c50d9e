"""``kdafuzz bench growth``: how the suite's own work grows with a case, and its pace with processes.

Of every size the values are built, the oracle is asked, and the judge compares what a perfect implementation
would have left; none is run. One size is varied at a time. The exponent p fits seconds = c * size**p over the
larger half of the sizes, where what every case costs anyhow no longer hides it.
"""

import importlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from ci.asked import numbers_of, operations_of
from ci.bench.calls import OPERATIONS, PREFILLS, Size, call_of
from ci.bench.pace import Pace, Task, pace
from ci.campaign import console
from ci.failures import require_writable, write_json
from ci.query import probe
from impl.contract import UnavailableError
from impl.devices.registry import default
from oracle.case import Case
from oracle.expect import expect
from oracle.expectation import Cells, Expected, Observation
from oracle.judge import judge
from oracle.layout import DTYPES
from oracle.tracked import Arithmetic, arithmetic
from oracle.values import Values, build

PARTS = ("build", "oracle", "judge")
WINDOWS = (1, 2, 4, 8)
_BASE = Size("", rows=4, window=4, heads=2, layers=2)
_PREFILL = Size("", tokens=256, channels=3 * 128)


@dataclass(frozen=True)
class Curve:
    """One operation against one size: seconds of every part at every value."""

    operation: str
    size: str
    values: tuple[int, ...]
    seconds: dict[str, tuple[float, ...]]

    def exponent(self, part: str) -> float:
        """Of the part's seconds over the larger half of the values, by least squares of logarithms."""
        half = len(self.values) // 2
        return slope(self.values[half:], self.seconds[part][half:])


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The exponent p of seconds = c * size**p; at least two different sizes."""
    xs, ys = [math.log(x) for x in sizes], [math.log(y) for y in seconds]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - mean_x) ** 2 for x in xs)


def command(
    *,
    operations: str,
    doublings: int,
    repeats: int,
    jobs: str,
    implementation: str,
    device: str | None,
    examples: int,
    json_path: Path | None,
    plot: Path | None,
) -> int:
    """Measure what the options ask for; 0."""
    for path, option in ((json_path, "--json"), (plot, "--plot")):
        if path is not None:
            require_writable(path, option)
    ops = operations_of(operations, OPERATIONS)
    counts = numbers_of("--jobs", jobs, 512) if jobs else ()
    if plot is not None:
        _pyplot()
    torch.set_num_threads(1)
    out = console()
    curves: list[Curve] = []
    with out.status("..") as status:
        for op in ops:
            for size, values in _axes(op, doublings):
                status.update(f"{op} {size} ..")
                curves.append(_curve(op, size, values, repeats))
    paces = [_paces(op, counts, implementation, device, examples) for op in ops] if counts else []
    _show(out, curves, dict(zip(ops, paces, strict=False)))
    if json_path is not None:
        facts = {
            "curves": [
                {**msgspec.to_builtins(c), "exponents": {part: c.exponent(part) for part in PARTS}}
                for c in curves
            ],
            "paces": dict(zip(ops, paces, strict=False)),
        }
        write_json(json_path, facts, indented=True)
    if plot is not None:
        draw(curves, plot)
    return 0


def _axes(op: str, doublings: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The sizes that an operation has, each with the values to try."""
    base = _base(op)
    sizes = ("tokens", "channels") if op in PREFILLS else ("rows", "window", "heads")
    for size in (*sizes, "layers") if op == "commit" else sizes:
        doubled = tuple(getattr(base, size) << i for i in range(doublings))
        yield size, WINDOWS if size == "window" else doubled


def _base(op: str) -> Size:
    base = _PREFILL if op in PREFILLS else _BASE
    return replace(base, op=op, layers=base.layers if op == "commit" else min(base.layers, 1))


def _sized(op: str, size: str, value: int) -> Size:
    changed: dict[str, Any] = {size: value}
    return replace(_base(op), **changed)


def _curve(op: str, size: str, values: tuple[int, ...], repeats: int) -> Curve:
    times = [_seconds(_sized(op, size, value), repeats) for value in values]
    return Curve(op, size, values, {part: tuple(t[part] for t in times) for part in PARTS})


def case_of(size: Size) -> Case:
    """A case of the size: dense, every row with a slot of its own."""
    return Case(call=call_of(size, tuple(range(1, size.needs + 1)), size.needs + 1))


def _seconds(size: Size, repeats: int) -> dict[str, float]:
    """Per part the least of so many times."""
    case = case_of(size)
    least = dict.fromkeys(PARTS, math.inf)
    for _ in range(repeats):
        for part, seconds in _once(case, arithmetic("sequential-fp32", "cpu")).items():
            least[part] = min(least[part], seconds)
    return least


def _once(case: Case, declared: Arithmetic) -> dict[str, float]:
    began = time.process_time()
    values = build(case)
    built = time.process_time()
    expected = expect(case, values, declared)
    asked = time.process_time()
    seen = perfect(case, values, expected)
    ready = time.process_time()
    verdict = judge(expected, seen, {name: spec.axes for name, spec in case.call.results().items()})
    if not verdict.ok:
        raise AssertionError(f"the judge refuses what the oracle expects: {verdict.problems[0].describe()}")
    return {"build": built - began, "oracle": asked - built, "judge": time.process_time() - ready}


def perfect(case: Case, values: Values, expected: Expected) -> Observation:
    """What an implementation leaves whose results are the oracle's: every cell the value, rounded once."""
    before = {
        name: values.tensors.get(name, torch.zeros(spec.shape, dtype=DTYPES[spec.dtype]))
        for name, spec in case.call.results().items()
    }
    after = dict(before)
    for name, cells in expected.cells.items():
        after[name] = torch.where(cells.written, _stored(cells, before[name].dtype), before[name])
    return Observation(before=before, after=after, path=expected.path)


def _stored(cells: Cells, dtype: torch.dtype) -> torch.Tensor:
    return cells.value.to(cells.via).to(dtype) if cells.via is not None else cells.value.to(dtype)


def _paces(
    op: str, counts: Sequence[int], implementation: str, device: str | None, examples: int
) -> list[Pace]:
    found = device or default([implementation])
    offer = probe(implementation, found)
    if op not in offer.domains:
        raise UnavailableError(f"{implementation} has no {op}: {offer.absent.get(op, 'absent')}")
    task = Task(implementation, op, found, offer.domains[op], examples, 0, 0, 60.0)
    return [pace(task, count) for count in counts]


def _show(out: Console, curves: Sequence[Curve], paces: dict[str, list[Pace]]) -> None:
    table = Table(title="ms of a case at the largest size, and the exponent", title_justify="left")
    for name in ("operation", "size", "values"):
        table.add_column(name)
    for part in PARTS:
        table.add_column(part, justify="right")
    for curve in curves:
        cells = [f"{1e3 * curve.seconds[part][-1]:.1f} ({curve.exponent(part):.2f})" for part in PARTS]
        table.add_row(curve.operation, curve.size, f"{curve.values[0]} .. {curve.values[-1]}", *cells)
    out.print(table)
    for op, found in paces.items():
        rates = ", ".join(f"{each.jobs}: {each.rate:.1f}/s" for each in found)
        fitted = [(each.jobs, each.rate) for each in found]
        power = (
            f"; exponent {slope(*zip(*fitted, strict=True)):.2f}" if len({x for x, _ in fitted}) > 1 else ""
        )
        out.print(f"{op}, processes and judged examples: {rates}{power}", markup=False)


def draw(curves: Sequence[Curve], path: Path) -> None:
    """A picture: a panel an operation and size, seconds against the size, both logarithmic."""
    pyplot = _pyplot()
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.5 * columns, 3.2 * rows), squeeze=False)
    for place in axes.flat[len(curves) :]:
        place.axis("off")
    for place, curve in zip(axes.flat, curves, strict=False):
        for part in PARTS:
            label = f"{part} ({curve.exponent(part):.2f})"
            place.loglog(curve.values, [1e3 * s for s in curve.seconds[part]], marker="o", label=label)
        place.set_title(curve.operation)
        place.set_xlabel(curve.size)
        place.set_ylabel("ms")
        place.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        importlib.import_module("matplotlib").use("agg")
    except ModuleNotFoundError:
        raise UnavailableError("--plot needs matplotlib: pip install 'kdafuzz[report]'") from None
    return importlib.import_module("matplotlib.pyplot")
