"""The CuTe fold on the emulator: right, the same under every schedule, and no synchronisation to spare."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="needs the extra kdafuzz[cute]")
pytest.importorskip("cutlass.cute", reason="needs the extra kdafuzz[cute]")

from impl.cute import compile as kernels
from impl.cute import host
from impl.cute.emulator import settings
from impl.cute.emulator.compiled import Emulated
from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.launch import Schedule
from tests.meta.cute_context import Plan

SCHEDULES = (Schedule(), Schedule("lazy"), *(Schedule("priority", seed) for seed in range(3)))


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this module's own."""
    made = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KDAFUZZ_CACHE", str(made))
        kernels.function.cache_clear()
        yield made
    kernels.function.cache_clear()


@pytest.fixture(params=kernels.ARCHITECTURES)
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(kernels.ARCHITECTURE_VARIABLE, request.param)
    return str(request.param)


def commit(plan: Plan, *, align: bool = False) -> None:
    host.cute_recoverssm_commit(plan, plan.sources, len(plan.lengths), align)


def assert_right(plan: Plan, *, align: bool = False) -> None:
    """Within half a bf16 unit, and a little for fp32, of float64; untouched slots to the bit."""
    for found, wanted, before in zip(plan.checkpoints, plan.expected(align), plan.before, strict=True):
        unit = torch.exp2(torch.floor(torch.log2(wanted.abs().clamp(min=2.0**-4))) - 7)
        assert float(((found.double() - wanted).abs() / unit).max()) <= 0.51
        same = (wanted == before.double()).flatten(1).all(1)
        assert bool(same[0])
        assert torch.equal(found[same].view(torch.int16), before[same].view(torch.int16))


PLANS = {
    "in place, moved, dead, empty, final null": Plan(
        3, 4, (4, 2, 3, 0, 1), (1, 7, 8, 9, 0), slots=(1, 2, 0, 4, 5), layers=2
    ),
    "records by slot, padded rows": Plan(4, 5, (5, 1), (3, 4), by_slot=True, slots=(2, 1), gap=24),
    "window 1": Plan(1, 1, (1, 1), (1, 2)),
    "window 8, five heads": Plan(5, 8, (7,), (1,)),
}
ALIGNED = {
    "boundaries apart": Plan(2, 4, (4, 3, 2), (4, 5, 6), (7, 8, 9), (1, 3, 2), layers=2),
    "boundary is the source, or null, or the final": Plan(
        3, 8, (8, 5, 6, 2), (5, 2, 6, 4), (1, 0, 6, -1), (3, 2, 6, 1), by_slot=True
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_final_states(name: str, arch: str) -> None:
    plan = PLANS[name]
    plan.restore()
    commit(plan)
    assert_right(plan)


@pytest.mark.parametrize("name", ALIGNED)
def test_boundary_states(name: str, arch: str) -> None:
    plan = ALIGNED[name]
    plan.restore()
    commit(plan, align=True)
    assert_right(plan, align=True)


def test_a_plan_without_align_leaves_boundaries() -> None:
    plan = ALIGNED["boundaries apart"]
    plan.restore()
    commit(plan)
    assert_right(plan)


def test_schedules_and_chunks_change_no_bit() -> None:
    """One head a CTA, all heads in one, and chunks of different sizes."""
    plan = Plan(4, 4, (4, 2), (1, 4), (3, 5), (2, 1), layers=2)
    found = []
    for schedule in SCHEDULES:
        for chunk in (1, 3, 4):
            plan.restore()
            with settings.using(schedule=schedule, ctas=chunk):
                commit(plan, align=True)
            found.append([x.view(torch.int16).clone() for x in plan.checkpoints])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_records_past_the_accepted_tokens_do_not_matter() -> None:
    """NaN there changes no bit of S_n, nor of S_m where it stands at m or later."""
    plan = Plan(2, 4, (3,), (2,), (3,), (1,))
    commit(plan, align=True)
    final, boundary = (plan.checkpoints[0][slot].clone() for slot in (2, 3))
    for first, clean in ((3, (2, 3)), (1, (3,))):
        for cache in (*plan.correction_caches, *plan.kg_caches):
            cache[:, :, first:] = float("nan")
        plan.restore()
        commit(plan, align=True)
        for slot in clean:
            assert torch.equal(plan.checkpoints[0][slot], {2: final, 3: boundary}[slot])


def test_what_the_fold_does_not_take_is_refused() -> None:
    cases: list[tuple[str, Callable[[Plan], object]]] = [
        ("int32 state_indices", lambda p: setattr(p, "sources", p.sources.long())),
        ("a lower bound for the CuTe fold; found none", lambda p: setattr(p, "lower_bound", None)),
        ("states of torch.bfloat16", lambda p: p.checkpoints.__setitem__(0, p.checkpoints[0].float())),
        ("correction records of", lambda p: p.correction_caches.__setitem__(0, p.correction_caches[0].mT)),
        ("key/gate records of", lambda p: p.kg_caches.__setitem__(0, p.kg_caches[0][:, :, :, :-1])),
        ("window of 1 to 8", lambda p: setattr(p, "spec_query_len", 9)),
    ]
    for text, change in cases:
        plan = Plan(1, 2, (1,), (1,))
        change(plan)
        with pytest.raises(ValueError, match=text):
            commit(plan)
        assert torch.equal(plan.checkpoints[0].double(), plan.before[0].double())


def placed(x: torch.Tensor, *, gap: int = 0, offset: int = 0) -> torch.Tensor:
    """A copy with so many elements between its rows, and before its first one."""
    step = x[0].numel() + gap
    room = x.new_empty(offset + len(x) * step)
    return room.as_strided(x.shape, (step, *x.stride()[1:]), offset).copy_(x)


@pytest.mark.parametrize("where", [{"gap": 2}, {"offset": 2}], ids=["stride", "address"])
@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        ("states", "checkpoints"),
        ("correction records", "correction_caches"),
        ("key/gate records", "kg_caches"),
    ],
)
def test_rows_off_16_bytes_are_refused(name: str, attribute: str, where: dict[str, int]) -> None:
    """Bulk copies cannot take them; the stride of one row alone is none."""
    for rows in (2, 1):
        plan = Plan(1, 4, (1,) * rows, tuple(range(1, rows + 1)))
        tensors = getattr(plan, attribute)
        tensors[0] = placed(tensors[0], **where)
        plan.address()
        if len(tensors[0]) == 1 and "gap" in where:
            commit(plan)
            assert_right(plan)
            continue
        with pytest.raises(ValueError, match=f"needs {name} of .* rows, 16-byte aligned, .* strides"):
            commit(plan)
        assert torch.equal(plan.checkpoints[0], plan.before[0])


