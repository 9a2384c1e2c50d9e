"""Kernels with one fault planted, as implementations, and the search that must find the fault.

Triton reads a kernel's source from its file, so a planted kernel is a copy of the package
``impl.triton`` with one file changed; what these files import of each other comes from the copy.
The search runs it in the harness's child process, whose death is a verdict; one child serves
all faults: the implementation ``tests.meta.planted:selected`` calls whatever package the bench
names last.
"""

import functools
import importlib
import importlib.util
import os
import shutil
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
from tests.strategies.cases import CASES

PACKAGE = "impl.triton"
SOURCES = Path(__file__).parents[2] / "impl" / "triton"
"""The kernel files, one a family."""
SELECTION = "KDAFUZZ_PLANTED"
"""Environment variable: the file that holds the path of the package to run."""
EXAMPLES = 300
OPERATIONS = {
    "verify": ("verify", ("kda_recoverssm_verify", "kda_recoverssm_verify_by_slot")),
    "conv_update": ("conv", ("causal_conv1d_update",)),
    "conv_prefill": ("conv", ("causal_conv1d_fn",)),
    "packed_conv": ("packed_conv", ("packed_causal_conv1d_fn",)),
}
"""Per operation that is a function: its module and its functions, one a record layout."""


def source_of(fault: Fault) -> str:
    """The kernel file that the fault changes, sound."""
    return (SOURCES / f"{fault.module}.py").read_text()


def selected() -> Implementation:
    """The implementation that runs the package named in the file ``$KDAFUZZ_PLANTED``, call by call."""
    functions = {
        operation: tuple(_dispatch(module, name) for name in names)
        for operation, (module, names) in OPERATIONS.items()
    }
    return Implementation(
        name="planted",
        operations={**functions, "commit": CommitContext},
        arithmetic="sequential-fp32",
        set_conv_state_dim_first=lambda flag: _chosen("commit").set_conv_state_dim_first(flag),
    )


def _dispatch(module: str, name: str) -> Callable[..., object]:
    # The sound one lends its signature, which tells the record layout.
    @functools.wraps(getattr(importlib.import_module(f"{PACKAGE}.{module}"), name))
    def call(*args: object, **kwargs: object) -> object:
        return getattr(_chosen(module), name)(*args, **kwargs)

    return call


class CommitContext:
    """The context class of the package selected when ``create`` is called."""

    @staticmethod
    def create(*args: object, **kwargs: object) -> object:
        """A context of that package."""
        return _chosen("commit").KDARecoverSSMCommitContext.create(*args, **kwargs)


def _chosen(module: str) -> ModuleType:
    return load(str(Path(Path(os.environ[SELECTION]).read_text()) / f"{module}.py"))


@functools.cache
def load(path: str) -> ModuleType:
    """The kernel module in a file, imported with its package under a name of the package's own."""
    folder = Path(path).parent
    name = f"planted_{folder.name}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[name] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{name}.{Path(path).stem}")


class Bench:
    """A folder of planted packages and the child process that judges them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._selection = folder, folder / "selection"
        os.environ[SELECTION] = str(self._selection)
        self._executor = Executor(f"{__name__}:selected", "cpu")

    def select(self, fault: Fault | None) -> Path:
        """Plant the fault, or none; every later ``check`` judges that package.

        Returns the file with the fault, or the sound verify.
        """
        name = fault.name if fault else "sound"
        folder = self._folder / name
        if not folder.exists():
            shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("__pycache__"))
            for file in folder.glob("*.py"):
                whole = file.read_text()
                if fault and file.stem == fault.module:
                    whole = plant(whole, fault)
                file.write_text(whole.replace(f"from {PACKAGE}.", f"from planted_{name}."))
        self._selection.write_text(str(folder))
        return folder / f"{fault.module if fault else 'verify'}.py"

    def check(self, case: Case) -> Verdict:
        """The selected package's verdict."""
        return self._executor.check(case)

    def __enter__(self) -> "Bench":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.close()
        del os.environ[SELECTION]


def search(
    check: Callable[[Case], Verdict],
    *,
    seed: int,
    operation: str = "verify",
    examples: int = EXAMPLES,
    shrink_seconds: float = 0.0,
) -> tuple[Tally, Failure | None]:
    """The suite's own search with the operation's own strategy.

    Without ``shrink_seconds`` the first failure ends it.
    """
    return run(
        Search(
            strategy=CASES[operation](),
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
