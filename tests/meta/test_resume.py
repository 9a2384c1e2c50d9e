"""How parts of a run are handed out where workers die, and where it goes on with what an earlier one did."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from ci.campaign import exit_code
from ci.failures import load
from ci.failures import save as save_case
from ci.fuzz import DEATHS, Run, _Worker
from ci.gpus import Gpu, Seat, seats
from ci.processes import TerminatedError
from ci.runlog import Past, RunLog, latest, new_path, read_log
from ci.search import Failure, InterruptedSearchError, Search, Tally
from ci.worker import Event, Options, Shard, _alone, _run_shard
from impl.contract import Domain, UnavailableError
from oracle.case import Case
from oracle.judge import Problem, Verdict
from tests.meta.commands import CASE
from tests.meta.test_journal import HERE, NO_PID, WHOLE, dead

BROKEN = Verdict(9.0, problems=(Problem("stray", text="8 bytes"),))
FOUND, SMALLER, SMALLEST, OTHER = (msgspec.structs.replace(CASE, seed=seed) for seed in (3, 2, 1, 9))
Step = Case | int | str
Script = dict[str, list[list[Step]]]
"""What the workers that get a shard do, one after the other; the last goes on. A case is found, a number of
examples judged, a word says how it ends: done, dies, or why it cannot be had. ``a0`` is the implementation
and the index; a shard that is not here is searched to its end."""


def name_of(shard: Shard) -> str:
    """As in a script."""
    return f"{shard.implementation}{shard.index}"


@dataclass
class Puppet:
    """The process of a worker that plays its script, in a thread."""

    channel: Connection
    script: Script
    folder: Path
    given: list[Shard]
    pid: int = NO_PID
    exitcode: int | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.play)
        self.thread.start()

    def play(self) -> None:
        """Take shards until one is deadly, or none are left."""
        alive = True
        while alive and (task := self.take()) is not None:
            shard = task[0]
            parts = self.script.get(name_of(shard), [[shard.examples, "done"]])
            attempt = self.given.count(shard)
            self.given.append(shard)
            for step in parts[min(attempt, len(parts) - 1)]:
                alive = self.step(shard, step)
        self.exitcode = self.exitcode or (0 if alive else -9)
        self.channel.close()

    def take(self) -> tuple[Shard, Domain] | None:
        """The next task."""
        try:
            task: tuple[Shard, Domain] | None = self.channel.recv()
        except (EOFError, OSError):
            return None
        return task

    def step(self, shard: Shard, step: Step) -> bool:
        """Tell of one step; False if it is the last of the process."""
        match step:
            case int():
                digest = f"{shard.index + 1:x}"
                self.channel.send(Event(shard, Tally(examples=step, executions=step, digest=digest)))
            case Case():
                path = save_case(self.folder, step, BROKEN, {"implementation": shard.implementation})
                self.channel.send(Event(shard, failure=Failure(step, BROKEN), path=path))
            case "dies":
                return False
            case "dies judging":
                dead(self.folder, f"{HERE}-{self.pid}-1-ab.case", WHOLE)
                return False
            case "waits":
                while len(self.given) < 3:
                    time.sleep(0.01)
            case "done":
                self.channel.send(Event(shard, done=True))
            case _:
                self.channel.send(Event(shard, unavailable=str(step), done=True))
        return True

    def kill(self) -> None:
        """As of a process."""

    def terminate(self) -> None:
        """As of a process."""

    def join(self) -> None:
        """As of a process."""
        self.thread.join(5)


class Watched(RunLog):
    """A log that looks whether every failing case that it speaks of is on disk."""

    def failed(self, shard: Shard, failure: Failure, path: Path) -> None:
        """Log it, then look."""
        super().failed(shard, failure, path)
        assert all(found.exists() for _, found in read_log(self.path).failures.values())


@dataclass
class Stage:
    """A run with puppets; ``given`` are the shards in the order in which they were handed out."""

    folder: Path
    script: Script = field(default_factory=dict)
    given: list[Shard] = field(default_factory=list)
    taken: list[Seat | None] = field(default_factory=list)

    def play(self, *, examples: int = 200, jobs: int = 1, past: Past | None = None, **more: object) -> Run:
        """Execute a run of one implementation, or of two."""
        names = ("a", "b") if more.pop("both", False) else ("a",)
        places: list[Seat] = more.pop("seats", [])  # type: ignore[assignment]
        plain: dict[str, object] = {"keep_going": True, "save": self.folder, "jobs": jobs, **more}
        options = Options(names, ("verify",), "cpu", examples, **plain)  # type: ignore[arg-type]
        log = Watched(new_path(self.folder, 0))
        if past is None:
            log.begin(options, {}, no_known=True)
        else:
            log = Watched(latest(self.folder))
            log.resume(past)
        domains = {(name, "verify"): Domain() for name in names}
        run = Run(options, {}, domains, seats=places, log=log, past=past)
        run.execute(lambda _: None)
        return run

    def start(self, run: Run, seat: Seat | None) -> _Worker:
        """In place of a process."""
        del run
        ours, theirs = Pipe()
        self.taken.append(seat)
        return _Worker(Puppet(theirs, self.script, self.folder, self.given), ours, seat)  # type: ignore[arg-type]

    @property
    def order(self) -> list[str]:
        """What was handed out."""
        return [name_of(shard) for shard in self.given]

    def files(self) -> set[Path]:
        """The failing cases that are there."""
        return set((self.folder / "verify").glob("*.json"))


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A stage in place of processes."""
    made, before = Stage(tmp_path / "saved"), threading.active_count()
    monkeypatch.setattr(Run, "_start", lambda run, seat: made.start(run, seat))
    yield made
    assert threading.active_count() == before


