"""What a killed process was judging is found again, and nothing that lives is taken for dead."""

import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

import ci.journal
from ci.executor import Executor
from ci.failures import load
from ci.journal import FOLDER, Journal, recover
from impl.contract import UnavailableError
from oracle.case import Case
from oracle.codec import SCHEMA, CaseFile, dumps, read
from oracle.judge import Verdict
from oracle.values import checksum
from tests.meta.commands import CASE, tree

REPOSITORY = Path(__file__).resolve().parents[2]
OTHER = msgspec.structs.replace(CASE, seed=CASE.seed + 1)
WRITING = """
import sys, time
from pathlib import Path
from ci.journal import Journal
from tests.meta.test_journal import CASE, OTHER

journals = [Journal(Path(sys.argv[1]), f"mine:{number}", "cpu") for number in range(2)]
for journal, case in zip(journals, (CASE, OTHER)):
    journal.start(case)
print("judging", flush=True)
time.sleep(1000)
"""


def running(save: Path) -> list[str]:
    """The journals that are there."""
    return sorted(path.name for path in (save / FOLDER).glob("*"))


@contextmanager
def judging(save: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that is judging two cases at the moment, by as many journals."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITING, str(save)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "judging\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "reaped"), [(signal.SIGKILL, True), (signal.SIGSEGV, False)])
def test_a_killed_process_s_cases_are_sound_files(tmp_path: Path, number: int, reaped: bool) -> None:
    """Also while its parent has not taken note of its end yet; and what it left is gone then."""
    with judging(tmp_path) as process:
        assert recover(tmp_path) == []
        assert len(running(tmp_path)) == 2
        process.send_signal(number)
        if reaped:
            process.wait()
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        found = recover(tmp_path)
    entries = {load(path).found["implementation"]: load(path) for path in found}
    assert len(found) == 2
    for name, case in (("mine:0", CASE), ("mine:1", OTHER)):
        entry = entries[name]
        assert (entry.case, entry.checksum) == (case, checksum(case))
        why = "was being judged when its process was killed"
        assert entry.found == {"implementation": name, "device": "cpu", "problem": why}
    assert {path.parent for path in found} == {tmp_path / "verify"}
    assert all(re.fullmatch(r"mine-[01]-killed-[0-9a-f]{8}\.json", path.name) for path in found)
    assert running(tmp_path) == []
    assert recover(tmp_path) == []


@pytest.mark.parametrize(("field", "value"), [(0, "Z"), (6, "4")])
def test_a_process_that_is_ending(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, field: int, value: str
) -> None:
    """Its parent hears of it when its pipes close: before the system calls it dead, or when it just does."""
    whole = Path.read_text
    alive = Path(f"/proc/{os.getpid()}/stat")

    def ending(path: Path) -> str:
        head, _, tail = whole(path).rpartition(")")
        fields = tail.split()
        fields[6] = "0"
        fields[field] = value
        return f"{head}) {' '.join(fields)}" if path == alive else whole(path)

    Journal(tmp_path, "mine", "cpu").start(CASE)
    assert recover(tmp_path) == []
    monkeypatch.setattr(Path, "read_text", ending)
    assert len(recover(tmp_path)) == 1


def test_the_last_case_is_the_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of two is longer; between cases there is none."""
    journal = Journal(tmp_path, "mine", "cpu")
    long = msgspec.structs.replace(CASE, seed=2**30)
    for case in (CASE, long, OTHER):
        journal.start(case)
        (name,) = running(tmp_path)
        kept = (tmp_path / FOLDER / name).read_bytes()
        assert len(kept.splitlines()) > 10
        assert msgspec.json.decode(kept, type=CaseFile).case == case
    journal.end()
    assert (tmp_path / FOLDER / name).read_bytes() == b""
    monkeypatch.setattr(ci.journal, "_owner", lambda pid: "gone")
    assert recover(tmp_path) == []
    assert running(tmp_path) == []


def dead(save: Path, name: str, data: bytes) -> Path:
    """A journal of this name, whoever wrote it."""
    path = save / FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


WHOLE = dumps(CaseFile(kdafuzz=SCHEMA, case=CASE, found={"implementation": "mine"}))
HERE = platform.node()
NO_PID = 4_194_304
"""Above every process number of Linux."""


@pytest.mark.parametrize("data", [b"", WHOLE[: len(WHOLE) // 2], b"\0" * 64, b"[1]"])
def test_what_is_no_whole_case_is_dropped(tmp_path: Path, data: bytes) -> None:
    path = dead(tmp_path, f"{HERE}-{NO_PID}-1-ab.case", data)
    assert recover(tmp_path) == []
    assert not path.exists()
    assert [name for name in tree(tmp_path) if name.endswith(".json")] == []


def test_a_number_that_is_used_again(tmp_path: Path) -> None:
    """It is another process, however alive."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    mine = dead(tmp_path, f"{HERE}-{os.getpid()}-{started}-ab.case", WHOLE)
    dead(tmp_path, f"{HERE}-{os.getpid()}-{int(started) - 1}-ab.case", WHOLE)
    assert len(recover(tmp_path)) == 1
    assert running(tmp_path) == [mine.name]


