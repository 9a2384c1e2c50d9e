"""The benchmarks of the suite itself: where time goes, how it grows, what several processes do."""

import json
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import impl.observe
import oracle.judge
from ci.bench import growth
from ci.bench.calls import OPERATIONS, PREFILLS
from ci.bench.growth import Curve, case_of, perfect, slope
from ci.bench.pace import Task, pace
from ci.bench.stopwatch import PHASES, Stopwatch
from ci.check import check
from ci.processes import resident
from impl.bindings import BINDINGS
from impl.contract import UnavailableError
from impl.devices.registry import open_device
from impl.registry import resolve
from oracle.expect import expect
from oracle.judge import judge
from oracle.tracked import arithmetic
from oracle.values import build
from tests.meta.commands import CASE, Result, here, plug_in
from tests.meta.zoo import right

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """``kdafuzz bench`` in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: here(monkeypatch, capsys, tmp_path, "bench", *arguments)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that stands still until it is told: ``now`` in seconds."""
    told = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: told.now)
    return told


def test_what_runs_inside_counts_for_itself_alone(clock: Any) -> None:
    stopwatch = Stopwatch()

    def inner() -> None:
        clock.now += 5.0

    def outer() -> None:
        clock.now += 1.0
        stopwatch.around("run", inner)()
        clock.now += 2.0

    stopwatch.around("memory", outer)()
    clock.now += 100.0  # in no phase
    stopwatch.around("memory", outer)()
    assert stopwatch.seconds == {**dict.fromkeys(PHASES, 0.0), "memory": 6.0, "run": 10.0}


def test_a_phase_ends_with_an_exception(clock: Any) -> None:
    stopwatch = Stopwatch()

    def fails() -> None:
        clock.now += 3.0
        raise RuntimeError("no such luck")

    with pytest.raises(RuntimeError), stopwatch.phase("other"):
        stopwatch.around("run", fails)()
    with stopwatch.phase("judge"):
        clock.now += 1.0
    assert (stopwatch.seconds["run"], stopwatch.seconds["judge"]) == (3.0, 1.0)


def test_every_phase_of_a_case_is_seen() -> None:
    """And no phase afterwards: the functions are what they were."""
    stopwatch, device, implementation = Stopwatch(), open_device("cpu"), resolve("triton")
    before = dict(BINDINGS), oracle.judge.judge, impl.observe.observe
    with stopwatch.watching(device):
        assert check(CASE, implementation, device).ok
    assert all(seconds > 0.0 for seconds in stopwatch.seconds.values())
    assert before == (dict(BINDINGS), oracle.judge.judge, impl.observe.observe)
    seen = dict(stopwatch.seconds)
    assert check(CASE, implementation, device).ok
    assert stopwatch.seconds == seen


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5])
def test_slope(power: float) -> None:
    assert slope([2, 4, 8], [7.0 * x**power for x in (2, 4, 8)]) == pytest.approx(power)


def test_the_exponent_is_that_of_large_sizes() -> None:
    """Small ones cost what every case costs."""
    curve = Curve("verify", "rows", (1, 2, 4, 8), {"oracle": (5.0, 5.0, 6.0, 12.0)})
    assert curve.exponent("oracle") == pytest.approx(1.0)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_perfect_observation_passes(operation: str) -> None:
    """And one that differs in a defined cell does not."""
    case = case_of(growth._base(operation))
    values = build(case)
    expected = expect(case, values, arithmetic("sequential-fp32", "cpu"))
    seen = perfect(case, values, expected)
    assert judge(expected, seen).ok
    name, cells = next(iter(expected.cells.items()))
    seen.after[name] = torch.where(cells.written, torch.full_like(seen.after[name], 3e4), seen.after[name])
    assert not judge(expected, seen).ok


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_size_is_varied(operation: str) -> None:
    named = dict(growth._axes(operation, 3))
    wanted = {"tokens", "channels"} if operation in PREFILLS else {"rows", "window", "heads"}
    assert named.keys() == wanted | ({"layers"} if operation == "commit" else set())
    for size, values in named.items():
        assert all(later == 2 * earlier for earlier, later in pairwise(values)), size


def test_growth(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table and the same as JSON: here of a suite that takes one millisecond a row."""
    monkeypatch.setattr(
        growth, "_seconds", lambda size, repeats: dict.fromkeys(growth.PARTS, 1e-3 * size.rows)
    )
    done = run("growth", "--op", "verify", "--doublings", "4", "--json", "found.json")
    assert done.code == 0
    assert "4 .. 32 │ 32.0 (1.00)" in done.out
    curves = {c["size"]: c for c in json.loads((tmp_path / "found.json").read_text())["curves"]}
    assert curves["rows"]["exponents"]["judge"] == pytest.approx(1.0)
    assert curves["heads"]["exponents"]["judge"] == pytest.approx(0.0)
    assert curves["rows"]["values"] == [4, 8, 16, 32]


def test_examples(run: Run, tmp_path: Path) -> None:
    done = run(
        *("examples", "--device", "cpu", "--op", "conv_update", "--examples", "10"),
        *("--impl", "triton", "--jobs", "1,2", "--json", "found.json"),
    )
    assert done.code == 0, done.err
    speeds = {s["operation"]: s for s in json.loads((tmp_path / "found.json").read_text())["speeds"]}
    for speed in speeds.values():
        assert speed["examples"] == 10
        assert speed["draw"] > 0.0
        assert speed["phases"].keys() == set(PHASES)
        assert [each["jobs"] for each in speed["paces"]] == [1, 2]
        assert all(each["early"] > 1 << 26 and each["gpu"] is None for each in speed["paces"])


def test_an_absent_operation_is_a_line(run: Run, tmp_path: Path) -> None:
    plug_in(tmp_path)
    done = run(
        "examples", "--device", "cpu", "--op", "commit", "--examples", "10", "--impl", "zoo_outside:right"
    )
    assert done.code == 2
    assert "- zoo_outside:right commit:" in done.out


def test_a_failing_example_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    task = Task("zoo_outside:large", "verify", "cpu", right().domain, 100, 0, 0, 60.0)
    with pytest.raises(UnavailableError, match="an example fails, see kdafuzz fuzz: "):
        pace(task, 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("examples", "--op", "sing"), "unknown operation 'sing'"),
        (("examples", "--jobs", "0"), "--jobs takes a list of numbers from 1 to 512; found '0'"),
        (("examples", "--impl", "nothing", "--device", "cpu"), "unknown implementation 'nothing'"),
        (("growth", "--op", "serve"), "unknown operation 'serve'"),
        (("growth", "--jobs", "x"), "--jobs takes a list of numbers from 1 to 512; found 'x'"),
    ],
)
def test_refusals(arguments: tuple[str, ...], text: str, run: Run) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert text in done.err
    assert done.err.count("\n") == 1


def test_memory_of_a_process() -> None:
    assert resident(0) == 0
    assert resident(1 << 30) == 0
    assert 1 << 26 < resident(os.getpid()) < 1 << 36