def only(run: Run) -> tuple[Failure, Path]:
    """Its one failure."""
    ((failure,),) = (row.failures for row in run.rows.values())
    return failure


def told(run: Run) -> list[tuple[int, bool]]:
    """Its failing cases, by their seeds, and whether each is flaky; all are on disk."""
    found = [failure for row in run.rows.values() for failure in row.failures]
    assert all(load(path).case == failure.case for failure, path in found)
    return [(failure.case.seed, failure.flaky) for failure, _ in found]


LOST = "a worker was lost (the process died of SIGKILL); another one does its part again"


def test_a_part_whose_worker_is_lost_is_searched_again(stage: Stage) -> None:
    """What the lost one counted does not count twice; other parts go on meanwhile."""
    stage.script = {"a0": [[7, "dies"], [5, "dies"], [100, "done"]]}
    run = stage.play(examples=300, jobs=2)
    assert sorted(stage.order) == ["a0", "a0", "a0", "a1", "a2"]
    (row,) = run.rows.values()
    assert (row.tally.examples, row.tally.digest, row.stopped) == (300, f"{1 + 2 + 3:016x}", "")
    assert run.notes == [LOST] * 2
    assert len(read_log(latest(stage.folder)).shards) == 3
    assert exit_code(run) == 0


def test_a_part_that_kills_every_worker(stage: Stage) -> None:
    """It ends its row; the others are complete, and nobody takes the run for a clean one."""
    stage.script = {"a1": [[7, "dies"]]}
    run = stage.play(examples=300, jobs=2, both=True)
    first, second = run.rows.values()
    assert stage.order.count("a1") == DEATHS == 3
    assert {"b0", "b1", "b2"} <= set(stage.order)
    assert "a2" not in stage.order[stage.order.index("b1") :]
    assert (
        first.stopped
        == "3 workers were lost over one part of the search; the last: the process died of SIGKILL"
    )
    assert (first.tally.examples, second.tally.examples, second.stopped) == (first.finished.examples, 300, "")
    assert run.notes == [LOST] * 2
    with pytest.raises(UnavailableError, match=r"^a verify stopped: 3 workers were lost"):
        exit_code(run)
    assert "a1" not in map(name_of, read_log(latest(stage.folder)).shards)


def test_a_lost_part_does_not_count(tmp_path: Path) -> None:
    """What is done counts, and what others are at."""
    run = Run(Options(("a",), ("verify",), "cpu", save=tmp_path), {}, {})
    (row,) = run.rows.values()
    process = SimpleNamespace(kill=bool, join=bool, exitcode=-9, pid=NO_PID)
    workers = []
    for index, examples in enumerate((7, 5)):
        channel, _ = Pipe()
        shard, part = Shard("a", "verify", index, 100), Tally(examples=examples)
        workers.append(_Worker(process, channel, None, shard, part))  # type: ignore[arg-type]
    row.finished.add(Tally(examples=30))
    row.tally.add(Tally(examples=42))
    lost, other = workers
    run._bury(workers, lost, deque())
    assert workers == [other]
    assert (row.tally.examples, row.finished.examples) == (35, 30)
    other.channel.close()


def test_what_a_lost_worker_found(stage: Stage) -> None:
    """Found again, it is the smaller case that counts; not found again, it is told as such, and logged so."""
    stage.script = {
        "a0": [[FOUND, SMALLER, "dies"], [FOUND, SMALLER, SMALLEST, 9, "done"]],
        "a1": [[OTHER, "dies"], [100, "done"]],
    }
    run = stage.play(jobs=1)
    assert sorted(told(run)) == [(SMALLEST.seed, False), (OTHER.seed, True)]
    assert len(stage.files()) == 2
    again = stage.play(past=read_log(latest(stage.folder)))
    assert sorted(told(again)) == sorted(told(run))
    assert again.rows["a", "verify"].tally == run.rows["a", "verify"].tally
    assert len(stage.given) == 4
    assert (exit_code(run), exit_code(again)) == (1, 1)


