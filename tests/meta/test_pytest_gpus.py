"""Workers of pytest: each has a GPU of its own, and what a killed one was judging is told."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st

import ci.pytest_gpus
from ci.failures import load
from ci.gpus import VISIBLE, Gpu
from ci.pytest_gpus import NAME, Spread, auto_workers, register, take_seat
from ci.query import Offer
from impl.contract import Domain, UnavailableError
from impl.devices.share import VARIABLE
from tests.meta.commands import CASE, at_a_desk, gone, plug_in, processes_of
from tests.meta.test_journal import HERE, NO_PID, WHOLE, dead
from tests.subject import Subject

REPOSITORY = Path(__file__).resolve().parents[2]
GIB = 1 << 30
TWO = (Gpu("GPU-a", "Fake", 80 * GIB, 21 * GIB), Gpu("GPU-b", "Fake", 80 * GIB, 21 * GIB))
FAKE = """
import os
import ci.pytest_gpus
import ci.query
from ci.gpus import Gpu
from ci.query import Offer
from impl.contract import Domain, UnavailableError

def visible():
    if "FAKE_BROKEN" in os.environ:
        raise UnavailableError("cannot ask CUDA for its GPUs: broken")
    return tuple(Gpu(f"GPU-{name}", "Fake", 80 << 30, 21 << 30) for name in "ab")

ci.pytest_gpus.visible = visible
ci.pytest_gpus.cores = lambda: 4
ci.query.ask = lambda name, device: ci.query.Offer("1")
"""
TESTS = """
import json, os, signal, pytest
from pathlib import Path

AT_IMPORT = os.environ.get("CUDA_VISIBLE_DEVICES")

