"""The emulator's host side: tensors shown as CUDA's, launches captured, kernels kept on disk, schedules."""

import ctypes
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("tvm_ffi", reason="needs the extra kdafuzz[cute]")
pytest.importorskip("cutlass.cute", reason="needs the extra kdafuzz[cute]")

from impl.contract import Implementation, UnavailableError
from impl.cute.emulator import compiled, run, settings
from impl.cute.emulator.compiled import Emulated, emulated
from impl.cute.emulator.dlpack import as_cuda
from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.launch import Allocation, Launch, Report, Schedule
from impl.cute.emulator.settings import parse_schedules
from impl.devices.interpreter import CompilerLoadedError
from impl.devices.registry import default, open_device
from impl.observe import observe, written
from impl.vllm import cache
from oracle.calls.commit import Commit
from oracle.calls.fused_verify import FusedVerify
from oracle.calls.verify import Verify
from oracle.case import Case, Graph
from oracle.judge import Problem
from oracle.layout import Layout
from tests.meta import zoo

ROOT = Path(__file__).resolve().parents[2]
RELEASE = "0.33.0"
USER_CACHE = os.environ.get("KDAFUZZ_CACHE")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this module's own."""
    made = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KDAFUZZ_CACHE", str(made))
        yield made


@pytest.fixture(scope="module")
def doubling(folder: Path) -> Emulated:
    from tests.meta.cute_kernels import doubling as make

    return emulated({"kernel": "doubling"}, make, ("x", "y"), ("y",))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches that reach the emulator; none is executed."""
    seen: list[Launch] = []

    def record(program: object, launch: Launch, engine: str | None = None) -> Report:
        seen.append(launch)
        return Report(len(seen))

    monkeypatch.setattr(run, "run", record)
    return seen


# Tensors


def address(shown: Any) -> int:
    """Where a tensor of tvm-ffi starts; not all versions have ``data_ptr``."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = shown.__dlpack__()
    managed = pointer(capsule, b"dltensor")  # data, device, ndim, dtype, shape, strides, byte_offset
    data = ctypes.c_void_p.from_address(managed).value or 0
    return data + ctypes.c_uint64.from_address(managed + 40).value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((6,), (1,)),
        ((2, 3), (3, 1)),
        ((2, 3), (1, 5)),
        ((1, 4, 1), (100, 1, 7)),
        ((3,), (0,)),
        ((0, 3), (3, 1)),
        ((), ()),
    ],
)
def test_a_tensor_keeps_all_but_its_device(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    tensor = torch.empty(200, dtype=dtype)[3:].as_strided(shape, strides, 3)
    shown = as_cuda(tensor)
    assert (tuple(shown.shape), tuple(shown.strides)) == (shape, strides)
    assert str(shown.dtype) == str(dtype).removeprefix("torch.")
    assert (shown.device.type, shown.device.index) == ("cuda", 0)
    assert address(shown) == tensor.data_ptr()


def test_a_shown_tensor_holds_its_memory_as_long_as_it_lives() -> None:
    memory = np.arange(4, dtype=np.float32)
    alive = weakref.ref(memory)
    shown = as_cuda(torch.from_numpy(memory))
    del memory
    gc.collect()
    assert alive() is not None
    del shown
    gc.collect()
    assert alive() is None


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="in host memory; found one on meta"):
        as_cuda(torch.empty(1, device="meta"))


# Launches


def test_the_host_code_launches(doubling: Emulated, launches: list[Launch]) -> None:
    x, y = torch.arange(70.0), torch.zeros(70)
    with settings.using(schedule=Schedule("priority", 5), seed=9, resident=3):
        doubling(x, y, 1024, 3)
    (launch,) = launches
    assert (launch.grid, launch.block, launch.shared_bytes) == ((3, 1, 1), (32, 1, 1), 1024)
    assert (launch.schedule, launch.seed, launch.resident) == (Schedule("priority", 5), 9, 3)
    assert launch.functions == "exact-sm90"
    assert doubling.reports == (Report(1),)
    # A one-dimensional tensor is its address and its length.
    words = [offset for _, offset, size in doubling.program.signature if size == 16]
    read = [int.from_bytes(launch.params[at : at + 8], "little") for at in words]
    assert read == [x.data_ptr(), y.data_ptr()]
    assert [int.from_bytes(launch.params[at + 8 : at + 12], "little") for at in words] == [70, 70]