def test_no_rows_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_commit_kernel", lambda *_: pytest.fail("compiled a kernel"))
    plan = Plan(1, 2, (1,), (1,))
    host.cute_recoverssm_commit(plan, plan.sources[:0], 0, False)


def test_nothing_is_read_before_earlier_kernels_are_done() -> None:
    plan = ALIGNED["boundaries apart"]
    plan.restore()
    commit(plan, align=True)
    found = emulated(plan, align=True)
    assert found.reports
    assert not any(report.early for report in found.reports)


def emulated(plan: Plan, *, align: bool) -> Emulated:
    """The compiled kernel that a plan's commit runs."""
    found = host._commit_kernel(plan.window, torch.device("cpu"), align, plan.by_slot)
    assert isinstance(found, Emulated)
    return found


FAULTS = {
    "proxy fence": (r"fence\.proxy\.async\.shared::cta;", 1),
    "waits for stores to read": (r"cp\.async\.bulk\.wait_group\.read 0;", 2),
    "barrier": (r"bar\.sync\s+0;", 6),
    "wait for a copy": (r"mbarrier\.try_wait\.parity\.shared::cta\.b64 done, [^;]*; @done bra READY;", 3),
    "dependency wait": (r"griddepcontrol\.wait;", 1),
}


@pytest.mark.parametrize(
    ("pattern", "count", "which"),
    [pytest.param(*FAULTS[name], i, id=f"{name} {i}") for name in FAULTS for i in range(FAULTS[name][1])],
)
def test_a_synchronisation_left_out_is_noticed(pattern: str, count: int, which: int) -> None:
    """Each one of the kernel, in turn: an error, or other bytes, in one schedule at least."""
    plan = Plan(4, 4, (4, 2, 3), (1, 4, 6), (5, 7, 0), (2, 1, 0))
    commit(plan, align=True)
    right = plan.checkpoints[0].clone()
    sound = emulated(plan, align=True)
    places = list(re.finditer(pattern, sound.ptx))
    assert len(places) == count
    before, after = sound.ptx[: places[which].start()], sound.ptx[places[which].end() :]
    faulty = "bra READY;" if "try_wait" in pattern else ""
    broken = object.__new__(Emulated)
    broken.__dict__ |= {**sound.__dict__, "ptx": before + faulty + after}
    broken.__dict__.pop("program", None)
    host._PREPARED[plan].kernels[True] = broken
    assert any(_noticed(plan, broken, right, schedule) for schedule in SCHEDULES)


def _noticed(plan: Plan, kernel: Emulated, right: torch.Tensor, schedule: Schedule) -> bool:
    plan.restore()
    try:
        with settings.using(schedule=schedule, ctas=4):
            commit(plan, align=True)
    except EmulatorError:
        return True
    early = any(report.early for report in kernel.reports)
    return early or not torch.equal(plan.checkpoints[0].view(torch.int16), right.view(torch.int16))
