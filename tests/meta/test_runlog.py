"""The log of a run: what goes in comes out, however it ended, and what is no log is refused in one line."""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ci.asked import LATEST, resumed
from ci.failures import CORPORA, load
from ci.fuzz import Run
from ci.query import Offer
from ci.runlog import KEPT, Past, RunLog, describe, latest, new_path, read_log, unfinished
from ci.search import Failure, Tally
from ci.worker import Options, Shard
from impl.contract import UnavailableError
from impl.cute.emulator.settings import SCHEDULES_VARIABLE
from oracle.judge import Problem, Verdict
from tests.meta.commands import CASE, Result, here

FIRST, SECOND = Shard("a", "verify", 0, 100, "1"), Shard("b", "commit", 1, 50)
TALLY = Tally(
    examples=3,
    executions=9,
    seconds=0.1,
    ratio=0.25,
    ratios=[0.25, 0.0, 1e9],
    by_tensor={"out": 0.25},
    reached={"x": 2},
    known={"3a145342": 1},
    digest="00ff",
)
PROBLEM = Problem(
    "value",
    "out",
    "output",
    (0, 1),
    ("token", "head"),
    "nan",
    "\u2028\ud800",
    math.nan,
    math.inf,
    2,
    3,
    "a\nb",
)
FAILURE = Failure(CASE, Verdict(math.inf, {"out": math.inf}, (PROBLEM,), "path"), shrunk=False, flaky=True)
VERSIONS = {"a": "1", "b": ""}


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """Where failing cases go."""
    return tmp_path / "saved"


def options(save: Path, **given: Any) -> Options:
    """Of a run of two implementations."""
    plain = Options(("a", "b"), ("verify", "commit"), "cpu", seed=7, save=save, timeout=2.5, keep_going=True)
    return replace(plain, **given)


def written(save: Path, **given: Any) -> Path:
    """The log of a run that finished one part, and found something in both."""
    log = RunLog(new_path(save, 7))
    log.begin(options(save, **given), VERSIONS, no_known=True)
    log.failed(FIRST, replace(FAILURE, flaky=False), save / "verify/large.json")
    log.failed(FIRST, FAILURE, save / "verify/small.json")
    log.done(FIRST, TALLY)
    log.failed(SECOND, FAILURE, save / "verify/other.json")
    log.close()
    return log.path


def test_what_goes_in_comes_out(save: Path) -> None:
    """Of each part its last failing case; infinite and undefined numbers, and letters of any kind."""
    path = written(save, minutes=1.5, palette=3, shrink_seconds=0.0)
    past = read_log(path)
    assert past.options == options(save.absolute(), minutes=1.5, palette=3, shrink_seconds=0.0)
    assert (past.no_known, past.versions) == (True, VERSIONS)
    assert past.shards == {FIRST: TALLY}
    assert repr(past.failures) == repr(
        {FIRST: (FAILURE, save / "verify/small.json"), SECOND: (FAILURE, save / "verify/other.json")}
    )
    assert unfinished(past).keys() == {SECOND}
    assert 0.0 <= past.seconds < 60.0
    assert describe(past).startswith("3 examples in 1 finished parts, 1 failing cases (")


def test_every_kind_of_case(save: Path) -> None:
    log = RunLog(new_path(save, 7))
    log.begin(options(save), {}, no_known=False)
    given = [load(path).case for path in sorted(CORPORA.rglob("*.json"))]
    assert len({case.op for case in given}) > 5
    for index, case in enumerate(given):
        log.failed(replace(FIRST, index=index), replace(FAILURE, case=case), save / "x.json")
    log.close()
    failures = read_log(log.path).failures
    assert [failures[replace(FIRST, index=i)][0].case for i in range(len(given))] == given


def test_a_folder_that_moved(save: Path, tmp_path: Path) -> None:
    """As between CI jobs: failing cases are where the log is."""
    written(save)
    save.rename(tmp_path / "elsewhere")
    _, path = read_log(latest(tmp_path / "elsewhere")).failures[FIRST]
    assert path == tmp_path / "elsewhere/verify/small.json"