def test_what_a_deadly_part_found_is_kept(stage: Stage) -> None:
    stage.script = {"a0": [[FOUND, "dies"]]}
    run = stage.play(examples=100)
    assert told(run) == [(FOUND.seed, False)]
    assert exit_code(run) == 1


@pytest.mark.parametrize("first", ["a0", "a1"])
def test_two_parts_that_come_to_one_case(stage: Stage, first: str) -> None:
    """For one of them it is a step on the way to a smaller one: it stays for the other, whoever is first."""
    on_the_way: list[Step] = [FOUND, SMALLER, SMALLEST, 3, "done"]
    ends_there: list[Step] = [SMALLER, 3, "done"]
    stage.script = (
        {"a0": [ends_there], "a1": [on_the_way]}
        if first == "a0"
        else {"a0": [on_the_way], "a1": [ends_there]}
    )
    run = stage.play(jobs=1)
    assert sorted(told(run)) == [(SMALLEST.seed, False), (SMALLER.seed, False)]
    assert len(stage.files()) == 2


def test_one_part_is_at_the_case_of_another(stage: Stage) -> None:
    """Both have it for a while; neither takes it from the other."""
    run = Run(Options(("a",), ("verify",), "cpu", save=stage.folder), {}, {})
    verdict, found = BROKEN, {"implementation": "a"}
    paths = [save_case(stage.folder, case, verdict, found) for case in (FOUND, SMALLER)]
    one, other = (Shard("a", "verify", index, 100) for index in range(2))
    run._found(one, Failure(FOUND, verdict), paths[0])
    run._found(other, Failure(FOUND, verdict), paths[0])
    run._found(one, Failure(SMALLER, verdict), paths[1])
    assert stage.files() == set(paths)
    run._found(other, Failure(SMALLER, verdict), paths[1])
    assert stage.files() == {paths[1]}


def test_a_worker_is_ahead_of_what_the_run_has_heard(stage: Stage) -> None:
    """It has saved again what the run takes for a leftover of the worker before it."""
    run = Run(Options(("a",), ("verify",), "cpu", save=stage.folder), {}, {})
    paths = [save_case(stage.folder, case, BROKEN, {"implementation": "a"}) for case in (FOUND, SMALLER)]
    shard = Shard("a", "verify", 0, 100)
    run._left[shard] = Failure(SMALLER, BROKEN), paths[1]
    run._found(shard, Failure(FOUND, BROKEN), paths[0])
    assert stage.files() == {paths[0]}
    run._found(shard, Failure(SMALLER, BROKEN), paths[1])
    assert stage.files() == {paths[1]}
    assert load(paths[1]).case == SMALLER


def past_of(stage: Stage, script: Script, **more: object) -> Past:
    """What an interrupted run left: one that was killed when nothing of its script was left to do."""
    stage.script = script
    stage.play(**more)  # type: ignore[arg-type]
    stage.given.clear()
    path = latest(stage.folder)
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join([*(line for line in lines if '"index": 3' not in line or "failure" in line), ""])
    )
    return read_log(path)


def test_what_is_left_of_a_run_is_done_once(stage: Stage) -> None:
    """What was being shrunk comes first, and not a second time."""
    past = past_of(stage, {"a3": [[FOUND, SMALLER, 100, "done"]]}, examples=500)
    assert {name_of(shard) for shard in past.shards} == {"a0", "a1", "a2", "a4"}
    stage.script = {"a3": [[FOUND, SMALLER, SMALLEST, 100, "done"]]}
    run = stage.play(examples=600, jobs=3, past=past)
    assert sorted(stage.order) == ["a3", "a5"]
    assert told(run) == [(SMALLEST.seed, False)]
    assert len(stage.files()) == 1
    row = run.rows["a", "verify"]
    assert (row.tally.examples, row.tally.digest) == (600, f"{sum(range(1, 7)):016x}")
    finished = stage.play(examples=600, jobs=3, past=read_log(latest(stage.folder)))
    assert len(stage.given) == 2
    assert finished.rows["a", "verify"].tally == row.tally
    assert told(finished) == told(run)


def test_a_resumed_run_stops_at_its_first_failure(stage: Stage) -> None:
    """As it would have without the interruption."""
    past = past_of(stage, {"a0": [[FOUND, 9, "done"]]}, examples=500, keep_going=False)
    assert told(stage.play(examples=500, past=past, keep_going=False)) == [(FOUND.seed, False)]
    assert stage.given == []


