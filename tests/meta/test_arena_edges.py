"""The arena end to end: changes through a device reach the judge; fences stop the process; empty tensors."""

import subprocess
import sys
from typing import Literal

import pytest
import torch

from impl.arena import Arena
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.expectation import Expected, Observation, Stray
from oracle.judge import judge
from oracle.layout import Fence, Layout, Page
from oracle.values import build
from tests.meta.test_arena import LAID_OUT, HeapDevice, HeapMemory


def opened(case: Case) -> tuple[Arena, HeapMemory]:
    device = HeapDevice()
    return Arena(case, build(case), device), device.last


def test_a_byte_changed_on_the_device_is_a_problem_wherever_it_lies() -> None:
    arena, memory = opened(LAID_OUT)
    nothing = Expected({})
    before = arena.dense(arena.before)
    for part in memory.parts:
        for at in range(0, len(part), 61):
            part[at] ^= 1
            arena.finish()
            seen = Observation(before, arena.dense(arena.after), strays=arena.strays())
            (problem,) = judge(nothing, seen).problems
            assert problem.kind in ("frame", "stray")
            part[at] ^= 1
    arena.finish()
    assert judge(nothing, Observation(before, arena.dense(arena.after), strays=arena.strays())).ok


def test_writes_through_a_view_stay_in_its_tensor() -> None:
    arena, _ = opened(LAID_OUT)
    before = arena.dense(arena.before)
    for name, view in arena.views().items():
        view.fill_(1)
        arena.finish()
        after = arena.dense(arena.after)
        assert arena.strays() == ()
        assert bool((after[name] == 1).all())
        assert torch.equal(before["q"].isnan(), after["q"].isnan()) or name == "q"
        view.copy_(before[name])


def test_strays_count_per_segment_and_name_a_neighbour() -> None:
    arena, memory = opened(LAID_OUT)
    place = arena.plan.places["v"]
    memory.parts[place.segment][place.offset - 3 : place.offset] ^= 1
    memory.parts[-1][0] ^= 1
    arena.finish()
    first, second = arena.strays()
    assert first == Stray("v", -3, 3)
    assert (second.count, arena.plan.places[second.near].segment) == (1, len(memory.parts) - 1)


@pytest.mark.parametrize("records", ["row", "slot"])
@pytest.mark.parametrize("fence", ["none", "below", "above"])
def test_empty_tensors_have_places(records: Literal["row", "slot"], fence: Fence) -> None:
    call = Verify(
        heads=2, key_dim=3, value_dim=1, window=1, pool=1, qlens=(), slots=(), ids=(), records=records
    )
    layouts = {name: Layout(fence=fence) for name in ("out", "v", "correction", "state_indices")}
    case = Case(call=call, layouts=layouts, pages=(Page(("q", "k"), tail=3),))
    arena, _ = opened(case)
    views = arena.views()
    assert {name for name, view in views.items() if not view.numel()} >= {
        "q",
        "k",
        "v",
        "out",
        "state_indices",
    }
    for name, spec in call.tensors().items():
        assert tuple(views[name].shape) == spec.shape
        views[name].fill_(0)
    arena.finish()
    assert arena.strays() == ()


CHILD = """
import ctypes, os, sys
from impl.arena import Arena
from impl.devices.cpu import CpuMemory, PAGE, _Mapping
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.layout import Layout, Page
from oracle.values import build

class Device:
    name = "mapped"
    def memory(self, segments):
        return CpuMemory(segments, [_Mapping(-(-s.size // PAGE) * PAGE) for s in segments])
    def synchronize(self):
        pass

for line in sys.argv[1:]:
    name, fence, where, how, paged = line.split()
    call = Verify(heads=2, key_dim=3, value_dim=5, window=2, pool=3, qlens=(2, 1), slots=(2, 1),
                  ids=(0, 1), capacity=2, activation="bfloat16")
    layout = Layout(fence=fence, gaps=(1,) if name == "state_indices" else ())
    case = Case(call=call, layouts={} if paged == "paged" else {name: layout},
                pages=(Page((name,), fence=fence),) if paged == "paged" else ())
    device = Device()
    arena = Arena(case, build(case), device)
    view = arena.views()[name]
    first = view.data_ptr()
    last = first + (view.stride(0) * (view.shape[0] - 1) + view[0].numel()) * view.itemsize - 1
    byte = {"below": first - 1, "above": last + 1, "first": first, "last": last}[where]
    pid = os.fork()
    if pid == 0:
        ctypes.string_at(byte, 1) if how == "read" else ctypes.memset(byte, 0, 1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""

PROBES = {
    "v below below read alone": -11,
    "v above above read alone": -11,
    "v below first read alone": 0,
    "v above last write alone": 0,
    "state_indices above above write alone": -11,
    "state_indices above last write alone": 0,
    "out below below write alone": -11,
    "out above below write alone": 0,
    "state above above read paged": -11,
    "state below below write paged": -11,
    "state above last write paged": 0,
}
"""(tensor, fence, byte touched, how, in a page) and the exit status of a process that does."""


def test_one_byte_past_a_fence_stops_the_process_and_no_other_does() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *PROBES], capture_output=True, text=True, timeout=120, check=True
    )
    found = dict(zip(PROBES, map(int, done.stdout.split()), strict=True))
    assert found == PROBES