@pytest.mark.parametrize("number", range(20))
def test_record(number):
    names = ("PYTEST_XDIST_WORKER", "CUDA_VISIBLE_DEVICES", "KDAFUZZ_GPU_BYTES")
    found = [AT_IMPORT, *map(os.environ.get, names)]
    Path(f"seen-{number}").write_text(json.dumps(found))
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@contextmanager
def pytest_run(folder: Path, *arguments: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """Pytest in ``folder``, in the background; nothing of it is left behind."""
    inherited = at_a_desk()
    inherited.pop(VISIBLE, None)
    paths = os.pathsep.join((str(folder), str(REPOSITORY)))
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=inherited | {"PYTHONPATH": paths} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def with_gpus(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """A small suite on two GPUs and four processors, with the conftest of this one; and what it said."""
    (folder / "fake_gpus.py").write_text(FAKE)
    (folder / "test_seats.py").write_text(TESTS)
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    plugins = ("-p", "fake_gpus", "--device", "cuda", "--impl", "none:factory")
    with pytest_run(folder, *plugins, *arguments, "test_seats.py", **environment) as running:
        said, _ = running.communicate(timeout=170)
    return running.returncode, said


def seen(folder: Path) -> dict[str, list[str]]:
    """By worker, what a test found at its import and when it ran; all of a worker's found the same."""
    found: dict[str, list[str]] = {}
    for path in folder.glob("seen-*"):
        at_import, worker, *rest = json.loads(path.read_text())
        assert found.setdefault(worker, [at_import, *rest]) == [at_import, *rest]
    return found


@pytest.mark.slow
def test_each_worker_has_a_gpu(tmp_path: Path) -> None:
    """From the start, and equally many have each; one that is killed is one failure, and is replaced."""
    code, said = with_gpus(tmp_path, "-n", "auto", "-v")
    assert code == 1, said
    assert "scheduling tests via WorkStealingScheduling" in said
    assert "1 failed, 19 passed" in said
    assert re.search(r"crashed while running 'test_seats.py::test_record\[3\]'$", said, re.M)
    header = [line for line in said.splitlines() if line.startswith("kdafuzz: Fake")]
    assert header == [
        f"kdafuzz: Fake (GPU-{name}), 21.0 of 80.0 GiB free: 2 workers, 9.5 GiB each" for name in "ab"
    ]
    found = seen(tmp_path)
    assert set(found) >= {"gw0", "gw1", "gw2", "gw3"}
    share = str(int(9.5 * GIB))
    assert all(gpu == at_import and given == share for at_import, gpu, given in found.values())
    first = Counter(found[f"gw{number}"][1] for number in range(4))
    assert first == {"GPU-a": 2, "GPU-b": 2}
    killed = json.loads((tmp_path / "seen-3").read_text())[1]
    if "gw4" in found:
        assert found["gw4"] == found[killed]


@pytest.mark.slow
def test_who_sets_a_number_gets_it(tmp_path: Path) -> None:
    """By pytest-xdist's own variable too: fewer workers, with more memory. Who says how, likewise."""
    arguments = ("-n", "auto", "--dist", "load", "-v", "-k", "record and 1")
    code, said = with_gpus(tmp_path, *arguments, PYTEST_XDIST_AUTO_NUM_WORKERS="1")
    assert code == 0, said
    assert "scheduling tests via LoadScheduling" in said
    assert seen(tmp_path) == {"gw0": ["GPU-a", "GPU-a", str(20 * GIB)]}
    assert "0 workers" in said


def test_a_broken_driver_is_one_line(tmp_path: Path) -> None:
    code, said = with_gpus(tmp_path, "-n", "auto", FAKE_BROKEN="1")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert said.strip() == "ERROR: cannot ask CUDA for its GPUs: broken"


class Manager:
    """Takes plugins in."""

    def __init__(self) -> None:
        self.plugins: dict[str, Spread] = {}

    def register(self, plugin: Spread, name: str) -> None:
        """As pytest's."""
        self.plugins[name] = plugin


def config_of(**options: Any) -> Any:
    """A configuration with pytest-xdist's options."""
    plain = {"numprocesses": None, "maxprocesses": None}
    return SimpleNamespace(option=SimpleNamespace(**plain | options), pluginmanager=Manager())


def gateway(name: str) -> Any:
    """A worker, as its controller knows it."""
    return SimpleNamespace(gateway=SimpleNamespace(id=name), workerinput={})


def test_without_workers_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor elsewhere than on a GPU, nor by a worker, nor without pytest-xdist; and CUDA is not asked."""

    def unasked() -> tuple[Gpu, ...]:
        raise AssertionError

    monkeypatch.setattr(ci.pytest_gpus, "visible", unasked)
    before = dict(os.environ)
    worker = config_of(numprocesses=2)
    worker.workerinput = {}
    bare: Any = SimpleNamespace(option=SimpleNamespace(), pluginmanager=Manager())
    for config, device in (
        (config_of(), "cuda"),
        (config_of(numprocesses=0), "cuda"),
        (config_of(numprocesses=2), "cpu"),
        (worker, "cuda"),
        (bare, "cuda"),
    ):
        take_seat(config)
        register(config, device)
        assert config.pluginmanager.plugins == {}
    assert dict(os.environ) == before
    for device in ("cpu", "emulator"):
        assert auto_workers(device) is None


def test_a_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.setattr(ci.pytest_gpus, "visible", lambda: TWO)
    monkeypatch.setattr(ci.pytest_gpus, "cores", lambda: 5)
    assert auto_workers("cuda") == 5
    monkeypatch.setattr(ci.pytest_gpus, "cores", lambda: 50)
    assert auto_workers("cuda") == 14
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "3")
    assert auto_workers("cuda") is None


@pytest.mark.parametrize(
    ("options", "share"), [({"numprocesses": 3}, 9.5), ({"numprocesses": 9, "maxprocesses": 3}, 9.5)]
)
def test_seats_of_three(monkeypatch: pytest.MonkeyPatch, options: dict[str, int], share: float) -> None:
    """Whatever becomes of them: a new one takes the place of one that is gone."""
    monkeypatch.setattr(ci.pytest_gpus, "visible", lambda: TWO)
    config = config_of(**options)
    register(config, "cuda")
    spread = config.pluginmanager.plugins[NAME]
    given: dict[str, dict[str, str]] = {}

    def started(name: str) -> str:
        node = gateway(name)
        spread.pytest_configure_node(node)
        given[name] = next(iter(node.workerinput.values()), {})
        return given[name].get(VISIBLE, "none")

    assert [started(f"gw{number}") for number in range(3)] == ["GPU-a", "GPU-b", "GPU-a"]
    assert given["gw0"][VARIABLE] == str(int(share * GIB))
    assert given["gw1"][VARIABLE] == str(20 * GIB)
    assert started("late") == "none"
    for name in ("gw1", "late", "gw1"):
        spread.pytest_testnodedown(gateway(name), None)
    assert [started("gw3"), started("gw4")] == ["GPU-b", "none"]
    spread.pytest_testnodedown(gateway("gw2"), "lost")
    spread.pytest_testnodedown(gateway("gw3"), "lost")
    assert [started("gw5"), started("gw6")] == ["GPU-b", "GPU-a"]


def test_a_worker_takes_its_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ci.pytest_gpus, "visible", lambda: TWO)
    monkeypatch.setattr(os, "environ", {"PATH": "x"})
    config = config_of(numprocesses=1)
    register(config, "cuda")
    node = gateway("gw0")
    config.pluginmanager.plugins[NAME].pytest_configure_node(node)
    take_seat(SimpleNamespace(workerinput=json.loads(json.dumps(node.workerinput))))  # type: ignore[arg-type]
    assert os.environ == {"PATH": "x", VISIBLE: "GPU-a", VARIABLE: str(20 * GIB)}


def test_no_gpu_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers run, and fail by themselves, each with its own sentence."""
    monkeypatch.setattr(ci.pytest_gpus, "visible", tuple)
    config = config_of(numprocesses=2)
    register(config, "cuda")
    node = gateway("gw0")
    spread = config.pluginmanager.plugins[NAME]
    spread.pytest_configure_node(node)
    assert node.workerinput == {}
    assert spread.pytest_report_header() == []


def test_a_driver_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[Gpu, ...]:
        raise UnavailableError("broken")

    monkeypatch.setattr(ci.pytest_gpus, "visible", broken)
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    with pytest.raises(pytest.UsageError, match=r"^broken$"):
        register(config_of(numprocesses=2), "cuda")
    with pytest.raises(pytest.UsageError, match=r"^broken$"):
        auto_workers("cuda")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_a_worker_that_is_killed_over_a_case(tmp_path: Path) -> None:
    """The failure names the case, as a file; what an earlier run left is told apart from it."""
    plug_in(tmp_path)
    saved = tmp_path / "saved"
    dead(saved, f"{HERE}-{NO_PID}-1-ab.case", WHOLE)
    options = ("--impl", "zoo_outside:stuck", "--device", "cpu", "--save-failures", "saved", "-n", "1")
    test = str(REPOSITORY / "tests/test_verify.py")
    with pytest_run(tmp_path, *options, "-k", "differential", test) as running:
        end = time.monotonic() + 120.0
        while not (marks := list(tmp_path.glob("marked-*"))):
            assert running.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        copy = int(marks[0].name.removeprefix("marked-"))
        os.kill(_parent(_parent(copy)), signal.SIGKILL)
        said, _ = running.communicate(timeout=120)
    earlier, judged = re.findall(r"judg\w+ (\S+): kdafuzz replay \1$", said, re.M)
    assert earlier.startswith("saved/verify/mine-killed-")
    assert judged.startswith("saved/verify/zoo-outside-stuck-killed-")
    assert load(tmp_path / judged).found["implementation"] == "zoo_outside:stuck"
    assert running.returncode == 1
    assert "1 failed" in said
    assert re.search(rf"crashed while running '.*test_differential\[.*'; it was judging {judged}", said)
    assert not (saved / "running").exists() or not list((saved / "running").iterdir())
    assert gone(tmp_path), processes_of(tmp_path)


LATER = """
from zoo_outside import _made

def later():
    calls = 0
    def step(given, out):
        nonlocal calls
        calls += 1
        return out.add_(1.0) if calls > 1 and out.numel() else out
    return _made(step)
"""
ALONE = "As the only case of a new process it passes: what ran before it counts, or chance does"


def failure_of(call: Callable[[], object]) -> Any:
    """How a test fails."""
    with pytest.raises(pytest.fail.Exception) as failed:
        call()
    return failed.value


def test_a_case_that_fails_only_after_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, once, of searches and of tests of one case; of a case that fails alone it is not."""
    plug_in(tmp_path)
    (tmp_path / "later_outside.py").write_text(LATER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    offer = Offer("1", ("verify",), domains={"verify": Domain(records=("row",))})
    monkeypatch.setattr("tests.subject.offer_of", lambda name, device: offer)
    with closing(Subject("later_outside:later", "cpu", tmp_path / "saved", 0.0)) as later:
        later.check(CASE)
        single = failure_of(lambda: later.require(CASE))
        assert str(single).splitlines()[-1] == ALONE
        searched = failure_of(lambda: later.search(st.just(CASE)))
        assert str(searched) == str(single)
        assert (searched.__context__, searched.pytrace) == (None, False)
    with closing(Subject("zoo_outside:raises", "cpu", tmp_path / "saved", 0.0)) as wrong:
        failed = str(failure_of(lambda: wrong.search(st.just(CASE))))
        assert failed.startswith("case ")
        assert "new process" not in failed
    assert len(list((tmp_path / "saved").rglob("*.json"))) == 2
