"""Third-party implementations that fail in every way: each is a verdict of its kind, and the run goes on."""

import os
import re
import shlex
import signal
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import ci.fuzz
from ci.child import Reply, _failed
from ci.executor import Executor, SuiteError
from ci.failures import save
from ci.fuzz import Run
from ci.worker import Options
from impl.contract import Domain, UnavailableError
from oracle.calls.verify import Verify
from oracle.case import Case, Repeat
from oracle.codec import read
from oracle.judge import Verdict
from oracle.layout import Layout
from tests.meta.calls import verify_of
from tests.meta.commands import gone, kdafuzz, plug_in, processes_of, tree

CASE = Case(
    call=Verify(
        heads=2,
        key_dim=4,
        value_dim=4,
        window=2,
        pool=3,
        qlens=(2, 1),
        slots=(1, 2),
        ids=(0, 1),
        capacity=2,
        lower_bound=0.0,
    )
)
RIGHT = CASE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder of the children, with the zoo in it."""
    made, before = tmp_path_factory.mktemp("zoo"), Path.cwd()
    plug_in(made)
    os.chdir(made)
    yield made
    os.chdir(before)


@pytest.fixture(scope="module")
def menu(folder: Path) -> Iterator[Executor]:
    """One child for all misbehaviours, as long as it lives."""
    with Executor("zoo_outside:menu", "cpu", timeout=3.0) as made:
        yield made


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of the test's own, with the zoo in it."""
    plug_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ordered(step: int, case: Case = CASE, *, own_out: bool = True) -> Case:
    """The case that asks for a step of the menu."""
    replaced = msgspec.structs.replace(case.call, lower_bound=-float(step), own_out=own_out)
    return msgspec.structs.replace(case, call=replaced)


FENCED = msgspec.structs.replace(CASE, layouts={"out": Layout(fence="above")})
REPEATED = msgspec.structs.replace(CASE, relation=Repeat())
LOADER_AND_COPY = 2
"""Processes behind an executor on the CPU: one that has everything loaded, and its forked copy."""
MENU = {
    "raises": (ordered(1), "raised", "RuntimeError: boom ?[31m?"),
    "returns None": (ordered(2), "raised", "it returned NoneType"),
    "returns a wrong shape": (
        ordered(3, own_out=False),
        "raised",
        "out has shape (3, 2, 1); expected (3, 2, 4)",
    ),
    "returns another shape than out": (ordered(3), "raised", "it returned another tensor"),
    "returns a wrong dtype": (ordered(4, own_out=False), "raised", "it returned torch.float64"),
    "returns another tensor than out": (ordered(5), "raised", "it returned another tensor"),
    "writes an input": (ordered(6), "frame", "must keep its bytes"),
    "writes past the end": (ordered(7), "stray", "8 bytes changed outside every tensor, first at out +96"),
    "writes past a fence": (ordered(7, FENCED), "crash", "SIGSEGV"),
    "differs the second time": (ordered(8, REPEATED), "relation", "relation Repeat"),
    "changes torch's settings": (ordered(9), "raised", "default dtype, flushing of subnormal numbers"),
    "leaves by SystemExit": (ordered(12), "crash", "the process exited with 3"),
    "reads the standard input": (ordered(13), "raised", "EOFError"),
    "cannot even be printed": (ordered(14), "raised", "RudeError"),
    "closes our channel": (ordered(15), "crash", "the process "),
    "dies and leaves a process": (ordered(16), "crash", "the process exited with 4"),
    "segfaults": (ordered(17), "crash", "the process died of SIGSEGV"),
    "exits": (ordered(18), "crash", "the process exited with 3"),
    "hangs": (ordered(19), "hang", "no result after 3 s"),
    "leaves with a message": (ordered(21), "crash", "the process exited with 1: ?[31mbye"),
    "writes into our channel": (ordered(22), "crash", "channel"),
    "returns nothing that can be read": (ordered(23, own_out=False), "raised", "meta"),
}


@pytest.mark.parametrize("what", MENU)
def test_a_fault_is_a_verdict(menu: Executor, folder: Path, what: str) -> None:
    """And the next case is judged as if nothing had been."""
    case, kind, sentence = MENU[what]
    verdict = menu.check(case)
    assert [problem.kind for problem in verdict.problems][:1] == [kind], verdict
    line = verdict.problems[0].describe()
    assert sentence in line
    assert line.isprintable()
    assert save(folder / "saved", case, verdict, {}).exists()
    assert menu.check(RIGHT).ok
    assert len(processes_of(folder)) == LOADER_AND_COPY


