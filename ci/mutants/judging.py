"""One mutant, judged: its copy, its processes, the search, and the usual test beside it."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from ci.executor import Executor, SuiteError
from ci.known import Known, explained
from ci.mutants import baseline
from ci.mutants.baseline import Answer
from ci.mutants.forked import ForkedExecutor, answer_of
from ci.mutants.sites import Mutant, planted
from ci.mutants.subjects import Copy, Subject
from ci.processes import ending
from ci.search import Failure, Search, run
from impl.contract import Domain, UnavailableError, one_line
from oracle.case import Case
from oracle.judge import Verdict
from tests.strategies.cases import cases

SOUND = "sound"
"""The id of the subject without a fault."""
SERVE_SHARE = 10
"""A script of serving is worth so many examples: it makes about as many calls."""
_COMPILERS = ("DSL", "UnsupportedLanguageConstruct", "PtxasError", "NVVM", "CompilationError", "ICE")
"""How the names of a compiler's errors begin, and its internal ones."""

Status = Literal["killed", "survived", "stillborn", "broken"]


class Outcome(msgspec.Struct, frozen=True):
    """What became of a mutant.

    Killed: ``operation``, the number of the failing ``example`` of its search, ``kind`` and
    ``stage`` of the verdict. ``judged`` counts all examples by operation. Stillborn: it cannot be
    loaded or compiled. Broken: the suite could give no verdict. ``text`` says more. ``baseline`` is
    what the usual test came to, if it was asked.
    """

    id: str
    key: str
    status: Status
    operation: str = ""
    example: int = 0
    kind: str = ""
    stage: str = ""
    text: str = ""
    seconds: float = 0.0
    judged: dict[str, int] = {}
    baseline: Literal["", "killed", "survived"] = ""
    baseline_text: str = ""


@dataclass(frozen=True)
class Task:
    """A mutant to judge, or None: the sound subject; ``operations`` in order, with their domains."""

    subject: Subject
    mutant: Mutant | None
    operations: tuple[str, ...]
    domains: Mapping[str, Domain]
    examples: int
    seed: int
    timeout: float
    palette: int = 0
    baseline: bool = False
    version: str = ""
    known: tuple[Known, ...] = ()

    @property
    def id(self) -> str:
        """The mutant's, or that of the sound subject's search of one operation."""
        return self.mutant.id if self.mutant is not None else f"{SOUND}:{','.join(self.operations)}"


def judge(task: Task) -> Outcome:
    """Search until the first example that fails."""
    started = time.monotonic()
    key = task.mutant.key if task.mutant is not None else task.id
    if task.mutant is not None:
        try:
            compile(planted(task.subject.texts[task.mutant.module], task.mutant), task.mutant.module, "exec")
        except SyntaxError as error:
            return Outcome(task.id, key, "stillborn", text=one_line(error))
    with tempfile.TemporaryDirectory(prefix="kdafuzz-mutant-") as name:
        copy = task.subject.copy(Path(name), task.mutant)
        outcome = _searched(task, copy, Outcome(task.id, key, "survived"))
        outcome = msgspec.structs.replace(outcome, seconds=round(time.monotonic() - started, 2))
        if task.baseline and outcome.status in ("killed", "survived"):
            wrong = usual_test(task, copy)
            outcome = msgspec.structs.replace(
                outcome, baseline="killed" if wrong else "survived", baseline_text=wrong
            )
    return outcome


def _searched(task: Task, copy: Copy, outcome: Outcome) -> Outcome:
    replace = msgspec.structs.replace
    judged: dict[str, int] = {}
    with _executor(task, copy) as executor:
        try:
            executor.start()
        except (UnavailableError, SuiteError) as error:
            last = str(error).strip().splitlines()[-1]
            return replace(outcome, status="stillborn", text=one_line(last))
        for operation in task.operations:
            try:
                examples, failure = _search(task, operation, executor)
            except (UnavailableError, SuiteError) as error:
                text = one_line(error) if isinstance(error, UnavailableError) else str(error)[-1000:]
                return replace(outcome, status="broken", operation=operation, text=text, judged=judged)
            judged[operation] = examples
            if failure is not None:
                return _killed(replace(outcome, judged=judged), operation, examples, failure.verdict)
    return replace(outcome, judged=judged)


def _executor(task: Task, copy: Copy) -> Executor:
    """What runs the copy: on the CPU in a fork, elsewhere in a new process."""
    if task.subject.device == "cpu":
        return ForkedExecutor(copy, "cpu", timeout=task.timeout)
    return Executor(
        copy.implementation, task.subject.device, timeout=task.timeout, environment=copy.environment
    )


def _search(task: Task, operation: str, executor: Executor) -> tuple[int, Failure | None]:
    def known(case: Case, verdict: Verdict) -> str:
        found = explained(task.known, task.subject.name, task.version, case, verdict)
        return found.case if found is not None else ""

    examples = task.examples if operation != "serve" else -(-task.examples // SERVE_SHARE)
    tally, failure = run(
        Search(
            strategy=cases(operation, task.domains[operation], seed=task.seed, variants=task.palette),
            judge=executor.check,
            seed=task.seed,
            examples=examples,
            shrink=False,
            known=known,
        )
    )
    return tally.examples, failure


def _killed(outcome: Outcome, operation: str, example: int, verdict: Verdict) -> Outcome:
    problem = verdict.problems[0]
    status: Status = "killed"
    if problem.kind == "raised" and problem.text.startswith(_COMPILERS):
        status = "stillborn"
    return msgspec.structs.replace(
        outcome,
        status=status,
        operation=operation,
        example=example,
        kind=problem.kind,
        stage=verdict.stage,
        text=one_line(problem.describe()),
    )


def usual_test(task: Task, copy: Copy) -> str:
    """What the usual test fails with, in a process of its own; nothing if it passes."""
    operations = tuple(operation for operation in task.operations if operation != "serve")
    arguments = copy.implementation, task.subject.device, operations
    limit = 10.0 * task.timeout
    if task.subject.device == "cpu":
        printed, failure = answer_of(partial(baseline.main, *arguments), copy, "cpu", limit)
        return failure or _read_answer(printed)
    command = [sys.executable, "-P", "-m", "ci.mutants.baseline"]
    command += [*arguments[:2], ",".join(operations)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **copy.environment}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"no result after {limit:g} s"
    if done.returncode:
        return ending(done.returncode, done.stderr)
    return _read_answer(done.stdout)


def _read_answer(printed: bytes) -> str:
    """The first operation that fails and how."""
    lines = printed.decode(errors="replace").strip().splitlines()
    answer = msgspec.json.decode(lines[-1], type=Answer)
    return next((f"{name}: {text}" for name, text in answer.failing.items() if text), "")
