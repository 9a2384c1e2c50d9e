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
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType

from ci.executor import Executor
from ci.search import Failure, Search, Tally, run
from impl.contract import Implementation
from oracle.case import Case
from oracle.judge import Verdict
from tests.meta.faults import Fault, plant
from tests.strategies.verify import verify_cases

SOURCE = Path(__file__).parents[2] / "impl" / "triton" / "verify.py"
SELECTION = "KDAFUZZ_PLANTED"
"""Environment variable: the file that holds the path of the kernel to run."""
EXAMPLES = 300
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


def search(
    check: Callable[[Case], Verdict], *, seed: int, examples: int = EXAMPLES, shrink_seconds: float = 0.0
) -> tuple[Tally, Failure | None]:
    """The suite's own search with its own strategy; without ``shrink_seconds`` the first failure ends it."""
    return run(
        Search(
            strategy=verify_cases(),
            judge=check,
            seed=seed,
            examples=examples,
            shrink=shrink_seconds > 0.0,
            shrink_seconds=shrink_seconds,
        )
    )


def seed_of(name: str) -> int:
    """A fixed seed for a fault's search, so that faults do not all meet the same cases."""
    return zlib.crc32(name.encode())
