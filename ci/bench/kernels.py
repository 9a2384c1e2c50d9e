"""``kdafuzz bench kernels``: every implementation of an operation side by side, against the byte floor."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console

from ci.asked import numbers_of, operations_of
from ci.bench.agreement import difference
from ci.bench.calls import OPERATIONS, Grid, Size
from ci.bench.inputs import Inputs, build, sets_of
from ci.bench.subjects import Job, Subject, subjects
from ci.bench.tables import Entry, Row, Table, show
from ci.bench.timing import Clock, walls
from ci.bench.traffic import moved
from ci.campaign import console
from ci.failures import require_writable, write_json
from impl.contract import Implementation, UnavailableError, one_line
from impl.devices.base import Device
from impl.devices.registry import open_device
from impl.observe import written
from impl.registry import require_device, resolve, split

CHECKED = Grid(rows=(2,), windows=(2,), heads=1, layers=2, tokens=(40,), channels=3 * 128)
"""The sizes of ``--check``."""
LAUNCH_ROWS = 1
"""The batch at which a launch costs more than what it moves: there the wall time is told too."""
_CHECK_SETS = 2


def command(
    *,
    implementations: str,
    operations: str,
    rows: str,
    windows: str,
    heads: int,
    layers: int,
    tokens: str,
    channels: int,
    check: bool,
    once: int | None,
    json_path: Path | None,
) -> int:
    """Run what the options ask for; 1 if results disagree or a call fails, 2 if nothing could run."""
    names, ops = split(implementations), operations_of(operations, OPERATIONS)
    grid = Grid(
        numbers_of("--rows", rows, 4096),
        numbers_of("--windows", windows, 8),
        heads,
        layers,
        numbers_of("--tokens", tokens, 1 << 20),
        channels,
    )
    if channels % 3 or channels // 3 % 64:
        raise UnavailableError(f"--channels must be 3 parts of a multiple of 64; found {channels}")
    if json_path is not None:
        require_writable(json_path, "--json")
    out = console()
    bench = Bench(names, "cpu" if check else "cuda")
    if once is not None:
        return _once(out, bench, ops, grid, once)
    facts = _facts(bench)
    out.print(_heading(facts), markup=False)
    tables = []
    for op in ops:
        table = bench.table(op, CHECKED if check else grid, out)
        show(out, table)
        tables.append(table)
    if json_path is not None:
        write_json(json_path, {**facts, "tables": tables}, indented=True)
    entries = [entry for table in tables for row in table.rows for entry in row.entries.values()]
    if not entries:
        raise UnavailableError("no implementation has any of these operations here; see the lines above")
    return int(any(entry.problem for entry in entries))


class Bench:
    """Implementations on a device: a GPU with a clock, or the CPU, where calls are made and not timed."""

    def __init__(self, names: Sequence[str], device: str) -> None:
        self.clock: Clock | None = None
        self.torch_device = torch.device(device)
        if device == "cuda":
            if not torch.cuda.is_available():
                raise UnavailableError("bench kernels needs a CUDA GPU; found none (--check runs without)")
            self._devices = {"cuda": open_device("cuda")}
            self.clock = Clock()
        else:
            self._devices = dict(_cpu_devices())
        self.names = names
        self._found = {name: self._resolve(name) for name in names}

    def _resolve(self, name: str) -> tuple[Implementation, Device] | str:
        """An implementation and where it runs, or why it does not."""
        try:
            if self.clock is not None and name.endswith(":cute"):
                from impl.vllm.gpu import implementation

                return implementation(name), self._devices["cuda"]
            found = resolve(name)
            for kind, device in self._devices.items():
                if kind in found.devices:
                    return found, device
            require_device(found, next(iter(self._devices)))
        except UnavailableError as error:
            return str(error)
        raise AssertionError(f"{name} runs on {found.devices}, and on none of {self._devices.keys()}")

    def versions(self) -> dict[str, str]:
        """Per implementation its version, or why it cannot be had."""
        return {name: x if isinstance(x, str) else x[0].version for name, x in self._found.items()}

    def columns(self, op: str) -> Iterator[tuple[str, Subject | str, Device | None]]:
        """An operation's columns: name, the subject or why there is none, its device."""
        for name in self.names:
            found = self._found[name]
            if isinstance(found, str):
                yield name, found, None
                continue
            implementation, device = found
            try:
                for subject in subjects(op, name, implementation):
                    yield subject.name, subject, device
            except UnavailableError as error:
                yield name, str(error), None

    def table(self, op: str, grid: Grid, out: Console) -> Table:
        """Bind, compare and time every column at every size."""
        columns = list(self.columns(op))
        absent = {name: subject for name, subject, _ in columns if isinstance(subject, str)}
        present = [
            (subject, device) for _, subject, device in columns if isinstance(subject, Subject) and device
        ]
        rate = self.clock.copy_rate() if self.clock else None
        table = Table(op, tuple(name for name, _, _ in columns), absent, rate, [])
        if not present:
            return table
        with out.status(f"{op} ..") as status:
            for size in grid.sizes(op):
                status.update(f"{op} {size.label} ..")
                table.rows.append(self._row(size, present, rate, absent))
        return table

    def _row(
        self,
        size: Size,
        present: Sequence[tuple[Subject, Device]],
        rate: float | None,
        absent: dict[str, str],
    ) -> Row:
        sets = sets_of(size) if self.clock else _CHECK_SETS
        entries: dict[str, Entry] = {}
        bound: dict[str, list[Job]] = {}
        reference: Job | None = None
        total = 0
        for subject, device in present:
            inputs = build(size, self.torch_device, sets, odd=subject.odd)
            total = moved(inputs[0].call)
            entry = entries[subject.name] = Entry(subject.bytes(inputs[0].call))
            try:
                jobs = [bind(subject, device, x) for x in inputs]
                jobs[1:] = [replace(job, results={}) for job in jobs[1:]]
                reference = reference or jobs[0]
                entry.problem = difference(reference.results, jobs[0].results)
                if self.clock:
                    entry.us = self._time(subject, jobs)
                    entry.graph = subject.graph
            except UnavailableError as error:
                absent.setdefault(subject.name, f"{error} (first at {size.label})")
                del entries[subject.name]
                continue
            except Exception as error:  # what a kernel raises is told in its place
                entry.problem = f"{type(error).__name__}: {one_line(error, 200)}"
                continue
            bound[subject.name] = jobs
        if self.clock and (size.tokens or size.rows <= LAUNCH_ROWS):
            calls = [[job.call for job in jobs] for jobs in bound.values()]
            for name, (host, wall) in zip(bound, walls(calls), strict=True):
                entries[name].host_us, entries[name].wall_us = host, wall
        del bound, reference
        if self.clock:
            gc.collect()
            torch.cuda.empty_cache()
        return Row(
            size.label, msgspec.to_builtins(size), total, total / rate * 1e6 if rate else None, entries
        )

    def _time(self, subject: Subject, jobs: Sequence[Job]) -> float:
        assert self.clock is not None
        calls = [job.call for job in jobs]
        return self.clock.graph(calls) if subject.graph else self.clock.single(calls)


