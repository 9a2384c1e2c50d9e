"""Compiled CuTe kernels by variant: emulated for CPU tensors, the real ones on a GPU.

A variant is compiled once, from fake tensors, without a GPU, and kept on disk. A GPU machine
without the DSL gets its kernels from a folder that ``kdafuzz aot`` made (``impl.cute.aot``).
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from impl.contract import UnavailableError

ARCHITECTURES = ("sm_90a", "sm_100a")
ARCHITECTURE_VARIABLE = "KDAFUZZ_CUTE_ARCH"
"""Environment variable: the architecture of emulated kernels."""
MAX_WINDOW = 8
EARLY = ("A_log", "dt_bias", "conv_weight", "state_indices", "query_start_loc", "num_accepted_tokens")
"""What kernels may read before their dependency wait: no kernel of the contract writes it (1.7)."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of this package. ``module`` has ``make(variant)``: one call of ``cute.compile``.

    ``files`` are the sources that decide the result, ``arguments`` the names of what the
    compiled function takes, in order, and ``written`` those tensors that the kernel may write.
    ``options`` are the names a variant gives values to, with all the values there are.
    ``ctas_per_sm`` of a persistent kernel: how many CTAs an SM holds, for windows of 1, 2, ..
    """

    module: str
    files: tuple[str, ...]
    arguments: tuple[str, ...]
    written: tuple[str, ...]
    options: tuple[tuple[str, tuple[bool, ...]], ...]
    ctas_per_sm: tuple[int, ...] = ()


COMMIT = Kernel(
    "impl.cute.commit",
    ("device.py", "commit.py"),
    (
        "state addresses", "state strides", "correction addresses", "correction strides",
        "key_gate addresses", "key_gate strides", "A_log", "dt_bias", "state_indices", "commit_lens",
        "final_state_indices", "boundary_state_indices", "boundary_recovery_lens", "lower_bound", "chunk",
    ),
    (),
    (("by_slot", (False, True)), ("align", (False, True))),
)  # fmt: skip

_VERIFY_FILES = (
    "device.py", "guarded.py", "mma.py", "mma_sm90.py", "mma_sm100.py", "paging.py", "window.py",
)  # fmt: skip
_VERIFY_ARGUMENTS = (
    "mixed_qkv", "raw_gate", "raw_beta", "A_log", "dt_bias", "state", "correction", "key_gate", "out",
    "query_start_loc", "state_indices", "conv_state", "conv_weight", "num_accepted_tokens", "counter",
    "lower_bound", "ctas",
)  # fmt: skip
_VERIFY_WRITTEN = ("correction", "key_gate", "out", "conv_state", "counter")
VERIFY = Kernel(
    "impl.cute.verify",
    (*_VERIFY_FILES, "verify.py"),
    _VERIFY_ARGUMENTS,
    _VERIFY_WRITTEN,
    (("token_major", (False, True)), ("f32_taps", (False, True))),
    (4, 4, 4, 4, 3, 3, 3, 3),
)
VERIFY_WS = Kernel(
    "impl.cute.verify_ws",
    (*_VERIFY_FILES, "verify_ws.py"),
    _VERIFY_ARGUMENTS,
    _VERIFY_WRITTEN,
    (("f32_taps", (False, True)),),
    (3, 3, 3, 3, 2, 2, 2, 2),
)

KERNELS = {"commit": COMMIT, "verify": VERIFY, "verify_ws": VERIFY_WS}
"""By the name that variants and libraries have."""


@dataclass(frozen=True)
class Variant:
    """One compiled function: a kernel for an architecture, a window and values of its options."""

    kernel: str
    arch: str
    window: int
    options: tuple[tuple[str, bool], ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.window <= MAX_WINDOW:
            raise ValueError(f"a CuTe kernel needs a window of 1 to {MAX_WINDOW} tokens; found {self.window}")
        wanted = [name for name, _ in KERNELS[self.kernel].options]
        if [name for name, _ in self.options] != wanted:
            raise ValueError(f"{self.kernel} needs the options {wanted}; found {self.options}")

    def __getitem__(self, option: str) -> bool:
        return dict(self.options)[option]

    @property
    def name(self) -> str:
        """A C identifier, as ``commit_sm_90a_q4_align``; the function's name in libraries."""
        chosen = [name for name, value in self.options if value]
        return "_".join((self.kernel, self.arch, f"q{self.window}", *chosen))


def variant(kernel: str, arch: str, window: int, **options: bool) -> Variant:
    """The variant with these options, in any order."""
    names = [name for name, _ in KERNELS[kernel].options]
    return Variant(kernel, arch, window, tuple(sorted(options.items(), key=lambda x: names.index(x[0]))))


def variants(kernel: str, arch: str, windows: Iterable[int]) -> Iterator[Variant]:
    """All variants of a kernel for an architecture and some windows."""
    names = [name for name, _ in KERNELS[kernel].options]
    for window in windows:
        for values in product(*(values for _, values in KERNELS[kernel].options)):
            yield Variant(kernel, arch, window, tuple(zip(names, values, strict=True)))


def architecture(device: torch.device) -> str:
    """What to compile for: the GPU's own architecture, or what the environment names for the emulator.

    ``UnavailableError`` for a GPU older than Hopper, a newer one than SM10x, or an unknown name.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major not in (9, 10):
            raise UnavailableError(f"CuTe kernels need an SM90 or SM10x GPU; found SM{major}{minor}")
        return f"sm_{major}{minor}a"
    return asked_architecture(ARCHITECTURES[0])


def asked_architecture(usual: str) -> str:
    """What the environment asks emulated kernels to be compiled for, or ``usual``."""
    asked = os.environ.get(ARCHITECTURE_VARIABLE) or usual
    if asked not in ARCHITECTURES:
        names = " or ".join(sorted(ARCHITECTURES, key=lambda name: name != usual))
        raise UnavailableError(f"{ARCHITECTURE_VARIABLE} must be {names}; found {asked!r}")
    return asked


@cache
def function(wanted: Variant, device_type: str) -> Callable[..., None]:
    """The compiled variant, to be called with the kernel's arguments on tensors of that device type.

    ``UnavailableError`` says what is missing where it cannot be had.
    """
    kernel = KERNELS[wanted.kernel]
    if device_type != "cuda":
        from impl.cute.emulator.compiled import emulated

        facts = {"text": source_digest(wanted.kernel), "variant": wanted.name}
        return emulated(facts, lambda: make(wanted), kernel.arguments, kernel.written, EARLY)
    from impl.cute import aot

    found = aot.loaded(wanted.name)
    if found is not None:
        return found
    if importlib.util.find_spec("cutlass") is None:
        raise UnavailableError(
            f"no library holds {wanted.name}; install kdafuzz[cute], or point ${aot.FOLDER_VARIABLE} "
            f"at a folder of kdafuzz aot"
        )
    return aot.cached(wanted)


@cache
def source_digest(kernel: str) -> str:
    """A digest of the sources that decide what a kernel's variants are."""
    from impl.cute.emulator.compiled import digest

    folder = Path(__file__).parent
    return digest(folder, [folder / name for name in KERNELS[kernel].files])


def make(wanted: Variant, options: str = "") -> Any:
    """Compile a variant; needs the DSL but no GPU. ``options`` are more options of ``cute.compile``."""
    module = importlib.import_module(KERNELS[wanted.kernel].module)
    return module.make(wanted, f"--gpu-arch={wanted.arch} --enable-tvm-ffi {options}".strip())
