"""The native engine's library: compiled once per source, compiler and CPU, kept in the cache folder."""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from impl.cute.emulator import isa
from impl.cute.emulator.errors import KINDS
from impl.cute.emulator.tensormap import TENSOR_MAP
from impl.vllm.cache import cache_dir

SOURCES = ("warp.cpp", "memory.cpp", "shadow.cpp", "sync.cpp", "async.cpp", "tensor.cpp", "launch.cpp")
HEADERS = ("types.h", "arith.h", "shadow.h", "cta.h")
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fno-fast-math", "-fno-math-errno",
    "-fno-trapping-math", "-fno-strict-aliasing", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi",
)  # fmt: skip
_C_TYPES = {"i4": "i32", "i8": "i64", "u8": "u64"}


class BuildError(RuntimeError):
    """The library cannot be had; the message says what is missing."""


@functools.lru_cache
def available() -> str:
    """Return an empty text if the native engine can be had (building it if need be), else why not."""
    try:
        library()
    except BuildError as error:
        return str(error)
    return ""


@functools.lru_cache
def library() -> ctypes.CDLL:
    """Load the library, compiling it if the cache has none. ``BuildError``: no compiler, no tvm-ffi, ..."""
    try:
        import tvm_ffi.cpp  # noqa: F401  the library is linked to its runtime
    except ImportError as error:
        raise BuildError("tvm-ffi is not installed; install apache-tvm-ffi") from error
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        raise BuildError(f"there is no C++ compiler {compiler}; install one or set CXX")
    header = isa_header()
    home = cache_dir() / "emulator"
    path = home / f"{_key(compiler, header)}.so"
    try:
        if not path.exists():
            home.mkdir(parents=True, exist_ok=True)
            with _lock(home / ".lock"):
                if not path.exists():
                    _compile(header, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot make or load {path} ({error}); point KDAFUZZ_CACHE elsewhere") from error


def _compile(header: str, path: Path) -> None:
    """Build in a scratch folder beside ``path``; one rename publishes the result."""
    import tvm_ffi.cpp

    here = Path(__file__).parent
    scratch = Path(tempfile.mkdtemp(prefix=".build-", dir=path.parent))
    try:
        (scratch / "isa.h").write_text(header)
        with _ninja_on_path():
            built = tvm_ffi.cpp.build(
                "kdafuzz_emulator",
                sources=[str(here / name) for name in SOURCES],
                extra_cflags=list(FLAGS),
                extra_include_paths=[str(scratch), str(here)],
                build_directory=str(scratch),
            )
        Path(built).replace(path)
    except RuntimeError as error:
        raise BuildError(f"the native engine does not compile: {str(error)[-2000:]}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _key(compiler: str, header: str) -> str:
    """Digest of everything that decides what the library is and where it runs."""
    here = Path(__file__).parent
    digest = hashlib.sha256(header.encode())
    for name in (*SOURCES, *HEADERS):
        digest.update((here / name).read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    import tvm_ffi

    for part in (version.decode(errors="replace"), *FLAGS, tvm_ffi.__version__, platform.machine(), _cpu()):
        digest.update(f"\0{part}".encode())
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Let tvm-ffi find ninja beside the interpreter, where pip puts it, when PATH does not lead there."""
    if shutil.which("ninja"):
        yield
        return
    beside = Path(sys.executable).parent
    if not shutil.which("ninja", path=str(beside)):
        raise BuildError("there is no ninja; install the package ninja")
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = f"{beside}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Queue on a lock file, where there are locks: elsewhere several processes do the same work."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("a") as handle:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def isa_header() -> str:
    """The C++ header of operations, error kinds, structures and constants that Python defines."""
    lines = [
        "// Generated from impl.cute.emulator.isa, errors and tensormap.",
        "#pragma once",
        "namespace emulator {",
        "constexpr i32 NONE = -1;",
        f"constexpr u32 SHARED_BASE = {isa.SHARED_BASE}u;",
        f"constexpr u64 PARAM_BASE = {isa.PARAM_BASE}ull;",
        f"constexpr i32 LEADER = {isa.LEADER}, CONVERGED = {isa.CONVERGED};",
        f"constexpr int SPECIAL_COUNT = {len(isa.SPECIALS)};",
        "enum class Op : i32 {",
        *(f"  {op.name} = {int(op)}," for op in isa.Op),
        "};",
        "enum class Kind : i32 {",
        *(f"  {kind.replace('-', '_')} = {at}," for at, kind in enumerate(KINDS)),
        "};",
        *_structure("Instruction", isa.INSTRUCTION),
        *_structure("TensorMap", TENSOR_MAP),
        "}  // namespace emulator",
    ]
    return "\n".join(lines) + "\n"


def _structure(name: str, dtype: np.dtype) -> list[str]:
    """A structure laid out as the numpy record, which the compiler checks."""
    lines, checks = [f"struct {name} {{"], []
    assert dtype.fields is not None
    for field, (kind, offset, *_) in dtype.fields.items():
        base, shape = kind.subdtype or (kind, ())
        size = f"[{shape[0]}]" if shape else ""
        lines.append(f"  {_C_TYPES[base.str[1:]]} {field}{size};")
        checks.append(f'static_assert(offsetof({name}, {field}) == {offset}, "{name}.{field}");')
    return [*lines, "};", *checks, f'static_assert(sizeof({name}) == {dtype.itemsize}, "{name}");']