def test_the_seconds_of_a_run_add_up(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log = RunLog(new_path(save, 7))
    log.begin(options(save), {}, no_known=False)
    now += 5.5
    log.done(FIRST, TALLY)
    log.close()
    now += 1000.0
    log = RunLog(log.path)
    log.resume(read_log(log.path))
    now += 2.0
    log.done(SECOND, TALLY)
    log.close()
    past = read_log(log.path)
    assert past.seconds == 7.5
    assert past.shards.keys() == {FIRST, SECOND}


def test_wherever_it_is_cut(save: Path, tmp_path: Path) -> None:
    """The whole lines count, and a run that goes on begins with a new line."""
    path = written(save)
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in {*range(0, len(whole), 97), *ends, *(end - 1 for end in ends), *(end + 1 for end in ends)}:
        path.write_bytes(whole[:cut])
        if cut < ends[0]:
            with pytest.raises(UnavailableError, match="not the log of a run of this kdafuzz"):
                read_log(path)
            continue
        past, log = read_log(path), RunLog(path)
        lines = sum(end <= cut for end in ends)
        assert (len(past.failures), len(past.shards)) == (
            max(1, min(2, lines - 3)) * (lines > 1),
            int(lines > 3),
        )
        log.resume(past)
        log.done(replace(SECOND, index=9), TALLY)
        log.close()
        assert path.read_bytes().startswith(whole[: ends[lines - 1]] + b'{"shard"')
        assert replace(SECOND, index=9) in read_log(path).shards


def changed(path: Path, line: int, change: Callable[[dict[str, Any]], object]) -> None:
    """The log with one line's value changed."""
    lines = path.read_text().splitlines()
    value = json.loads(lines[line])
    change(value)
    lines[line] = json.dumps(value)
    path.write_text("\n".join([*lines, ""]))


CHANGES: dict[str, tuple[int, Callable[[dict[str, Any]], object], str]] = {
    "schema": (0, lambda v: v.update(kdafuzz=2), "not the log of a run of this kdafuzz"),
    "no options": (0, lambda v: v.pop("options"), "options"),
    "an option's type": (0, lambda v: v["options"].update(examples="many"), "Expected `int`, got `str`"),
    "no save": (0, lambda v: v["options"].pop("save"), "save"),
    "save": (0, lambda v: v["options"].update(save=3), "int"),
    "no seconds": (1, lambda v: v.pop("seconds"), "seconds"),
    "seconds": (1, lambda v: v.update(seconds="long"), "Expected `float`, got `str`"),
    "versions": (0, lambda v: v.update(versions=["1"]), "Expected `object`, got `array`"),
    "no_known": (0, lambda v: v.update(no_known="no"), "Expected `bool`, got `str`"),
    "shard": (1, lambda v: v.update(shard=[]), "Expected `object`, got `array`"),
    "no index": (1, lambda v: v["shard"].pop("index"), "index"),
    "another's part": (
        3,
        lambda v: v["shard"].update(operation="conv_update"),
        "a conv_update, which it was not",
    ),
    "tally": (3, lambda v: v.update(tally={"examples": "x"}), "Expected `int`, got `str`"),
    "case": (1, lambda v: v["failure"].update(case={"call": {"op": "none"}}), "Invalid value 'none'"),
    "verdict": (1, lambda v: v["failure"].update(verdict=None), "Expected `object`, got `null`"),
    "flaky": (1, lambda v: v["failure"].update(flaky="x"), "Expected `bool`, got `str`"),
    "no path": (1, lambda v: v.pop("path"), "path"),
    "path": (1, lambda v: v.update(path=7), "int"),
    "neither": (1, lambda v: v.pop("failure"), "failure"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_log_with_a_fault_is_refused(save: Path, what: str) -> None:
    path = written(save)
    line, change, sentence = CHANGES[what]
    changed(path, line, change)
    with pytest.raises(UnavailableError) as refused:
        read_log(path)
    text = str(refused.value)
    assert text.startswith(f"cannot resume {path}: ")
    assert sentence in text
    assert text.isprintable()


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Result]:
    """The command ``fuzz --resume`` in this process."""
    return lambda *given: here(monkeypatch, capsys, tmp_path, "fuzz", "--resume", *given)


GARBAGE: dict[str, bytes] = {
    "empty": b"",
    "no line": b"{}",
    "text": b"hello\n",
    "a list": b"[1]\n",
    "no text": b"\xff\xfe\n",
    "nested": b"[" * 200_000 + b"\n",
    "a large number": b"9" * 10_000 + b"\n",
    "a case": b'{"kdafuzz": 1}\n',
}


@pytest.mark.parametrize("what", GARBAGE)
def test_what_is_no_log_is_one_line(run: Callable[..., Result], save: Path, what: str) -> None:
    path = save / "runs/x.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(GARBAGE[what])
    result = run(str(path))
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"kdafuzz: cannot resume {path}: ")
    assert len(result.err.splitlines()) == 1
    assert path.read_bytes() == GARBAGE[what]


def test_a_log_that_is_not_there(run: Callable[..., Result], save: Path, tmp_path: Path) -> None:
    """Or is a folder, or lies where no run puts one."""
    told = run(LATEST, "--save", "saved")
    assert (told.code, told.err) == (
        2,
        "kdafuzz: no run to resume in saved/runs; give the path of its log\n",
    )
    for name in ("none.jsonl", "."):
        assert run(name).err.startswith(f"kdafuzz: cannot resume {tmp_path / name}: ")
    stray = written(save).rename(tmp_path / "stray.jsonl")
    assert (
        run(stray.name).err == f"kdafuzz: cannot resume {stray}: it lies in no folder runs of failing cases\n"
    )


@pytest.mark.parametrize(
    "option",
    [
        ("--examples", "5"),
        ("--minutes", "1"),
        ("--seed", "1"),
        ("--impl", "triton"),
        ("--op", "verify"),
        ("--device", "cpu"),
        ("--palette", "3"),
        ("--timeout", "5"),
        ("--shrink-seconds", "5"),
        ("--keep-going",),
        ("--no-known",),
    ],
)
def test_what_a_run_is_asked_stands_in_its_log(
    run: Callable[..., Result], save: Path, option: tuple[str, ...]
) -> None:
    result = run(str(written(save)), *option)
    assert (result.code, result.out) == (2, "")
    assert result.err == f"kdafuzz: --resume goes on as the run was asked; leave out {option[0]}\n"


def test_other_versions_are_another_run(
    run: Callable[..., Result], save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other schedules of the emulator too. Neither the log nor what a killed process left is touched."""
    monkeypatch.setattr("ci.campaign.probe", lambda name, device: Offer("1"))
    given = options(save, implementations=("a",), operations=("verify",), examples=1)
    for versions, variable, told in (
        ({"a": "9"}, None, "it ran {'a': '9'}; found {'a': '1'}. Start a new run"),
        ({"a": "1"}, "lazy", f"found {{'a': '1', '{SCHEDULES_VARIABLE}': 'lazy'}}. Start a new run"),
    ):
        log = RunLog(new_path(save, 7))
        log.begin(given, versions, no_known=False)
        log.close()
        before = log.path.read_bytes()
        suspect = save / "verify/suspect.json"
        suspect.parent.mkdir(exist_ok=True)
        suspect.touch()
        monkeypatch.setattr("ci.asked.recover", lambda folder, kept=suspect: [kept])
        result = run(str(log.path), *(("--schedules", variable) if variable else ()))
        assert result.code == 2
        assert result.err.startswith(f"kdafuzz: cannot resume {log.path}: it ran ")
        assert result.err.endswith(f"{told}\n")
        assert log.path.read_bytes() == before
        assert suspect.exists()
    assert SCHEDULES_VARIABLE not in os.environ


def test_a_run_that_is_still_going_on(save: Path) -> None:
    """Two would write one log."""
    log = RunLog(new_path(save, 7))
    log.begin(options(save), {}, no_known=False)
    second = RunLog(log.path)
    with pytest.raises(UnavailableError, match=r"^cannot resume .*: its run is still going on$"):
        second.resume(read_log(log.path))
    log.done(FIRST, TALLY)
    log.close()
    second.resume(read_log(log.path))
    second.close()


def test_resumed_options(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All as it was, but for the number of processes; known findings as they are today."""
    path = written(save, jobs=5)
    monkeypatch.chdir(path.parent)
    known = ("finding",)
    monkeypatch.setattr("ci.asked.read_known", lambda: known)
    for given, folder in ((str(path), save), (path.name, save), (LATEST, save)):
        asked = resumed(resume=given, save=save, jobs=3, examples=1)
        assert asked.options == options(folder, jobs=3)
        assert asked.past is not None
        assert asked.past.failures[FIRST][1] == folder / "verify/small.json"
    assert resumed(resume=LATEST, save=save, jobs=None).options.jobs >= 1
    monkeypatch.chdir(save.parent)
    assert resumed(resume=LATEST, save=Path(save.name), jobs=3).options.save == Path(save.name)
    changed(path, 0, lambda v: v.update(no_known=False))
    assert resumed(resume=LATEST, save=save, jobs=3).options.known == known


def test_old_logs_go(save: Path) -> None:
    """The oldest; whatever else lies there stays."""
    (save / "runs").mkdir(parents=True)
    (save / "runs/notes.txt").touch()
    paths = [save / f"runs/2026{number:02d}.jsonl" for number in range(KEPT + 3)]
    for path in paths:
        log = RunLog(path)
        log.begin(options(save), {}, no_known=False)
        log.close()
    assert sorted((save / "runs").glob("*.jsonl")) == paths[-KEPT:]
    assert latest(save) == paths[-1]
    assert (save / "runs/notes.txt").exists()


def test_names_go_by_universal_time(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where clocks are set back an hour, the latest log is still the latest."""
    monkeypatch.setenv("TZ", "EST+20")
    time.tzset()
    try:
        assert new_path(save, 1).name.startswith(time.strftime("%Y%m%d-%H", time.gmtime()))
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_log_that_is_not_open_takes_nothing(save: Path) -> None:
    log = RunLog(new_path(save, 7))
    log.done(FIRST, TALLY)
    assert not save.exists()


def test_the_command_says_how_to_go_on(
    save: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line that an interrupted run prints is the one that resumes it."""
    monkeypatch.setattr("ci.campaign.probe", lambda name, device: Offer("1"))

    def interrupted(run: Run, _: object) -> None:
        assert run._log is not None
        run._log.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "execute", interrupted)
    asked = (
        "--impl",
        "mine:right",
        "--op",
        "verify",
        "--seed",
        "3",
        "--save",
        "a b",
        "--device",
        "cpu",
    )
    result = here(monkeypatch, capsys, tmp_path, "fuzz", *asked, "--examples", "8")
    assert result.code == 130
    (line,) = [line for line in result.out.splitlines() if line.startswith("to go on: ")]
    path = latest(Path("a b"))
    assert line == f"to go on: kdafuzz fuzz --resume '{path}'"
    past = read_log(path)
    assert isinstance(past, Past)
    assert (past.options.examples, past.options.seed) == (8, 3)
    assert msgspec.json.decode(path.read_bytes())["options"]["implementations"] == ["mine:right"]
