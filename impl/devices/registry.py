"""Devices by name, as ``--device`` takes them."""

import importlib.util
import os
from collections.abc import Sequence

from impl.contract import UnavailableError
from impl.devices.base import Device

NAMES = ("cpu", "cuda", "emulator")


def default(implementations: Sequence[str] = ()) -> str:
    """The best device at hand: a GPU if there is one, else the CPU, or the emulator for CuTe kernels alone.

    Those of vLLM run on the emulator only.
    """
    import torch

    if implementations and all(name.endswith(":cute") for name in implementations):
        return "emulator"
    if torch.cuda.is_available():
        return "cuda"
    cute = implementations and all(name == "cute" or name.endswith(":cute") for name in implementations)
    return "emulator" if cute else "cpu"


def open_device(name: str) -> Device:
    """The device called ``name``; ``UnavailableError`` in one line if it cannot be had.

    Opening the CPU device or the emulator switches Triton to its interpreter for the whole process, so a
    process serves one device.
    """
    if name not in NAMES:
        raise UnavailableError(f"unknown device {name!r}; it must be one of {', '.join(NAMES)}")
    if importlib.util.find_spec("triton") is None:
        raise UnavailableError(f"device {name} needs triton; install it with pip install triton")
    if name == "cpu":
        from impl.devices.cpu import CpuDevice

        return CpuDevice()
    if name == "emulator":
        from impl.devices.emulator import EmulatorDevice

        return EmulatorDevice()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise UnavailableError("device cuda needs compiled kernels; unset TRITON_INTERPRET")
    from impl.devices.cuda import CudaDevice

    return CudaDevice()
