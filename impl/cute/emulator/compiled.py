"""Kernels of the CuTe DSL as functions on CPU tensors: compiled once, kept on disk, run by the emulator.

An entry of the cache holds the kernel's PTX and the library with its host code. Loading one
needs apache-tvm-ffi alone; the DSL is imported when something must be compiled.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from impl.contract import UnavailableError
from impl.cute.emulator import settings
from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.launch import Allocation, Launch, Report
from impl.vllm.cache import Files, materialise

INSTALL = "install kdafuzz[cute]"
_DISTRIBUTIONS = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
_FORMAT = 1
_PTX, _LIBRARY = "kernel.ptx", "host.so"


def why_absent() -> str:
    """What is missing for compiling and running CuTe kernels here, or nothing."""
    for name, module in zip(_DISTRIBUTIONS, ("cutlass", "tvm_ffi"), strict=True):
        if importlib.util.find_spec(module) is None or not _versions()[name]:
            return f"CuTe kernels on the emulator need {name}; {INSTALL}"
    from impl.cute.emulator.host import compiler

    return "" if compiler() else "CuTe kernels on the emulator need a C compiler; install cc"


class Emulated:
    """A compiled kernel behind its own host code. Calling it returns None when the launches are done.

    ``names`` are the arguments' names, and ``written`` those that the kernel may write (None: all),
    for memory that no setting describes. ``early`` are the tensors that a launch which may overlap
    with the one before it may access before it waits for that one (None: any).
    An ``EmulatorError`` says what the kernel does wrong; the host code's refusals are
    ``TypeError`` and ``ValueError``.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = (),
        written: Sequence[str] | None = None,
        early: Sequence[str] | None = None,
    ) -> None:
        from impl.cute.emulator.host import HostFunction

        self.ptx = (folder / _PTX).read_text()
        self._names, self._written, self._early = names, written, early
        self.reports: tuple[Report, ...] = ()
        """Of the last call's launches."""
        self._function = HostFunction(folder / _LIBRARY)

    @cached_property
    def program(self) -> Any:
        """The kernel as the emulator's instructions; read from the PTX once."""
        from impl.cute.emulator.program import Program

        return Program.parse(self.ptx)

    def __call__(self, *arguments: object) -> None:
        """Run the host code, and the kernel it launches, under the settings in force."""
        reports: list[Report] = []
        # Tensors in one page overlap, and an access counts for the first: one that may be early.
        allocations = sorted(
            (*settings.current().allocations, *self._outside(arguments)),
            key=lambda a: not self._may_be_early(a.name),
        )

        def take(captured: Any) -> None:
            from impl.cute.emulator import run

            launch = launch_of(self.program, captured, allocations)
            reports.append(run.run(self.program, launch, settings.current().engine))
            if captured.overlaps:
                self._require_late(reports[-1])

        self._function(arguments, take)
        self.reports = tuple(reports)

    def _require_late(self, report: Report) -> None:
        """Raise what the launch did too early."""
        for name, (reads, writes) in report.early.items():
            if not self._may_be_early(name):
                what = f"{writes} writes to" if writes else f"{reads} reads of"
                text = f"{what} {name} before griddepcontrol.wait: the kernel before may still be at it"
                raise EmulatorError("dependency", text)

    def _may_be_early(self, name: str) -> bool:
        # A layer's tensor has the layer's number behind a dot.
        return self._early is None or name.partition(".")[0] in self._early

    def _outside(self, arguments: Sequence[object]) -> Iterator[Allocation]:
        """The tensors among the arguments that no allocation of the settings holds."""
        known = settings.current().allocations
        for index, tensor in enumerate(arguments):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                name = self._names[index] if index < len(self._names) else f"argument {index}"
                writable = self._written is None or name in self._written
                found = allocation(name, tensor, writable=writable)
                if not any(
                    a.start <= found.start and found.start + found.size <= a.start + a.size for a in known
                ):
                    yield found


