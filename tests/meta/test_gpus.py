"""How many workers a host's GPUs hold, who gets which, and what the driver is asked for that."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ci.gpus
from ci.gpus import (
    CONTEXT_BYTES,
    VISIBLE,
    WORKER_BYTES,
    Gpu,
    Seat,
    cores,
    described,
    seats,
    visible,
    worker_count,
)
from impl.contract import UnavailableError
from impl.devices.share import VARIABLE, limit_memory, whole_memory
from tests.meta.cuda_standin import compiled

GIB = 1 << 30


def gpus(*free: float) -> tuple[Gpu, ...]:
    """GPUs with this many GiB free, of 80."""
    return tuple(Gpu(f"GPU-{i}", f"H{i}", 80 * GIB, int(f * GIB)) for i, f in enumerate(free))


def held(places: list[Seat]) -> list[int]:
    """How many workers each GPU has, in the order of their names."""
    count = Counter(seat.gpu.uuid for seat in places)
    return [count[uuid] for uuid in sorted(count)]


@pytest.mark.parametrize(
    ("free", "processors", "count"),
    [
        ((), 4, 1),
        ((80,), 1, 1),
        ((80,), 16, 16),
        ((80,), 64, 26),
        ((80, 80), 1, 2),
        ((80, 80), 16, 16),
        ((80,) * 8, 4, 8),
        ((80,) * 8, 1000, 208),
        ((7, 3), 16, 3),
        ((2.9,), 16, 1),
        ((0.5, 9), 16, 3),
        ((0.5, 9), 1, 1),
        ((0.5, 0.5), 16, 1),
    ],
)
def test_as_many_workers_as_fit(free: tuple[float, ...], processors: int, count: int) -> None:
    """The memory, and the processors; a GPU with room has one at least, and a full one needs none."""
    assert worker_count(gpus(*free), processors) == count


@pytest.mark.parametrize(
    ("free", "count", "expected"),
    [
        ((80,), 3, [3]),
        ((80, 80), 4, [2, 2]),
        ((80, 80), 5, [3, 2]),
        ((80,) * 8, 16, [2] * 8),
        ((80, 20), 10, [8, 2]),
        ((80, 20), 2, [1, 1]),
        ((9, 0.5), 3, [3]),
        ((9, 9), 40, [20, 20]),
        ((0.5, 0.4), 1, [1]),
    ],
)
def test_who_gets_which(free: tuple[float, ...], count: int, expected: list[int]) -> None:
    places = seats(gpus(*free), count)
    assert len(places) == count
    assert held(places) == expected


def test_no_gpu_is_no_seat() -> None:
    assert seats((), 3) == []
    assert described((), []) == []


def test_workers_take_their_gpus_in_turn() -> None:
    """A run of fewer workers than planned has the GPUs evenly too."""
    assert [seat.gpu.uuid for seat in seats(gpus(80, 80), 4)] == ["GPU-0", "GPU-1"] * 2


@given(
    st.lists(st.integers(0, 200 * GIB), min_size=1, max_size=8),
    st.integers(1, 64),
    st.booleans(),
)
def test_the_shares_of_a_gpu_fit_it(free: list[int], processors: int, fits: bool) -> None:
    """Those of all its workers with their contexts, wherever each has what a worker needs."""
    devices = tuple(Gpu(f"GPU-{i}", "X", 200 * GIB, f) for i, f in enumerate(free))
    count = worker_count(devices, processors) if fits else processors
    places = seats(devices, count)
    assert len(places) == count
    for gpu in devices:
        mine = [seat.share for seat in places if seat.gpu == gpu]
        assert len(set(mine)) <= 1
        assert all(share >= CONTEXT_BYTES for share in mine)
        if mine and gpu.free // len(mine) >= WORKER_BYTES:
            assert sum(mine) + len(mine) * CONTEXT_BYTES <= gpu.free
            assert min(mine) >= WORKER_BYTES - CONTEXT_BYTES
        if fits and any(other.room for other in devices):
            assert len(mine) <= gpu.room
            assert bool(mine) == bool(gpu.room)


def test_a_seat_is_an_environment() -> None:
    (seat,) = seats(gpus(80), 1)
    assert seat.environment() == {VISIBLE: "GPU-0", VARIABLE: str(79 * GIB)}


def test_what_is_said_of_the_gpus() -> None:
    found = gpus(80, 40, 0.25)
    assert described(found, seats(found, 3)) == [
        "H0 (GPU-0), 80.0 of 80.0 GiB free: 2 workers, 39.0 GiB each",
        "H1 (GPU-1), 40.0 of 80.0 GiB free: 1 workers, 39.0 GiB each",
        "H2 (GPU-2), 0.2 of 80.0 GiB free: 0 workers",
    ]


def test_there_are_processors() -> None:
    assert cores() >= 1


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders with the stand-ins: of the driver alone, and of NVML too."""
    if shutil.which("cc") is None:
        pytest.skip("needs cc; found none")
    driver, both = tmp_path_factory.mktemp("driver"), tmp_path_factory.mktemp("both")
    return compiled(driver, nvml=False), compiled(both, nvml=True)


