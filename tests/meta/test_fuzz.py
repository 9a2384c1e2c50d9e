"""The run as a whole: the same cases from the same seed, and a clean end whatever happens."""

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ci.fuzz
from ci.campaign import exit_code
from ci.fuzz import Run
from ci.processes import TerminatedError
from ci.worker import Options, Shard, _Stop
from impl.contract import Domain, UnavailableError
from oracle.codec import read
from tests.meta.calls import verify_of
from tests.meta.commands import CASE, command_line, gone, plug_in, processes_of, tree

KEY = ("zoo_outside:right", "verify")
GROUP, PARENT = "the group", "the parent"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the zoo in it."""
    plug_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def digest(seed: int, jobs: int, examples: int = 12) -> str:
    """The digest of the cases of a run in this process."""
    options = Options(KEY[:1], KEY[1:], "cpu", examples, seed=seed, jobs=jobs, save=Path("saved"))
    made = Run(options, {}, {KEY: Domain(records=("row",))})
    made.execute(lambda _: None)
    row = made.rows[KEY]
    assert (row.tally.examples, row.failures) == (examples, [])
    return row.tally.digest


@pytest.mark.slow
def test_a_seed_gives_its_cases(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of processes; another seed gives others. A right kernel passes them all."""
    monkeypatch.setattr(ci.fuzz, "SHARD", 5)
    one = digest(1, 1)
    assert one == digest(1, 2)
    assert one != digest(2, 1)
    assert not (folder / "saved").exists()
    assert processes_of(folder) == []


def shards_of(**options: object) -> Run:
    """A run over two implementations, not executed."""
    plain: dict[str, object] = {"implementations": ("a", "b"), "operations": ("verify",), "device": "cpu"}
    return Run(
        Options(**plain | options),  # type: ignore[arg-type]
        {},
        {("a", "verify"): Domain(), ("b", "verify"): Domain()},
    )


def test_the_plan_is_the_same_for_any_number_of_jobs() -> None:
    plans = [list(shards_of(examples=250, jobs=jobs).shards()) for jobs in (1, 7)]
    assert plans[0] == plans[1]
    assert [shard.examples for shard in plans[0]] == [100, 100, 50] * 2
    assert len(set(plans[0])) == 6
    assert plans[0][0] == Shard("a", "verify", 0, 100)