@pytest.mark.parametrize(
    "name",
    [
        f"other-{NO_PID}-1-ab.case",
        f"{HERE}-2-{NO_PID}-1-ab.case",
        f"{HERE}-x-1-ab.case",
        f"{HERE}.case",
        f"{HERE}-1.case",
        "notes.case",
        f"{HERE}-{NO_PID}-1-ab.txt",
    ],
)
def test_what_is_not_of_this_host_is_left_alone(tmp_path: Path, name: str) -> None:
    """One whose name begins alike included, and what is no journal."""
    path = dead(tmp_path, name, WHOLE)
    assert recover(tmp_path) == []
    assert path.read_bytes() == WHOLE


def test_a_host_s_name_may_hold_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "gpu-[1]-7")
    Journal(tmp_path, "mine", "cpu").start(CASE)
    dead(tmp_path, f"gpu-[1]-7-{NO_PID}-1-ab.case", WHOLE)
    assert len(recover(tmp_path)) == 1
    assert len(running(tmp_path)) == 1


@pytest.mark.parametrize("error", [ValueError, MemoryError])
def test_values_that_cannot_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """The case is there all the same: that may be what its process died of."""

    def failing(case: object) -> str:
        raise error

    monkeypatch.setattr(ci.journal, "checksum", failing)
    dead(tmp_path, f"{HERE}-{NO_PID}-1-ab.case", WHOLE)
    (path,) = recover(tmp_path)
    assert load(path).case == CASE


def test_somebody_else_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that start in one folder find the same."""
    path = dead(tmp_path, f"{HERE}-{NO_PID}-1-ab.case", WHOLE)

    def reading(found: Path) -> CaseFile:
        path.unlink()
        return read(found)

    monkeypatch.setattr(ci.journal, "read", reading)
    assert recover(tmp_path) == []


def test_nothing_is_recovered_of_nothing(tmp_path: Path) -> None:
    assert recover(tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


def test_closing_leaves_nothing(tmp_path: Path) -> None:
    """But what others have there; and a closed journal may be used again."""
    save = tmp_path / "saved"
    first, second = Journal(save, "a", "cpu"), Journal(save, "b", "cpu")
    first.close()
    assert not save.exists()
    for journal in (first, second, first):
        journal.start(CASE)
    assert len(running(save)) == 2
    first.close()
    assert len(running(save)) == 1
    first.end()
    first.close()
    (save / "verify").mkdir()
    second.close()
    assert list(tree(save)) == ["verify"]
    first.start(CASE)
    (save / "verify").rmdir()
    first.close()
    assert list(tmp_path.iterdir()) == []


def test_all_close_at_once(tmp_path: Path) -> None:
    """Each removes the folders that the others are about to use."""
    save = tmp_path / "a/b"

    def use(_: int) -> None:
        journal = Journal(save, "mine", "cpu")
        journal.start(CASE)
        journal.close()

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(use, range(2000)))) == 2000
    assert not save.exists()


def test_a_folder_that_goes_away_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At either of the steps that make it."""
    made, open_ = Path.mkdir, os.open
    errors = [FileNotFoundError, FileExistsError]

    def mkdir(path: Path, *arguments: object, **options: object) -> None:
        if errors:
            raise errors.pop()
        made(path, *arguments, **options)  # type: ignore[arg-type]

    def opened(path: Path, *arguments: int) -> int:
        if Path(path).parent.is_dir() and not gone:
            gone.append(True)
            Path(path).parent.rmdir()
        return open_(path, *arguments)

    gone: list[bool] = []
    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(os, "open", opened)
    journal = Journal(tmp_path / "saved", "mine", "cpu")
    journal.start(CASE)
    assert len(running(tmp_path / "saved")) == 1
    assert (errors, gone) == ([], [True])
    journal.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """It is not tried for ever."""
    (tmp_path / FOLDER).touch()
    with pytest.raises(FileExistsError):
        Journal(tmp_path, "mine", "cpu").start(CASE)


@pytest.mark.parametrize("error", [None, UnavailableError])
def test_an_executor_s_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    """It holds the case while that is judged, whatever comes of it, and goes with the executor."""

    def judged(executor: Executor, case: Case) -> Verdict:
        (name,) = running(tmp_path / "saved")
        assert read(tmp_path / "saved" / FOLDER / name).case == case == CASE
        if error is not None:
            raise error
        return Verdict()

    monkeypatch.setattr(Executor, "_check", judged)
    with Executor("mine", "cpu", journal=Journal(tmp_path / "saved", "mine", "cpu")) as executor:
        if error is None:
            assert executor.check(CASE) == Verdict()
        else:
            with pytest.raises(error):
                executor.check(CASE)
        (name,) = running(tmp_path / "saved")
        assert (tmp_path / "saved" / FOLDER / name).read_bytes() == b""
        executor.close()
        assert running(tmp_path / "saved") == [name]
    assert list(tmp_path.iterdir()) == []