@pytest.mark.parametrize("step", [10, 11, 20], ids=["leaks a thread", "prints megabytes", "deletes its file"])
def test_what_is_no_fault(own: Path, step: int) -> None:
    with Executor("zoo_outside:menu", "cpu") as executor:
        for _ in range(3):
            assert executor.check(ordered(step)).ok
        assert executor._errors is not None
        assert os.fstat(executor._errors.fileno()).st_size < 20e6
        if step == 20:
            assert not (own / "zoo_outside.py").exists()
            assert executor.check(ordered(17)).problems[0].kind == "crash"
            assert executor.check(RIGHT).ok, "a crash needs no loading"
            executor.close()
            with pytest.raises(UnavailableError, match="menu: cannot import zoo_outside: No module named"):
                executor.check(RIGHT)
    assert gone(own)


@pytest.mark.parametrize(("number", "found"), [(signal.SIGKILL, "right"), (signal.SIGABRT, "crash")])
def test_a_child_that_ends_between_cases(menu: Executor, number: int, found: str) -> None:
    """Killed from outside it says nothing of the next case; what it dies of by itself is told."""
    assert menu.check(RIGHT).ok
    os.kill(menu.pid, number)
    os.waitid(os.P_PID, menu.pid, os.WEXITED | os.WNOWAIT)
    assert told(menu.check(RIGHT)) == found
    assert menu.check(RIGHT).ok


def copy_of(executor: Executor, folder: Path) -> int:
    """The process that judges: a copy of the one that has everything loaded."""
    end = time.monotonic() + 10.0
    while time.monotonic() < end:
        copies = set(processes_of(folder)) - {executor.pid}
        if len(copies) == 1:
            return copies.pop()
        time.sleep(0.01)
    raise AssertionError(f"no copy of {executor.pid}")


def told(verdict: Verdict) -> str:
    return verdict.problems[0].kind if verdict.problems else "right"


def test_a_copy_killed_between_cases_owes_no_reply(menu: Executor, folder: Path) -> None:
    """The cases after it are judged as ever: no verdict is another case's."""
    assert menu.check(RIGHT).ok
    killed = copy_of(menu, folder)
    os.kill(killed, 9)
    while copy_of(menu, folder) == killed:
        time.sleep(0.01)
    asked = [RIGHT, ordered(1), RIGHT, RIGHT, ordered(1)]
    assert [told(menu.check(case)) for case in asked] == ["right", "raised", "right", "right", "raised"]


def test_a_request_that_is_lost_with_its_copy_is_asked_again(menu: Executor, folder: Path) -> None:
    """Killed after it has read the request, before it is at work."""
    assert menu.check(RIGHT).ok
    copy = copy_of(menu, folder)
    os.kill(copy, signal.SIGSTOP)
    assert menu._child is not None
    assert menu._child.stdin is not None
    pipe = Path(f"/proc/self/fd/{menu._child.stdin.fileno()}").readlink()
    ends = [end for end in Path(f"/proc/{copy}/fd").iterdir() if end.readlink() == pipe]

    def lose() -> None:
        with ends[0].open("rb", buffering=0) as requests:
            assert requests.read(1 << 16)
        os.kill(copy, signal.SIGKILL)

    losing = threading.Thread(target=lose)
    losing.start()
    verdict = menu.check(ordered(1))
    losing.join()
    assert told(verdict) == "raised"
    assert [told(menu.check(case)) for case in (RIGHT, ordered(1))] == ["right", "raised"]


def test_a_copy_that_dies_by_itself_between_cases_is_told(menu: Executor, folder: Path) -> None:
    """What a kernel leaves may do so; on a GPU, where there is no copy, it is told as well."""
    assert menu.check(RIGHT).ok
    copy = copy_of(menu, folder)
    assert menu.check(ordered(24)).ok
    while copy_of(menu, folder) == copy:
        time.sleep(0.01)
    verdict = menu.check(RIGHT)
    assert [problem.kind for problem in verdict.problems] == ["crash"]
    assert verdict.problems[0].text.startswith("after the case before this one the process died of SIGSEGV")
    assert [told(menu.check(case)) for case in (ordered(1), RIGHT)] == ["raised", "right"]


def test_a_copy_killed_at_work_is_a_crash_of_its_case(menu: Executor, folder: Path) -> None:
    assert menu.check(RIGHT).ok
    killer = threading.Timer(0.5, os.kill, (copy_of(menu, folder), 9))
    killer.start()
    verdict = menu.check(ordered(19))
    killer.join()
    assert "SIGKILL" in verdict.problems[0].text
    assert [told(menu.check(case)) for case in (ordered(1), RIGHT)] == ["raised", "right"]