def bind(subject: Subject, device: Device, inputs: Inputs) -> Job:
    """Make the first call on a set, as the device would have it; on the CPU the direct call too."""
    device.share(inputs.views, written(inputs.call))
    with device.variants(0)[0].context():
        job = subject.bind(inputs)
        if device.name != "cuda":
            job.call()
    device.synchronize()
    return job


def _cpu_devices() -> Iterator[tuple[str, Device]]:
    """The emulator where it can be had: it is the cpu device and more."""
    yield "cpu", open_device("cpu")
    try:
        yield "emulator", open_device("emulator")
    except UnavailableError:
        return


@dataclass(frozen=True)
class _Once:
    """What ``--once`` calls."""

    subject: Subject
    device: Device
    size: Size


def _once(out: Console, bench: Bench, ops: Sequence[str], grid: Grid, count: int) -> int:
    """Call each column ``count`` times at each size, without a graph, between a profiler's start and stop."""
    chosen = CHECKED if bench.clock is None else grid
    wanted = [
        _Once(subject, device, size)
        for op in ops
        for _, subject, device in bench.columns(op)
        if isinstance(subject, Subject) and device
        for size in chosen.sizes(op)
    ]
    ran = [_call_once(out, bench, one, count) for one in wanted]
    if not any(ran):
        raise UnavailableError("no implementation has any of these operations here")
    return 0


def _call_once(out: Console, bench: Bench, one: _Once, count: int) -> bool:
    """Whether it could be had."""
    what = f"{one.size.op} {one.size.label}, {one.subject.name}"
    sets = min(count, sets_of(one.size)) if bench.clock else 1
    inputs = build(one.size, bench.torch_device, sets, odd=one.subject.odd)
    try:
        jobs = [bind(one.subject, one.device, x) for x in inputs]
    except UnavailableError as error:
        out.print(f"- {what}: {error}", markup=False)
        return False
    out.print(f"{what}: {count} calls", markup=False)
    if bench.clock:
        torch.cuda.profiler.start()
    with one.device.variants(0)[0].context():
        for i in range(count):
            jobs[i % sets].call()
    one.device.synchronize()
    if bench.clock:
        torch.cuda.profiler.stop()
    return True


def _facts(bench: Bench) -> dict[str, Any]:
    import triton

    return {
        "gpu": torch.cuda.get_device_name() if bench.clock else "",
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "implementations": bench.versions(),
    }


def _heading(facts: dict[str, Any]) -> str:
    where = facts["gpu"] or "no GPU: every call is made once, small, and nothing is timed"
    return f"kdafuzz bench kernels: {where}, torch {facts['torch']}, triton {facts['triton']}"