def allocation(name: str, tensor: torch.Tensor, *, writable: bool = True) -> Allocation:
    """The bytes of a tensor that is not empty, from its first element to its last."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return Allocation(name, tensor.data_ptr(), (last + 1) * tensor.element_size(), writable)


def launch_of(program: Any, captured: Any, allocations: Sequence[Allocation]) -> Launch:
    """The launch of ``program`` that host code asked for, under the settings in force."""
    if captured.kernel != program.name:
        raise EmulatorError("unsupported", f"a launch of {captured.kernel}; the PTX holds {program.name}")
    if captured.cluster != (1, 1, 1):
        raise EmulatorError("unsupported", f"a launch in clusters of {captured.cluster} CTAs")
    params = bytearray(program.param_bytes)
    for index, (_, offset, size) in enumerate(program.signature):
        params[offset : offset + size] = captured.param(index, size)
    now = settings.current()
    by_target: Any = "exact-sm90" if program.target == "sm_90a" else "rounded"
    return Launch(
        grid=captured.grid,
        block=captured.block,
        shared_bytes=captured.shared_bytes,
        params=bytes(params),
        allocations=tuple(allocations),
        schedule=now.schedule,
        functions=now.functions or by_target,
        seed=now.seed,
        resident=now.resident,
    )


def emulated(
    facts: Mapping[str, str],
    make: Callable[[], Any],
    names: Sequence[str] = (),
    written: Sequence[str] | None = None,
    early: Sequence[str] | None = None,
) -> Emulated:
    """The kernel that ``make`` compiles (one call of ``cute.compile``), from the cache if it is there.

    ``facts`` must change whenever the result would: the kernel's own text, what it is
    specialised for, the architecture. Versions of the DSL are added here. Many processes may
    ask for the same kernel at once.
    """

    def files(work: Path) -> Files:
        yield from _built(make, work)

    return Emulated(materialise(f"cute-{_key(facts)}", files), names, written, early)


def digest(folder: Path, files: Sequence[Path]) -> str:
    """A digest of the names and bytes of files in a folder, for ``facts``."""
    total = hashlib.sha256()
    for path in files:
        name = path.relative_to(folder).as_posix()
        total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _key(facts: Mapping[str, str]) -> str:
    everything = {"facts": dict(facts), "format": _FORMAT, "environment": _environment()}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:24]


@cache
def _environment() -> dict[str, str]:
    """What else decides the files: the DSL, the stand-in runtime, and the processor of the host code."""
    from impl.cute.emulator.host import RUNTIME

    return {
        **_versions(),
        "runtime": hashlib.sha256(RUNTIME.read_bytes()).hexdigest(),
        "processor": f"{platform.machine()} {_processor_flags()}",
    }


@cache
def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _processor_flags() -> str:
    """Host code is compiled for the processor at hand; another one may lack its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((" ".join(sorted(x.split(":")[1].split())) for x in lines if x.startswith("flags")), "")


def _built(make: Callable[[], Any], work: Path) -> Iterator[tuple[str, bytes]]:
    """Compile, export and link in the folder ``work``."""
    from impl.cute.emulator.host import FUNCTION, link

    with artifact_kept("ptx", work):
        compiled = make()
    exported, library = work / "host.o", work / _LIBRARY
    compiled.export_to_c(str(exported), function_name=FUNCTION)
    link(exported, library)
    text = compiled.artifacts.PTX
    yield _PTX, text if isinstance(text, bytes) else text.encode()
    yield _LIBRARY, library.read_bytes()


_COMPILING = threading.RLock()


@contextmanager
def artifact_kept(what: str, folder: Path) -> Iterator[None]:
    """Have ``cute.compile`` keep its ``ptx`` or ``cubin``, in ``folder``; no other option changes."""
    try:
        cute: Any = importlib.import_module("cutlass.cute")
    except ImportError as error:
        raise UnavailableError(
            f"compiling CuTe kernels needs nvidia-cutlass-dsl ({error}); {INSTALL}"
        ) from None
    with _COMPILING:
        original = cute.compile

        def compiling(*arguments: Any, options: str = "", **named: Any) -> Any:
            return original(*arguments, options=f"{options} --keep-{what} --dump-dir={folder}", **named)

        cute.compile = compiling
        try:
            with warnings.catch_warnings():
                # What the kernels use of an older DSL is theirs to know.
                warnings.simplefilter("ignore", DeprecationWarning)
                yield
        finally:
            cute.compile = original