def test_a_late_reply_is_nobody_s(menu: Executor) -> None:
    """A copy that dies once it has answered may leave two replies to one request."""
    assert menu.check(RIGHT).ok
    late = msgspec.msgpack.encode(Reply(died=-9, number=menu._asked))
    menu._unread = struct.pack("<I", len(late)) + late
    assert [told(menu.check(case)) for case in (ordered(1), RIGHT)] == ["raised", "right"]


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_what_would_only_run_into_the_timeout_is_refused(device: str) -> None:
    """It would be called a hang; with more time it is judged. A GPU is fast enough for any case."""
    many = msgspec.structs.replace(verify_of(CASE), heads=4000, window=8)
    assert many.effort == 2 * 8 * 4000
    wide = Case(
        call=verify_of(CASE), layouts={"state": Layout(gaps=(510 << 20 >> 2, 0, 0, 0))}, relation=Repeat()
    )
    for case in (Case(call=many), wide):
        with pytest.raises(
            UnavailableError, match=rf"^the case would take {device} about \d+ s; raise --time"
        ):
            Executor("nothing", device, timeout=1.0).check(case)
        for patient, where in ((900.0, device), (1.0, "cuda")):
            with pytest.raises(UnavailableError, match=r"unknown implementation 'nothing'|cuda"):
                Executor("nothing", where, timeout=patient).check(case)


def test_no_memory_is_no_fault_of_the_suite() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    for error in (caught.value, MemoryError()):
        assert _failed(error) == Reply(unavailable="there is not enough memory here to judge the case")
    assert "ZeroDivisionError" in _failed(ZeroDivisionError()).broken
    assert "another" in _failed(RuntimeError("another")).broken


def test_what_cannot_be_loaded(folder: Path) -> None:
    (folder / "dies_outside.py").write_text("import os\nos.abort()")
    with Executor("dies_outside:factory", "cpu") as executor:
        for _ in range(2):
            with pytest.raises(UnavailableError, match="loading failed: the process died of SIGABRT"):
                executor.check(CASE)


def test_the_suite_s_own_fault_is_told_as_such(menu: Executor) -> None:
    with pytest.raises(SuiteError, match="unheard"):
        menu.check(msgspec.structs.replace(CASE, regimes={"q": "unheard"}))
    assert menu.check(RIGHT).ok


def test_a_child_ends_with_the_thread_that_started_it(folder: Path) -> None:
    executor = Executor("zoo_outside:menu", "cpu")
    verdicts: list[Verdict] = []
    thread = threading.Thread(target=lambda: verdicts.append(executor.check(RIGHT)))
    thread.start()
    thread.join()
    assert verdicts[0].ok
    assert executor._child is not None
    assert executor._child.wait(10) == -9
    executor.close()


def test_cases_go_on_after_a_crash(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --keep-going; the crash, which does not come again, is told as not reproducible."""
    monkeypatch.setattr(ci.fuzz, "SHARD", 1)
    key = ("zoo_outside:killed_once", "verify")
    options = Options((key[0],), ("verify",), "cpu", 3, save=own / "saved", keep_going=True)
    run = Run(options, {}, {key: Domain(records=("row",))})
    run.execute(lambda _: None)
    row = run.rows[key]
    assert row.tally.examples == 3
    assert [(f.verdict.problems[0].kind, f.flaky, path.exists()) for f, path in row.failures] == [
        ("crash", True, True)
    ]
    assert gone(own)


@pytest.mark.slow
def test_from_the_command_to_the_replay(tmp_path: Path) -> None:
    """Each implementation fails once, its case is on disk, and the printed line fails alike."""
    plug_in(tmp_path)
    kinds = {"segfaults": "crash: ", "hangs": "hang: ", "large": "output: "}
    names = ",".join(f"zoo_outside:{name}" for name in kinds)
    options = (
        "--op",
        "verify",
        "--examples",
        "60",
        "--seed",
        "1",
        "--jobs",
        "2",
        "--timeout",
        "1",
        "--json",
        "out/result.json",
    )
    result = kdafuzz("fuzz", "--impl", names, *options, cwd=tmp_path)
    assert (result.code, result.err) == (1, "")
    assert "\x1b" not in result.out
    rows = msgspec.json.decode((tmp_path / "out/result.json").read_bytes())["rows"]
    assert [len(row["failures"]) for row in rows] == [1, 1, 1]
    assert all(row["failures"][0]["verdict"][0].startswith(kinds[row["implementation"][12:]]) for row in rows)
    lines = re.findall(r"^  kdafuzz replay (.*)$", result.out, re.M)
    assert len(lines) == 3
    files = [shlex.split(line)[0] for line in lines]
    assert {f".kdafuzz/{Path(name)}" for name in tree(tmp_path / ".kdafuzz") if name.endswith("json")} == {
        *files
    }
    smallest = verify_of(read(tmp_path / files[-1]).case)
    assert (smallest.heads, smallest.rows, smallest.tokens) == (2, 1, 1)
    # The saved implementation and device are what the line names: one replay stands for all.
    again = kdafuzz("replay", *files, "--timeout", "1", cwd=tmp_path)
    assert (again.code, again.err) == (1, "")
    assert re.findall(r"^(FAIL|PASS|SKIP)", again.out, re.M) == ["FAIL"] * 3
    assert all(kind in again.out for kind in kinds.values())
    assert lines == re.findall(r"^     kdafuzz replay (.*)$", again.out, re.M)
    assert gone(tmp_path)