@pytest.fixture
def driver(libraries: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The stand-in of the driver is the only one; NVML has none."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries[0]))
    monkeypatch.delenv(VISIBLE, raising=False)
    return monkeypatch


def uuid(kind: str, byte: int) -> str:
    """That of the stand-in's device."""
    b = f"{byte:02x}"
    return f"{kind}-{b * 4}-{b * 2}-{b * 2}-{b * 2}-{b * 6}"


NAMES = "NVIDIA H200;NVIDIA H100 80GB HBM3 MIG 1g.10gb;NVIDIA OMIGA"


def test_the_driver_s_devices(driver: pytest.MonkeyPatch) -> None:
    """A part of a GPU too, by what makes it one; all memory counts as free where nothing else is known."""
    driver.setenv("STANDIN_GPUS", NAMES)
    assert visible() == (
        Gpu(uuid("GPU", 0), "NVIDIA H200", 8 * GIB, 8 * GIB),
        Gpu(uuid("MIG", 1), "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9 * GIB, 9 * GIB),
        Gpu(uuid("GPU", 2), "NVIDIA OMIGA", 10 * GIB, 10 * GIB),
    )


def test_free_memory_by_uuid(driver: pytest.MonkeyPatch, libraries: tuple[Path, Path]) -> None:
    driver.setenv("STANDIN_GPUS", NAMES)
    driver.setenv("LD_LIBRARY_PATH", str(libraries[1]))
    assert [(gpu.total, gpu.free) for gpu in visible()] == [
        (8 * GIB, 1 * GIB),
        (9 * GIB, 2 * GIB),
        (10 * GIB, 3 * GIB),
    ]


def test_what_is_visible_is_the_driver_s_affair(driver: pytest.MonkeyPatch) -> None:
    driver.setenv("STANDIN_GPUS", NAMES)
    driver.setenv(VISIBLE, "2")
    assert [gpu.uuid for gpu in visible()] == [uuid("GPU", 2)]
    driver.setenv(VISIBLE, "none")
    assert visible() == ()


def test_no_device_is_no_error(driver: pytest.MonkeyPatch) -> None:
    assert visible() == ()
    driver.setenv("STANDIN_GPUS", NAMES)
    driver.setenv("STANDIN_CODE", "100")
    assert visible() == ()


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("STANDIN_CODE", "999", "cuInit failed with code 999 of the CUDA driver"),
        ("STANDIN_DIES", "1", "the process died of SIGABRT"),
        ("STANDIN_HANGS", "1", "no answer within 1 s"),
    ],
)
def test_a_broken_driver_is_one_line(
    driver: pytest.MonkeyPatch, variable: str, value: str, told: str
) -> None:
    driver.setenv("STANDIN_GPUS", NAMES)
    driver.setenv(variable, value)
    if value == "1":
        driver.setattr(ci.gpus, "_SECONDS", 1.0 if variable == "STANDIN_HANGS" else 60.0)
    with pytest.raises(UnavailableError) as raised:
        visible()
    assert str(raised.value) == f"cannot ask CUDA for its GPUs: {told}"


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or with one that is no library at all."""
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("needs a machine without the CUDA driver; found one with it")
    assert visible() == ()


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What torch's allocator is held to, on a GPU of eight GiB."""
    set_to: list[float] = []

    class Facts:
        total_memory = 8 * GIB

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Facts)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_to.append)
    return set_to


@pytest.mark.parametrize(
    ("text", "fraction"), [(str(2 * GIB), [0.25]), (str(80 * GIB), [1.0]), ("", []), (None, [])]
)
def test_a_share_of_memory(
    monkeypatch: pytest.MonkeyPatch, fractions: list[float], text: str | None, fraction: list[float]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(VARIABLE, text)
    limit_memory()
    assert fractions == fraction


@pytest.mark.parametrize("share", [2 * GIB, None])
def test_all_of_the_memory_for_a_while(
    monkeypatch: pytest.MonkeyPatch, fractions: list[float], share: int | None
) -> None:
    """The share holds again afterwards, also when what was done with the memory failed."""
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(fractions)))
    monkeypatch.delenv(VARIABLE, raising=False)
    if share is not None:
        monkeypatch.setenv(VARIABLE, str(share))

    @whole_memory()
    def fails() -> None:
        assert fractions == [1.0]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert fractions == [1.0] + ([0.25] if share is not None else [])
    assert emptied == [1]


@pytest.mark.parametrize("text", ["0", "-1", "1e9", "2 GiB", "٣", "nan"])
def test_a_share_that_is_no_number_of_bytes(
    monkeypatch: pytest.MonkeyPatch, fractions: list[float], text: str
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UnavailableError, match=f"^{VARIABLE} takes a number of bytes; found '"):
        limit_memory()
    assert fractions == []