def test_memory_is_what_the_settings_say_and_the_other_tensors(
    doubling: Emulated, launches: list[Launch]
) -> None:
    whole, y = torch.zeros(80), torch.zeros(70)
    known = Allocation("all", whole.data_ptr(), 320, writable=False)
    with settings.using(allocations=(known,)):
        doubling(whole[4:74], y, 0, 3)
        doubling(y, torch.zeros(70), 0, 3)
    assert launches[0].allocations == (known, Allocation("y", y.data_ptr(), 280))
    first, second = launches[1].allocations[1:]
    assert (first.name, first.writable, second.name, second.writable) == ("x", False, "y", True)


def test_empty_tensors_are_no_memory(doubling: Emulated, launches: list[Launch]) -> None:
    doubling(torch.zeros(0), torch.zeros(0), 0, 1)
    assert launches[0].allocations == ()


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((), TypeError, "Expects 4 parameters"),
        ((torch.zeros(4), torch.zeros(4).int(), 0, 1), ValueError, "argument #1 .*expected dtype=float32"),
        ((torch.zeros(2, 2), torch.zeros(4), 0, 1), ValueError, "argument #0 .*expected ndim=1"),
        ((torch.zeros(8)[::2], torch.zeros(4), 0, 1), ValueError, "strides.* argument #0 .*expected to be 1"),
        ((torch.zeros(8)[1:], torch.zeros(4), 0, 1), ValueError, "argument #0 .*expected data alignment=16"),
        ((torch.zeros(4), torch.zeros(4), 0, 0), RuntimeError, "empty or too large grid.*CUDA error 9"),
        ((torch.zeros(4), torch.zeros(4), 232449, 1), RuntimeError, "more dynamic shared.*CUDA error 1"),
    ],
)
def test_what_the_host_code_refuses_is_raised(
    doubling: Emulated,
    launches: list[Launch],
    arguments: tuple[Any, ...],
    kind: type[Exception],
    text: str,
) -> None:
    with pytest.raises(kind, match=text):
        doubling(*arguments)
    assert launches == []


