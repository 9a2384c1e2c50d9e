"""``kdafuzz doctor``: facts about the machine and what can run on it; no probe can fail the command."""

import importlib.metadata
import os
import platform
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ci.campaign import console
from ci.query import ask
from impl.contract import OPERATIONS, UnavailableError, one_line
from impl.cute.aot import described
from impl.cute.compile import Variant
from impl.devices.registry import NAMES, default, open_device
from impl.registry import split

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "hypothesis",
    "msgspec",
    "pytest",
    "pytest-xdist",
    "safetensors",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "vllm",
)


def show(implementations: str) -> None:
    """Print everything; what cannot be found out says so in its place."""
    out = console()
    names = split(implementations)
    _table(out, "machine", _machine())
    _table(out, "versions", [(name, _guarded(lambda name=name: _version(name))) for name in PACKAGES])  # type: ignore[misc]
    for name in names:
        _table(out, f"implementation {name}", _guarded_rows(lambda name=name: _implementation(name)))  # type: ignore[misc]
    # The others switch Triton to its interpreter, for good.
    devices = sorted(NAMES, key=lambda name: name != "cuda")
    _table(out, "devices", [(name, _guarded(lambda name=name: _device(name))) for name in devices])  # type: ignore[misc]
    _table(out, "interpreter repairs in force", _guarded_rows(_repairs))


def show_kernels(variants: Sequence[Variant]) -> None:
    """Print what variants of the CuTe kernels take; the cache folder keeps what compiling one told."""
    out = console()
    table = Table(title=f"{len(variants)} variants of CuTe kernels", title_justify="left")
    for heading in ("name", "arch", "registers", "shared memory", "stack frame and spills", "cubin"):
        table.add_column(heading, justify="left" if heading in ("name", "arch") else "right")
    with out.status("compiling ..") as status:
        for each in variants:
            status.update(f"compiling {each.name} ..")
            table.add_row(each.name, each.arch, *_kernel(each))
    out.print(table)


def _kernel(variant: Variant) -> tuple[str, ...]:
    """Registers of a thread, bytes of shared memory and of a thread's stack, size of the cubin."""
    try:
        entry = described(variant)
    except Exception as error:  # as of every probe
        return (escape(f"not found out: {type(error).__name__}: {one_line(error, 200)}"),)
    shared = "not told" if entry["shared"] is None else str(entry["shared"])
    return str(entry["registers"]), shared, str(entry["frame"]), str(entry["cubin"])


def _table(out: Console, title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=escape(title), title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    out.print(table)


def _guarded(probe: Callable[[], str]) -> str:
    try:
        return probe()
    except Exception as error:  # a probe tells what it can, and that it cannot
        return f"not found out: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _guarded_rows(probe: Callable[[], list[tuple[str, str]]]) -> list[tuple[str, str]]:
    try:
        return probe()
    except Exception as error:  # as above
        return [("not found out", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")]


def _machine() -> list[tuple[str, str]]:
    return [
        ("system", platform.platform()),
        ("python", platform.python_version()),
        ("cores", str(len(os.sched_getaffinity(0)))),
        (
            "memory",
            _guarded(lambda: f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"),
        ),
        ("GPU", _guarded(_gpus)),
        ("default device", _guarded(default)),
    ]


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none that torch can use"
    names = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        names.append(f"{facts.name} (sm_{facts.major}{facts.minor}, {facts.total_memory / 2**30:.0f} GiB)")
    return "; ".join(names)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _implementation(name: str) -> list[tuple[str, str]]:
    offer = ask(name, default((name,)))
    if offer.error:
        return [("unavailable", offer.error)]
    rows = [("version", offer.version or "not told")]
    if "verify" in offer.domains:
        rows.append(("record layouts", ", ".join(offer.domains["verify"].records)))
    for operation in OPERATIONS:
        told = "available" if operation in offer.operations else offer.absent.get(operation, "not offered")
        rows.append((operation, told))
    return rows


def _device(name: str) -> str:
    try:
        open_device(name)
    except UnavailableError as error:
        return f"unavailable: {error}"
    return "available"


def _repairs() -> list[tuple[str, str]]:
    from impl.devices.interpreter import repairs

    found = repairs()
    if not found:
        return [("none", "the interpreter is not in use")]
    return [
        (repair.name, f"{'applied' if repair.applied else 'not needed'}: {repair.fault}") for repair in found
    ]