def test_a_timed_plan_ends_when_nothing_is_wanted_any_more() -> None:
    planned = shards_of(minutes=60.0)
    plan = planned.shards()
    assert len({next(plan) for _ in range(10)}) == 10
    for row in planned.rows.values():
        row.stopped = "gone"
    assert len(list(plan)) < 2


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A run in the background, in a process group of its own; nothing of it is left behind."""
    running = subprocess.Popen(
        command_line("fuzz", *arguments),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        # A shell starts a background job, such as a CI step, with Ctrl-C ignored; its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def wait_for(folder: Path, pattern: str, count: int = 1, seconds: float = 60.0) -> list[Path]:
    """Wait until files of this name are there."""
    end = time.monotonic() + seconds
    while len(found := list(folder.glob(pattern))) < count:
        assert time.monotonic() < end, tree(folder).keys()
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(
    ("number", "whom", "code", "name"),
    [
        (signal.SIGINT, GROUP, 130, "stuck"),
        (signal.SIGINT, PARENT, 130, "slowly_wrong"),
        (signal.SIGTERM, PARENT, 143, "stuck"),
        (signal.SIGKILL, PARENT, -9, "stuck"),
    ],
)
def test_an_interrupted_run_leaves_nothing_running(
    folder: Path, number: int, whom: str, code: int, name: str
) -> None:
    """The table is printed, and what failed is on disk although it was still being shrunk."""
    with started(folder, "--impl", f"zoo_outside:{name}", "--examples", "50", "--seed", "3") as running:
        wait_for(folder, "marked-*")
        time.sleep(0.5)
        start = time.monotonic()
        (os.killpg if whom == GROUP else os.kill)(running.pid, number)
        out, err = running.communicate(timeout=20)
        assert time.monotonic() - start < 8.0
        assert running.returncode == code
        assert not err or code < 0
        assert gone(folder)
    if code > 0:
        assert "interrupted; the table shows what was done" in out
        assert f"zoo_outside:{name} " in out
    saved = list((folder / ".kdafuzz").rglob("*.json"))
    assert len(saved) == (name == "slowly_wrong")
    if saved:
        assert verify_of(read(saved[0]).case).value_dim > 16
        assert f"failing case, perhaps not minimal: {saved[0].relative_to(folder)}" in out


def test_a_stop_between_two_cases_starts_nothing(folder: Path) -> None:
    stop = _Stop()
    stop.use(KEY[0], Options(KEY[:1], KEY[1:], "cpu", 1, save=folder / "saved"))
    assert stop.check(CASE).ok
    stop()
    assert gone(folder)
    with pytest.raises(TerminatedError):
        stop.check(CASE)
    assert processes_of(folder) == []
    stop.close()


def test_an_interruption_before_anything_ran(folder: Path) -> None:
    """Also while processes are still starting, and while implementations are asked."""
    for seconds in (0.0, 3.0):
        with started(folder, "--impl", KEY[0], "--jobs", "2") as running:
            assert running.stdout is not None
            running.stdout.readline()
            time.sleep(seconds)
            os.killpg(running.pid, signal.SIGINT)
            _, err = running.communicate(timeout=20)
            assert (running.returncode, err.strip()) == (130, "")
            assert gone(folder)


def test_a_killed_child_is_a_failure_and_a_killed_worker_is_replaced(folder: Path) -> None:
    arguments = (
        "--impl",
        "zoo_outside:slow",
        "--examples",
        "60",
        "--seed",
        "3",
        "--keep-going",
        "--jobs",
        "1",
    )
    with started(folder, *arguments) as running:
        child = wait_for(folder, "marked-*")[0]
        os.kill(int(child.name.removeprefix("marked-")), signal.SIGKILL)
        wait_for(folder, ".kdafuzz/failures/verify/*crash*.json")
        worker = next(pid for pid in processes_of(folder) if b"spawn_main" in _command(pid))
        os.kill(worker, signal.SIGKILL)
        out, err = running.communicate(timeout=60)
        assert running.returncode == 1
        assert not err
        assert "a worker was lost (the process died of SIGKILL); another one does its part again" in out
        assert "not reproducible .kdafuzz/failures/verify/" in out
        assert "crash: the process died of SIGKILL" in out
        assert gone(folder)
    # What the worker was judging is no suspect any more: another one has judged it.
    assert [path.name for path in (folder / ".kdafuzz").rglob("*killed*")] == []


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_two_timed_runs_at_once(folder: Path) -> None:
    """Neither disturbs the other; a run ends in time, and at once when nothing is left to do."""
    start = time.monotonic()
    with (
        started(folder, "--impl", "zoo_outside:raises", "--jobs", "1", "--minutes", "30") as first,
        started(folder, "--impl", "zoo_outside:raises,zoo_outside:slow", "--minutes", "0.3") as second,
    ):
        for running in (first, second):
            out, err = running.communicate(timeout=100)
            assert (running.returncode, err) == (1, "")
            assert "\x1b" not in out
            assert "\r" not in out
            assert "│ zoo_outside:raises" in out
            assert "raised: RuntimeError: boom" in out
        assert time.monotonic() - start < 90.0
    assert all(read(path).case for path in (folder / ".kdafuzz/failures/verify").iterdir())
    assert gone(folder)


def test_a_narrow_terminal(folder: Path) -> None:
    """Sixty columns are drawn upon, whatever is cut off."""
    master, slave = pty.openpty()
    try:
        running = subprocess.Popen(
            command_line("fuzz", "--impl", "zoo_outside:raises", "--examples", "2", "--jobs", "1"),
            cwd=folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "COLUMNS": "60", "TERM": "xterm"},
        )
        os.close(slave)
        seen = b""
        while running.poll() is None or select.select([master], [], [], 0)[0]:
            if select.select([master], [], [], 0.2)[0]:
                try:
                    seen += os.read(master, 65536)
                except OSError:
                    break
        assert running.wait() == 1
    finally:
        os.close(master)
    assert "Traceback" not in seen.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    table = [line for line in plain.splitlines() if line.startswith(("┃", "│", "┡", "└"))]
    assert table
    assert max(map(len, table)) <= 60
    assert "kdafuzz replay .kdafuzz/failures/verify/zoo-outside-raises-raised-" in plain


def test_an_implementation_that_did_not_run_is_an_error() -> None:
    """Unless something failed, which counts for more."""
    planned = shards_of()
    for row in planned.rows.values():
        row.tally.examples = 5
    first, second = planned.rows.values()
    assert exit_code(planned) == 0
    second.absent = "not in this version"
    second.tally.examples = 0
    assert exit_code(planned) == 0
    second.absent = ""
    with pytest.raises(UnavailableError, match="b verify was not run: too little time"):
        exit_code(planned)
    first.stopped = "gone"
    with pytest.raises(UnavailableError, match="a verify stopped: gone"):
        exit_code(planned)
    first.stopped, first.absent, second.absent = "", "no", "no"
    with pytest.raises(UnavailableError, match="nothing was run: no implementation offers"):
        exit_code(planned)
