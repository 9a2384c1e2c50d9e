"""Kernels with one fault planted, as implementations, and the search that must find the fault.

Triton reads a kernel's source from its file, so a planted kernel is a file of its own. The
search runs it in the harness's child process, whose death is a verdict; one child serves all
faults: the implementation ``tests.meta.planted:selected`` calls whatever file the bench names
last.
"""

import functools
import importlib.util
import os
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from ci.executor import Executor
from impl.contract import Implementation
from oracle.case import Case
from oracle.judge import Verdict
from tests.meta.faults import Fault, plant
from tests.strategies.cases import verify_cases

SOURCE = Path(__file__).parents[2] / "impl" / "triton" / "verify.py"
SELECTION = "KDAFUZZ_PLANTED"
"""Environment variable: the file that holds the path of the kernel to run."""
EXAMPLES = 300
ROUND = 10
"""Examples of one Hypothesis run. After its tenth it spends five of six examples on mutations of
the sixth: 300 examples of one run hold 80 distinct calls, 300 of thirty runs hold 240."""
FUNCTIONS = ("kda_recoverssm_verify", "kda_recoverssm_verify_by_slot")


def selected() -> Implementation:
    """The implementation that runs the kernel named in the file ``$KDAFUZZ_PLANTED``, call by call."""
    return Implementation(
        name="planted", operations={"verify": tuple(map(_dispatch, FUNCTIONS))}, arithmetic="sequential-fp32"
    )


def _dispatch(name: str) -> Callable[..., object]:
    @functools.wraps(getattr(load(str(SOURCE)), name))
    def call(*args: object, **kwargs: object) -> object:
        path = Path(os.environ[SELECTION]).read_text()
        return getattr(load(path), name)(*args, **kwargs)

    return call


@functools.cache
def load(path: str) -> ModuleType:
    """The kernel module in a file, imported under a name of its own."""
    name = f"planted_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Bench:
    """A folder of planted kernels and the child process that judges them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._selection = folder, folder / "selection"
        os.environ[SELECTION] = str(self._selection)
        self._executor = Executor(f"{__name__}:selected", "cpu")

    def select(self, fault: Fault | None) -> Path:
        """Plant the fault, or none; every later ``check`` judges that kernel. Returns its file."""
        path = self._folder / f"{fault.name if fault else 'sound'}.py"
        source = SOURCE.read_text()
        path.write_text(plant(source, fault) if fault else source)
        self._selection.write_text(str(path))
        return path

    def check(self, case: Case) -> Verdict:
        """The selected kernel's verdict."""
        return self._executor.check(case)

    def __enter__(self) -> "Bench":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.close()
        del os.environ[SELECTION]


@dataclass
class Search:
    """What a search found: examples to the first failure (0: none), that failure, the smallest one."""

    examples: int = 0
    calls: int = 0
    seconds: float = 0.0
    first: Verdict | None = None
    case: Case | None = None
    verdict: Verdict | None = None

    @property
    def size(self) -> tuple[int, int, int]:
        """Rows, heads and tokens of the smallest failing case."""
        assert self.case is not None
        return self.case.call.rows, self.case.call.heads, self.case.call.tokens


class _EnoughError(BaseException):
    """Leaves Hypothesis at once; it would rerun, shrink or report anything less."""


def search(
    check: Callable[[Case], Verdict],
    *,
    seed: int,
    examples: int = EXAMPLES,
    shrink_calls: int = 0,
    shrink_seconds: float = 60.0,
) -> Search:
    """Draw cases of the suite's own strategy until one fails; then shrink within a budget.

    With ``shrink_calls=0`` the first failure ends the search.
    """
    result = Search()
    judge = _Judge(check, result, shrink_calls, shrink_seconds)
    for first in range(0, examples, ROUND):
        _round(judge, seed + first, min(ROUND, examples - first))
        if result.first is not None:
            break
    return result


@dataclass
class _Judge:
    """The body of the search: judges, keeps count and gives up shrinking when the budget is spent."""

    check: Callable[[Case], Verdict]
    result: Search
    shrink_calls: int
    shrink_seconds: float
    started: float = field(default_factory=time.monotonic)

    def __call__(self, case: Case) -> None:
        result = self.result
        result.calls += 1
        verdict = self.check(case)
        seconds = time.monotonic() - self.started
        if not verdict.ok:
            if result.first is None:
                result.examples, result.first, result.seconds = result.calls, verdict, seconds
            # While shrinking, Hypothesis tries nothing that is not simpler than the last failure.
            result.case, result.verdict = case, verdict
        if result.first is not None and (
            result.calls - result.examples >= self.shrink_calls
            or seconds - result.seconds >= self.shrink_seconds
        ):
            raise _EnoughError
        assert verdict.ok


def _round(judge: _Judge, seed: int, examples: int) -> None:
    @hypothesis.seed(seed)
    @settings(
        phases=[Phase.generate, Phase.shrink],
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=verify_cases())
    def body(case: Case) -> None:
        judge(case)

    try:
        body()
    except (_EnoughError, AssertionError):
        if judge.result.first is None:
            raise


def seed_of(name: str) -> int:
    """A fixed seed for a fault's search, so that faults do not all meet the same cases."""
    return zlib.crc32(name.encode())
