"""Compiled host code of the CuTe DSL, exported as a library and called without a GPU.

The library holds the host function as the DSL compiled it (argument checks, grid, tensor maps)
and the stand-in runtime ``runtime.c``, which hands launches to the caller.
"""

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
from tvm_ffi.libinfo import find_libtvm_ffi

from impl.cute.emulator.dlpack import as_cuda

RUNTIME = Path(__file__).with_name("runtime.c")
FUNCTION = "kdafuzz_host"
"""Name that host functions are exported under."""
_FAILED = 719
"""What the host code gets for a launch that raised: CUDA's "unspecified launch failure"."""
CLUSTER_DIMENSION = 4
"""CUDA's number of the launch attribute that holds a cluster's size."""
PROGRAMMATIC_SERIALIZATION = 6
"""The one that lets a launch start before the kernels it depends on are done."""


@dataclass(frozen=True)
class Captured:
    """A launch as the host code asked for it; ``params`` reads the parameter of an index and size in bytes.

    ``attributes`` are CUDA's launch attributes by number, 64 bytes each.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    attributes: dict[int, bytes]
    param: Callable[[int, int], bytes]

    @property
    def overlaps(self) -> bool:
        """Whether the launch may start before the kernel in front of it is done."""
        raw = self.attributes.get(PROGRAMMATIC_SERIALIZATION)
        return raw is not None and int.from_bytes(raw[:4], "little") != 0

    @property
    def cluster(self) -> tuple[int, int, int]:
        """CTAs of a cluster in each dimension."""
        raw = self.attributes.get(CLUSTER_DIMENSION)
        if raw is None:
            return 1, 1, 1
        x, y, z = (int.from_bytes(raw[i : i + 4], "little") for i in (0, 4, 8))
        return x, y, z


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int32), ("padding", ctypes.c_int32), ("value", ctypes.c_uint8 * 64))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_int32),
    )


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_Config), ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)
)


class _Call(threading.local):
    """The call in progress on a thread: what takes its launches, and what that raised."""

    take: Callable[[Captured], None] | None = None
    raised: BaseException | None = None


_CALL = _Call()


@_Callback
def _launched(config: Any, kernel: bytes, params: Any) -> int:
    """Gets every launch of every host function."""
    if _CALL.take is None:
        return _FAILED
    try:
        c = config.contents
        _CALL.take(
            Captured(
                kernel.decode(),
                tuple(c.grid),
                tuple(c.block),
                c.shared,
                {c.attributes[i].id: bytes(c.attributes[i].value) for i in range(c.count)},
                lambda index, size: ctypes.string_at(params[index], size),
            )
        )
    except BaseException as error:  # it must pass through compiled code; raised again behind it
        _CALL.raised = error
        return _FAILED
    return 0


class HostFunction:
    """The host function of a library that ``link`` made."""

    def __init__(self, library: Path) -> None:
        ctypes.CDLL(str(library)).kdafuzz_on_launch(_launched)
        self._function = tvm_ffi.load_module(library).get_function(FUNCTION)

    def __call__(self, arguments: tuple[object, ...], take: Callable[[Captured], None]) -> None:
        """Run the host code on CPU tensors and numbers; ``take`` gets the launches, and may raise.

        What the host code refuses is a ``TypeError`` or ``ValueError`` that names the argument.
        """
        given = [as_cuda(each) if isinstance(each, torch.Tensor) else each for each in arguments]
        before = _CALL.take, _CALL.raised
        _CALL.take, _CALL.raised = take, None
        try:
            self._function(*given)
        except Exception:
            if _CALL.raised is None:
                raise
        finally:
            error = _CALL.raised
            _CALL.take, _CALL.raised = before
        if error is not None:
            raise error


def compiler() -> str | None:
    """The C compiler that links host functions, if there is one."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def link(exported: Path, library: Path) -> None:
    """Make the library of an exported object file (``export_to_c`` under the name ``FUNCTION``).

    ``RuntimeError`` tells what the linker said, as of a runtime function that the stand-in lacks.
    """
    cc = compiler()
    if cc is None:
        raise RuntimeError("the emulator links the kernels' host code with a C compiler; install cc")
    options = ["-O1", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wl,-z,defs"]
    files = [str(exported), str(RUNTIME), find_libtvm_ffi()]
    done = subprocess.run(
        [cc, *options, "-o", str(library), *files], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"cannot link the kernel's host code: {done.stderr.strip()[-1000:]}")
