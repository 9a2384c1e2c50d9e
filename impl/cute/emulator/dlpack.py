"""CPU tensors shown to compiled host code as tensors of the device cuda:0, at the same addresses."""

import ctypes
from typing import Any

import torch
import tvm_ffi

_CUDA, _DEVICE_OFFSET = 2, 8
"""DLPack's number of the device type, and where a managed tensor has it: behind the data pointer."""
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _AsCuda:
    """A DLPack producer that names another device than torch does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: object) -> object:
        capsule = self._tensor.__dlpack__()
        address = _pointer(capsule, b"dltensor")
        assert address is not None
        (ctypes.c_int32 * 2).from_address(address + _DEVICE_OFFSET)[:] = [_CUDA, 0]
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0


def as_cuda(tensor: torch.Tensor) -> Any:
    """The tensor's memory, shape, strides and dtype as a ``tvm_ffi.Tensor`` on cuda:0.

    It holds the memory until it is freed. ``ValueError`` for a tensor that is not on the CPU.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"the emulator takes tensors in host memory; found one on {tensor.device}")
    return tvm_ffi.from_dlpack(_AsCuda(tensor.detach()))
