"""Memory that a call keeps is a failure, and what only looks like it is none."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import ci.leaks
from ci.executor import Executor
from ci.leaks import TURNS, check_memory_too
from impl.contract import Implementation, UnavailableError
from impl.devices.base import Device
from oracle.case import Case
from oracle.judge import Problem, Verdict
from tests.meta.commands import CASE, plug_in

WRONG = Verdict(3.0, problems=(Problem("stray", text="8 bytes"),))
SUBJECT = Implementation("subject", {})


class Held:
    """An object that holds a mebibyte of a GPU's memory, as torch's allocator counts."""

    held = 0

    def __init__(self) -> None:
        Held.held += 1 << 20

    def __del__(self) -> None:
        Held.held -= 1 << 20


class Named:
    """A device, by its name."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A GPU whose allocator holds what the objects above hold."""
    told = lambda: {"allocated_bytes": {"all": {"current": Held.held}}}  # noqa: E731
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", told)
    gc.collect()
    gc.disable()
    yield monkeypatch
    gc.enable()
    Held.held = 0


def judged(patch: pytest.MonkeyPatch, *turns: Any, device: str = "cuda") -> tuple[Verdict, int]:
    """The verdict, and how many calls it took: each does its turn, and the last goes on."""
    count = 0

    def check(case: Case, implementation: Implementation, device: Device, watch: object = None) -> Verdict:
        nonlocal count
        assert (case, implementation) == (CASE, SUBJECT)
        count += 1
        verdict = turns[min(count, len(turns)) - 1]()
        return verdict if isinstance(verdict, Verdict) else Verdict(0.5, {"out": 0.5}, path="a")

    patch.setattr(ci.leaks, "check", check)
    return check_memory_too(CASE, SUBJECT, Named(device)), count  # type: ignore[arg-type]


def nothing() -> None:
    """A call that keeps nothing."""


def a_cycle() -> None:
    """A call whose garbage only the collector finds."""
    held = Held()
    held.itself = held  # type: ignore[attr-defined]


def test_what_grows_with_every_call_is_a_leak(gpu: pytest.MonkeyPatch) -> None:
    kept: list[Held] = []
    verdict, count = judged(gpu, lambda: kept.append(Held()))
    assert count == 1 + TURNS
    (problem,) = verdict.problems
    assert problem.kind == "leak"
    grown = [1 << 20] * (TURNS - 1)
    assert (
        problem.describe()
        == f"leak: every call of this case keeps GPU memory: {grown} bytes, one after the other"
    )
    assert (verdict.ratio, verdict.ratios, verdict.path) == (0.5, {"out": 0.5}, "a")


@pytest.mark.parametrize("calls", [1, 2, TURNS - 1, TURNS])
def test_what_grows_for_some_calls_is_none(gpu: pytest.MonkeyPatch, calls: int) -> None:
    """A table for each of some variants is made once; what is kept in the end is what counts."""
    kept: list[Held] = []
    verdict, count = judged(gpu, *[lambda: kept.append(Held())] * calls, nothing)
    assert verdict.ok
    assert count == 1 + TURNS


def test_what_the_collector_finds_is_none(gpu: pytest.MonkeyPatch) -> None:
    verdict, count = judged(gpu, a_cycle)
    assert verdict.ok
    assert count == 1 + TURNS


def test_a_call_that_keeps_nothing_runs_once(gpu: pytest.MonkeyPatch) -> None:
    """Also where there is less than before."""
    kept = [Held()]
    assert judged(gpu, nothing) == (Verdict(0.5, {"out": 0.5}, path="a"), 1)
    assert judged(gpu, kept.clear)[1] == 1


def test_a_wrong_result_counts_for_more(gpu: pytest.MonkeyPatch) -> None:
    """Of the first call, and of any later one."""
    kept: list[Held] = []

    def wrong() -> Verdict:
        kept.append(Held())
        return WRONG

    assert judged(gpu, wrong) == (WRONG, 1)
    assert judged(gpu, lambda: kept.append(Held()), nothing, wrong) == (WRONG, 3)


def test_other_devices_are_not_watched(gpu: pytest.MonkeyPatch) -> None:
    kept: list[Held] = []
    for device in ("cpu", "emulator"):
        verdict, count = judged(gpu, lambda: kept.append(Held()), device=device)
        assert verdict.ok
        assert count == 1


def test_what_a_call_does_not_take(gpu: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise UnavailableError("not this")

    with pytest.raises(UnavailableError, match="not this"):
        judged(gpu, refuse)


SHORT = """
from pathlib import Path
from zoo_outside import _made, _raise

def _short(after, of, text):
    calls = 0
    def step(given, out):
        nonlocal calls
        calls += 1
        return _raise(RuntimeError(text)) if calls > after and out.shape[2] >= of else out
    return _made(step)

def _first():
    Path("mark").touch()
    raise RuntimeError("CUDA out of memory")

def second(): return _short(1, 0, "CUDA out of memory. Tried to allocate 2.00 GiB")
def third(): return _short(2, 0, "CUDA error: out of memory")
def always(): return _short(0, 2, "CUDA error: out of memory")
def at_first(): return _made(lambda given, out: out if Path("mark").exists() else _first())
def other(): return _short(1, 0, "out of luck")
"""
SMALL = CASE
LARGE = msgspec.structs.replace(CASE, call=msgspec.structs.replace(CASE.call, heads=2))


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Implementations that run out of memory."""
    plug_in(tmp_path)
    (tmp_path / "short_outside.py").write_text(SHORT)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "cases", "kinds", "text"),
    [
        ("second", (SMALL, SMALL), ("", "leak"), "that had judged 1 cases; in a new process"),
        ("third", (SMALL, SMALL, SMALL), ("", "", "leak"), "that had judged 2 cases; in a new process"),
        ("always", (LARGE, SMALL, LARGE), ("raised", "", "raised"), "CUDA error: out of memory"),
        ("at_first", (SMALL, SMALL), ("raised", ""), ""),
        ("other", (SMALL, SMALL), ("", "raised"), "out of luck"),
    ],
)
def test_memory_that_runs_out(
    short: None, name: str, cases: tuple[Case, ...], kinds: tuple[str, ...], text: str
) -> None:
    """It is the case's own if it runs out in a new process too, and else of those before it."""
    with Executor(f"short_outside:{name}", "cpu") as executor:
        verdicts = [executor.check(case) for case in cases]
    assert tuple("".join(problem.kind for problem in verdict.problems) for verdict in verdicts) == kinds
    assert text in " ".join(problem.text for problem in verdicts[-1].problems)