def test_what_a_launch_raises_comes_through(doubling: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = EmulatorError("race", "what", 7, "ld.shared", (0, 0, 0), 1)

    def fail(*_: object) -> Report:
        raise wrong

    monkeypatch.setattr(run, "run", fail)
    with pytest.raises(EmulatorError) as caught:
        doubling(torch.zeros(4), torch.zeros(4), 0, 1)
    assert caught.value is wrong
    assert str(wrong) == "race: what at PTX line 7: ld.shared (CTA (0, 0, 0), warp 1)"


def test_clusters_are_refused(launches: list[Launch]) -> None:
    from tests.meta.cute_kernels import clustered

    function = emulated({"kernel": "clustered"}, clustered)
    with pytest.raises(EmulatorError, match=r"unsupported: a launch in clusters of \(2, 1, 1\) CTAs"):
        function(torch.zeros(64), torch.zeros(64))
    assert launches == []


def test_the_kernel_runs(doubling: Emulated) -> None:
    x, y = torch.arange(70.0), torch.full((96,), -1.0)
    with settings.using(engine="reference"):
        doubling(x, y[:70], 0, 3)
        assert torch.equal(y, torch.cat((2.0 * x, torch.full((26,), -1.0))))
        with pytest.raises(EmulatorError, match=r"bounds: .* past y") as caught:
            doubling(x, torch.zeros(64), 0, 3)
    assert caught.value.cta == (2, 0, 0)


# The cache

LOAD = """
import sys, time
from impl.cute.emulator.compiled import emulated
def make():
    if {build}:
        from tests.meta.cute_kernels import doubling
        return doubling()
    raise AssertionError("compiled again")
function = emulated({{"kernel": {name!r}}}, make)
print("cutlass" in sys.modules, len(function.ptx))
"""


def _load(name: str, *, build: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOAD.format(name=name, build=build)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _told(child: subprocess.Popen[str]) -> str:
    out, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    return out.strip()


def test_a_second_process_loads_it_without_the_dsl(doubling: Emulated) -> None:
    assert _told(_load("doubling", build=False)) == f"False {len(doubling.ptx)}"


def test_processes_that_build_the_same_at_once_agree(folder: Path) -> None:
    before = {entry.name for entry in folder.glob("cute-*")}
    children = [_load("at once", build=True) for _ in range(3)]
    lengths = {_told(child).split()[1] for child in children}
    assert len(lengths) == 1
    made = {entry.name for entry in folder.glob("cute-*")} - before
    assert len(made) == 1
    assert cache.cached(made.pop()) is not None
    assert _told(_load("at once", build=False)).startswith("False ")


def test_a_damaged_entry_is_made_anew(folder: Path) -> None:
    from tests.meta.cute_kernels import doubling as make

    before = {entry.name for entry in folder.glob("cute-*")}
    text = emulated({"kernel": "damaged"}, make).ptx
    (name,) = {entry.name for entry in folder.glob("cute-*")} - before
    (folder / name / "kernel.ptx").write_text("torn")
    assert cache.cached(name) is None
    assert emulated({"kernel": "damaged"}, make).ptx == text


def test_other_facts_are_another_kernel() -> None:
    keys = {compiled._key(facts) for facts in ({"a": "1"}, {"a": "2"}, {"b": "1"}, {"a": "1", "b": "1"})}
    assert len(keys) == 4


def test_what_a_kernel_fails_to_compile_with_is_raised_and_kept_nowhere(folder: Path) -> None:
    def make() -> Any:
        raise ZeroDivisionError("in the kernel")

    before = sorted(folder.iterdir())
    with pytest.raises(ZeroDivisionError, match="in the kernel"):
        emulated({"kernel": "broken"}, make)
    assert [path for path in folder.iterdir() if path not in before and not path.name.endswith(".lock")] == []


# Schedules and the device


def test_schedules_are_read() -> None:
    found = parse_schedules("eager, lazy,priority:7,priority,eager", 12)
    assert found == (Schedule("eager"), Schedule("lazy"), Schedule("priority", 7), Schedule("priority", 12))
    for text in ("", "eager:1", "priority:", "priority:-1", "soon", f"priority:{1 << 64}"):
        with pytest.raises(ValueError, match="schedule"):
            parse_schedules(text, 0)


def test_settings_hold_for_a_stretch_of_code() -> None:
    before = settings.current()
    with settings.using(ctas=9):
        with settings.using(resident=1):
            assert (settings.current().ctas, settings.current().resident) == (9, 1)
        assert settings.current().resident == before.resident
    assert settings.current() is before


VERIFY = Case(
    call=Verify(
        heads=2, key_dim=4, value_dim=4, window=2, pool=3, qlens=(2, 1), slots=(1, 2), ids=(0, 1), capacity=2
    ),
    seed=5,
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in (settings.SCHEDULES_VARIABLE, settings.FUNCTIONS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    try:
        return open_device("emulator")
    except (UnavailableError, CompilerLoadedError) as error:
        pytest.skip(f"needs the emulator; found: {error}")


def subject(step: Callable[[Any, Any], object], path: str = "") -> Implementation:
    """A right verify that gives ``step`` its output and the states at the end."""

    def verify(
        q: Any, k: Any, v: Any, raw_g: Any, raw_beta: Any, A_log: Any, dt_bias: Any, lower_bound: Any,
        checkpoint_state: Any, records: Any, query_start_loc: Any, state_indices: Any, spec_query_len: Any,
        out: Any = None,
    ) -> Any:  # fmt: skip
        given = (q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, checkpoint_state, records)
        result = zoo.compute(*given, query_start_loc, state_indices, spec_query_len, out)
        step(result, checkpoint_state)
        return result

    return Implementation("subject", {"verify": verify}, devices=("emulator",), path=lambda: path)


def test_a_case_runs_under_every_schedule(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[settings.Settings] = []
    found = observe(VERIFY, subject(lambda *_: seen.append(settings.current()), "somewhere"), device)
    assert (found.raised, found.differs, found.path, found.device) == ("", "", "somewhere", "emulator")
    assert [str(each.schedule) for each in seen] == ["eager", "lazy", "priority:5"]
    monkeypatch.setenv(settings.SCHEDULES_VARIABLE, "lazy,priority:8")
    names = [variant.name for variant in open_device("emulator").variants(1)]
    assert names == ["lazy ctas=8", "priority:8 ctas=1"]
    monkeypatch.setenv(settings.SCHEDULES_VARIABLE, "soon")
    with pytest.raises(UnavailableError, match=r"device emulator: schedules are .* found 'soon'"):
        open_device("emulator")


def test_every_case_runs_in_grids_of_every_size(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases have them in turn, so that each meets each schedule, and a run of one schedule has them all."""

    def grids(seed: int) -> list[int]:
        seen: list[int] = []
        case = msgspec.structs.replace(VERIFY, seed=seed)
        observe(case, subject(lambda *_: seen.append(settings.current().ctas)), open_device("emulator"))
        return seen

    assert [sorted(grids(seed)) for seed in range(3)] == [[1, 3, 8]] * 3
    assert [sorted(column) for column in zip(*map(grids, range(3)), strict=True)] == [[1, 3, 8]] * 3
    monkeypatch.setenv(settings.SCHEDULES_VARIABLE, "lazy")
    assert sorted(grid for seed in range(3) for grid in grids(seed)) == [1, 3, 8]


def test_the_arithmetic_is_the_same_under_every_schedule(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[settings.Settings] = []
    monkeypatch.setenv(settings.FUNCTIONS_VARIABLE, "perturbed")
    observe(VERIFY, subject(lambda *_: seen.append(settings.current())), open_device("emulator"))
    assert [(each.functions, each.seed) for each in seen] == [("perturbed", 5)] * 3
    monkeypatch.setenv(settings.FUNCTIONS_VARIABLE, "exact")
    with pytest.raises(UnavailableError, match=r"KDAFUZZ_FUNCTIONS must be one of .* found 'exact'"):
        open_device("emulator")


def test_what_is_missing_is_named(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled.why_absent() == ""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UnavailableError, match="need a C compiler; install cc"):
        open_device("emulator")
    monkeypatch.setattr(compiled, "_versions", lambda: {"nvidia-cutlass-dsl": "", "apache-tvm-ffi": "1"})
    with pytest.raises(UnavailableError, match=r"need nvidia-cutlass-dsl; install kdafuzz\[cute\]"):
        open_device("emulator")


def test_every_schedule_starts_from_the_same_memory(device: Any) -> None:
    found = observe(VERIFY, subject(lambda _, state: state[1].mul_(2.0)), device)
    assert (found.raised, found.differs) == ("", "")
    assert torch.equal(found.after["state"][1], found.before["state"][1] * 2.0)


def test_bytes_that_depend_on_the_schedule_are_a_problem(device: Any) -> None:
    from ci.check import check

    def step(out: torch.Tensor, _: object) -> None:
        if settings.current().schedule.mode == "lazy":
            out[0, 1, 0, 2] += 1.0

    call = VERIFY.call
    assert isinstance(call, Verify)
    assert call.own_out
    found = observe(VERIFY, subject(step), device)
    assert found.differs == (
        "schedules eager ctas=1 and lazy ctas=3 leave different bytes, "
        "first at out[1, 0, 2], 1 of its 24 elements"
    )
    (problem,) = check(VERIFY, subject(step), device).problems
    assert (problem.kind, problem.text) == ("schedule", found.differs)


def test_so_are_those_that_the_callee_allocated(device: Any) -> None:
    """Of these, only defined cells: what lies in the others is nobody's."""
    from ci.check import check

    case = Case(call=msgspec.structs.replace(VERIFY.call, own_out=False, tail=1), seed=5)

    def depends(token: int) -> tuple[Problem, ...]:
        def step(out: torch.Tensor, _: object) -> None:
            out[0, 3:] = 0.0
            if settings.current().schedule.mode == "lazy":
                out[0, token, 0, 2] += 1.0

        return check(case, subject(step), device).problems

    (problem,) = depends(1)
    assert problem.kind == "schedule"
    assert problem.text == (
        "schedules eager ctas=1 and lazy ctas=3 return different bytes, "
        "first at out[1, 0, 2], 1 of its 32 elements"
    )
    assert depends(3) == ()


def test_an_error_names_its_schedule(device: Any) -> None:
    def step(out: torch.Tensor, _: object) -> None:
        if settings.current().schedule.mode == "priority":
            raise EmulatorError("bounds", "too far", 3, "ld.global", (1, 0, 0), 2)

    found = observe(VERIFY, subject(step), device)
    assert found.raised.startswith(
        "EmulatorError: bounds: too far at PTX line 3: ld.global (CTA (1, 0, 0), warp 2) (at "
    )
    assert found.raised.endswith("(schedule priority:5 ctas=8)")
    assert "\n" not in found.raised


def test_a_replay_runs_twice_under_a_schedule(device: Any) -> None:
    runs: list[Schedule] = []
    case = Case(call=VERIFY.call, relation=Graph())
    found = observe(case, subject(lambda *_: runs.append(settings.current().schedule)), device, replayed=True)
    assert found.raised == ""
    assert [str(schedule) for schedule in runs] == ["eager"] * 2 + ["lazy"] * 2 + ["priority:0"] * 2


def test_kernels_may_access_the_tensors_of_the_call(device: Any) -> None:
    seen: list[tuple[Allocation, ...]] = []
    case = Case(call=VERIFY.call, layouts={"q": Layout(offset=3, gaps=(5, 0, 0))})
    observe(case, subject(lambda *_: seen.append(tuple(settings.current().allocations))), device)
    allocations = {each.name: each for each in seen[0]}
    assert allocations.keys() == case.call.tensors().keys()
    # Three tokens of 2 x 4 elements, 5 apart.
    q = case.call.tensors()["q"]
    assert allocations["q"].size == (2 * 13 + 8) * q.itemsize


COMMIT = Commit(
    heads=1, key_dim=128, value_dim=128, window=2, pool=4, channels=8, state_len=4, capacity=2,
    qlens=(2, 1), slots=(1, 2), ids=(0, 1), accepted=(2, 1), activation="bfloat16", state="bfloat16",
    conv="bfloat16",
)  # fmt: skip
FUSED = FusedVerify(
    heads=1, window=2, pool=4, capacity=2, qlens=(2, 1), slots=(1, 2), ids=(0, 1), accepted=(2, 1)
)


def test_what_a_call_may_write() -> None:
    plan = {"conv_state.0", "state.0"}
    assert written(COMMIT) == plan
    assert written(FUSED) == {"conv_state", "correction", "key_gate", "out"}
    assert written(VERIFY.call) == VERIFY.call.tensors().keys()


def test_the_emulator_is_the_device_of_cute_kernels() -> None:
    assert default(("vllm@1:cute", "vllm:cute")) == "emulator"
    assert default(("vllm@1:cute", "triton")) != "emulator"
    assert default() != "emulator"


# The shipped kernels


@pytest.fixture
def shipped(folder: Path, device: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Implementation]:
    """Makes the implementation of the release's CuTe kernels; skips where the release is not at hand."""
    name = f"release-{RELEASE}"
    if not (folder / name).exists():
        with monkeypatch.context() as patch:
            if USER_CACHE is None:
                patch.delenv("KDAFUZZ_CACHE")
            else:
                patch.setenv("KDAFUZZ_CACHE", USER_CACHE)
            found = cache.cached(name)
        if found is None:
            pytest.skip(f"needs vLLM {RELEASE} in the cache; found none")
        (folder / name).symlink_to(found)
    monkeypatch.delenv("KDAFUZZ_CUTE_ARCH", raising=False)

    def made() -> Implementation:
        from impl.vllm.adapter import implementation

        return implementation(f"vllm@{RELEASE}:cute")

    return made


def test_the_shipped_commit_launches(
    shipped: Callable[[], Implementation], device: Any, launches: list[Launch]
) -> None:
    implementation = shipped()
    assert implementation.devices == ("emulator",)
    found = observe(Case(call=COMMIT), implementation, device)
    assert (found.raised, found.path) == ("", "cute")
    assert [str(launch.schedule) for launch in launches] == ["eager", "lazy", "priority:0"]
    assert {launch.functions for launch in launches} == {"rounded"}
    assert launches[0].grid == (1, 2, 1)
    names = {each.name: each.writable for each in launches[0].allocations}
    assert [name for name, writable in names.items() if writable] == ["conv_state.0", "state.0"]
    assert names.keys() >= {"correction.0", "key_gate.0", "commit_lens", "state addresses"}


def test_the_commit_can_be_compiled_for_hopper(
    shipped: Callable[[], Implementation],
    device: Any,
    launches: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KDAFUZZ_CUTE_ARCH", "sm_90a")
    assert observe(Case(call=COMMIT), shipped(), device).raised == ""
    assert {launch.functions for launch in launches} == {"exact-sm90"}
    monkeypatch.setenv("KDAFUZZ_CUTE_ARCH", "sm_80")
    with pytest.raises(UnavailableError, match="KDAFUZZ_CUTE_ARCH must be sm_100a or sm_90a; found 'sm_80'"):
        shipped()


@pytest.mark.parametrize(
    ("layout", "path", "count"),
    [(Layout(), "warp-specialised", 3), (Layout(gaps=(1, 0)), "plain", 3), (Layout(offset=1), "declined", 0)],
)
def test_the_shipped_verify_launches_by_memory(
    shipped: Callable[[], Implementation],
    device: Any,
    launches: list[Launch],
    layout: Layout,
    path: str,
    count: int,
) -> None:
    case = Case(call=FUSED, layouts={} if layout == Layout() else {"mixed_qkv": layout})
    found = observe(case, shipped(), device)
    assert (found.raised, found.path, len(launches)) == ("", path, count)
    for launch in launches:
        assert launch.grid[1:] == (1, 1)
        assert 1 <= launch.grid[0] <= settings.current().ctas
        names = {each.name: each.writable for each in launch.allocations}
        assert {name for name, writable in names.items() if writable} == {*written(FUSED), "counter"}
