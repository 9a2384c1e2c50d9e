"""``kdafuzz aot``: the CuTe kernels as libraries for machines without the DSL."""

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from impl.contract import UnavailableError
from impl.cute.aot import Foreign, build
from impl.cute.compile import ARCHITECTURES, KERNELS, MAX_WINDOW, Variant, variants

EVERY = ",".join(KERNELS)
"""All kernels, as an option names them."""


SHIPPED = ("commit",)
"""What of vLLM's can be had: its fused verify takes its number of CTAs from the GPU when it is compiled."""


def command(
    arches: str, folder: Path, kernels: str, windows: str, implementation: str = "cute", heads: str = "16"
) -> int:
    """Compile every variant asked for and print what each takes of an SM; the exit code is 0."""
    if implementation == "cute":
        _build(chosen(arches, kernels, windows), folder)
        return 0
    if not re.fullmatch(r"vllm(|[:@].+):cute", implementation):
        raise UnavailableError(
            f"--impl must be cute or a vLLM with :cute behind it; found {implementation!r}"
        )
    from impl.vllm.gpu import commits

    _chosen("--kernel", kernels, SHIPPED)
    asked = _chosen("--arch", arches, ARCHITECTURES), _heads(heads), _windows(windows)
    _build(list(commits(implementation, *asked)), folder)
    return 0


def chosen(arches: str, kernels: str, windows: str) -> list[Variant]:
    """The variants that comma-separated options name; ``UnavailableError`` says what they may be."""
    return [
        each
        for arch in _chosen("--arch", arches, ARCHITECTURES)
        for kernel in _chosen("--kernel", kernels, tuple(KERNELS))
        for each in variants(kernel, arch, _windows(windows))
    ]


def _build(wanted: Sequence[Variant | Foreign], folder: Path) -> None:
    table = Table(title=escape(f"{len(wanted)} libraries in {folder}"), title_justify="left")
    for heading in ("name", "registers", "shared memory", "stack frame"):
        table.add_column(heading)
    for entry in build(wanted, folder):
        shared = "not told" if entry["shared"] is None else str(entry["shared"])
        table.add_row(entry["name"], str(entry["registers"]), shared, str(entry["frame"]))
    Console().print(table)


def _chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UnavailableError(f"{option} must be some of {', '.join(known)}; found {text!r}")
    return names


def _windows(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(x.isdecimal() and 1 <= int(x) <= MAX_WINDOW for x in parts):
        raise UnavailableError(f"--window must be some of 1 to {MAX_WINDOW}; found {text!r}")
    return [int(x) for x in parts]


def _heads(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(x.isdecimal() and 1 <= int(x) <= 4096 for x in parts):
        raise UnavailableError(f"--heads must be some of 1 to 4096; found {text!r}")
    return [int(x) for x in parts]
