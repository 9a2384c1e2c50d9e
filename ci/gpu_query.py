"""The process that asks CUDA's driver what it would use here; prints JSON.

Nothing else can tell: which device an index in ``CUDA_VISIBLE_DEVICES`` means hangs on
``CUDA_DEVICE_ORDER``, and whether a part of a GPU counts as one on how it is divided (MIG). The
driver's API and no more: torch takes seconds to import, and no context is made.
"""

import ctypes
import json
import sys
import uuid

_NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE: also if ``CUDA_VISIBLE_DEVICES`` hides them all."""
_NAME_BYTES = 256


class DriverError(RuntimeError):
    """A call of the driver's API failed."""


def devices() -> list[dict[str, object]]:
    """Name, UUID, all and free memory in bytes of every device that CUDA shows."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    code = driver.cuInit(0)
    if code == _NO_DEVICE:
        return []
    _require(code, "cuInit")
    count = ctypes.c_int()
    _require(driver.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    return [_device(driver, index) for index in range(count.value)]


def _device(driver: ctypes.CDLL, index: int) -> dict[str, object]:
    device, total = ctypes.c_int(), ctypes.c_size_t()
    raw, name = (ctypes.c_ubyte * 16)(), ctypes.create_string_buffer(_NAME_BYTES)
    _require(driver.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    _require(driver.cuDeviceGetUuid_v2(raw, device), "cuDeviceGetUuid")
    _require(driver.cuDeviceGetName(name, _NAME_BYTES, device), "cuDeviceGetName")
    _require(driver.cuDeviceTotalMem_v2(ctypes.byref(total), device), "cuDeviceTotalMem")
    told = name.value.decode(errors="replace")
    kind = "MIG" if "MIG" in told.split() else "GPU"
    identity = f"{kind}-{uuid.UUID(bytes=bytes(raw))}"
    return {"uuid": identity, "name": told, "total": total.value, "free": _free(identity, total.value)}


def _require(code: int, call: str) -> None:
    if code:
        raise DriverError(f"{call} failed with code {code} of the CUDA driver")


def _free(identity: str, total: int) -> int:
    """Bytes that nobody uses; all of them where NVML cannot tell."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(identity)).free)
    except pynvml.NVMLError:
        return total


if __name__ == "__main__":
    try:
        print(json.dumps(devices()))
    except DriverError as error:
        sys.exit(str(error))