def test_a_timed_run_has_what_is_left_of_its_time(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    past = past_of(stage, {"a3": [[FOUND, "done"]]}, examples=500)
    stage.script = {"a3": [[FOUND, "done"]], "a6": [["gone"]]}
    past.seconds = 70.0
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    run = stage.play(minutes=2.0, past=past)
    assert run._deadline == 1050.0
    assert stage.order == ["a3", "a5", "a6"]


def test_a_timed_run_whose_time_is_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing new begins, and who had no time to look has not shown that a case passes."""
    past = past_of(stage, {"a3": [[FOUND, "done"]]}, examples=500)
    stage.script = {"a3": [["done"]]}
    past.seconds = 130.0
    run = stage.play(minutes=2.0, past=past)
    assert stage.order == ["a3"]
    assert told(run) == [(FOUND.seed, False)]


def test_who_could_not_look_again_has_shown_nothing(stage: Stage) -> None:
    stage.script = {"a0": [[FOUND, "dies"], ["no memory"]]}
    run = stage.play()
    assert told(run) == [(FOUND.seed, False)]
    assert run.rows["a", "verify"].stopped == "no memory"
    assert read_log(latest(stage.folder)).shards == {}, "a resumed run tries again"


def test_a_worker_gets_the_gpu_of_the_one_it_replaces(stage: Stage) -> None:
    """And a run of few parts has its workers on many GPUs."""
    places = seats(tuple(Gpu(f"GPU-{i}", "X", 80 << 30, 80 << 30) for i in range(2)), 4)
    stage.script = {"a1": [["dies"], [100, "done"]], "a0": [["waits", "done"]]}
    stage.play(jobs=4, seats=places)
    assert [seat and seat.gpu.uuid for seat in stage.taken] == ["GPU-0", "GPU-1", "GPU-1"]


@pytest.mark.parametrize("lives", [True, False])
def test_what_a_lost_worker_was_judging(stage: Stage, lives: bool) -> None:
    """It is named where all die of it, and forgotten where another one lives; what others left is theirs."""
    other = dead(stage.folder, f"{HERE}-{NO_PID + 1}-1-ab.case", WHOLE)
    stage.script = {"a0": [["dies judging"], [100, "done"]] if lives else [["dies judging"]]}
    (row,) = stage.play(examples=100).rows.values()
    assert list(other.parent.iterdir()) == [other]
    if lives:
        assert stage.files() == set()
        return
    (path,) = stage.files()
    assert load(path).case == CASE
    how = "the process died of SIGKILL"
    assert row.stopped.endswith(f"; the last while it judged {path}: {how}")


@dataclass
class Judge:
    """What a worker has its cases judged by."""

    answer: Verdict | type[BaseException]
    did: list[str] = field(default_factory=list)

    def close(self) -> None:
        """Stop the process."""
        self.did.append("close")

    def check(self, case: Case) -> Verdict:
        """Judge in a new one."""
        assert case == CASE
        self.did.append("check")
        if isinstance(self.answer, Verdict):
            return self.answer
        raise self.answer


@pytest.mark.parametrize(("answer", "flaky"), [(Verdict(), True), (BROKEN, False)])
def test_a_failure_is_looked_at_alone(answer: Verdict, flaky: bool) -> None:
    """As the only case of a new process; one that passes there is not reproducible."""
    judge = Judge(answer)
    assert _alone(Failure(CASE, BROKEN), judge) == Failure(CASE, BROKEN, flaky=flaky)  # type: ignore[arg-type]
    assert judge.did == ["close", "check"]


def test_an_interruption_meanwhile_keeps_it() -> None:
    with pytest.raises(InterruptedSearchError) as raised:
        _alone(Failure(CASE, BROKEN), Judge(TerminatedError))  # type: ignore[arg-type]
    assert raised.value.failure == Failure(CASE, BROKEN)


@pytest.mark.parametrize(("seconds", "shrink"), [(0.0, False), (0.5, True)])
def test_how_long_a_worker_shrinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, shrink: bool
) -> None:
    asked: list[Search] = []

    def run(search: Search) -> tuple[Tally, Failure | None]:
        asked.append(search)
        search.found(Failure(CASE, BROKEN, shrunk=False))
        return Tally(), Failure(CASE, BROKEN)

    monkeypatch.setattr("ci.worker.run", run)
    ours, theirs = Pipe()
    options = Options(("a",), ("verify",), "cpu", save=tmp_path, shrink_seconds=seconds)
    shard = Shard("a", "verify", 0, 100)
    _run_shard(options, None, shard, Domain(), Judge(Verdict()), theirs)  # type: ignore[arg-type]
    assert [(search.shrink, search.shrink_seconds) for search in asked] == [(shrink, seconds)]
    told = []
    while ours.poll():
        told.append(ours.recv())
    found, flaky, done = told
    assert (found.failure.flaky, flaky.failure.flaky, done.done) == (False, True, True)
    assert found.path == flaky.path
    assert load(found.path).found["implementation"] == "a"
    ours.close()
    theirs.close()
