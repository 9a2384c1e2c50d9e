"""A stand-in for the CUDA driver and NVML, compiled from C: what a process that asks for GPUs finds.

``STANDIN_GPUS`` names the devices, ``;`` between them, and ``STANDIN_CODE`` what ``cuInit`` returns.
Device ``i`` has the UUID bytes ``i, i, ..``, ``8 + i`` GiB in all, and by NVML ``i + 1`` of them free.
``CUDA_VISIBLE_DEVICES`` may be the index of one of them, or ``none``. With ``STANDIN_HANGS`` set
``cuInit`` never returns; with ``STANDIN_DIES`` it aborts.
"""

import shutil
import subprocess
from pathlib import Path

CUDA = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int names(char found[16][256], int real[16]) {
    const char *all = getenv("STANDIN_GPUS"), *only = getenv("CUDA_VISIBLE_DEVICES");
    char copy[4096], *rest = copy, *name;
    int count = 0, index = 0;
    if (!all || (only && !strcmp(only, "none"))) return 0;
    snprintf(copy, sizeof copy, "%s", all);
    while ((name = strsep(&rest, ";"))) {
        if (!only || atoi(only) == index) {
            snprintf(found[count], 256, "%s", name);
            real[count++] = index;
        }
        index++;
    }
    return count;
}

int cuInit(unsigned flags) {
    char found[16][256];
    int real[16];
    if (getenv("STANDIN_HANGS")) for (;;) sleep(1);
    if (getenv("STANDIN_DIES")) abort();
    if (getenv("STANDIN_CODE")) return atoi(getenv("STANDIN_CODE"));
    return names(found, real) ? 0 : 100;
}
int cuDeviceGetCount(int *count) {
    char found[16][256];
    int real[16];
    *count = names(found, real);
    return 0;
}
int cuDeviceGet(int *device, int ordinal) {
    char found[16][256];
    int real[16];
    if (ordinal >= names(found, real)) return 101;
    *device = real[ordinal];
    return 0;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memset(uuid, device, 16);
    return 0;
}
int cuDeviceGetName(char *name, int size, int device) {
    char found[16][256];
    int real[16], count = names(found, real);
    for (int i = 0; i < count; i++) if (real[i] == device) { snprintf(name, size, "%s", found[i]); return 0; }
    return 101;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = (size_t)(8 + device) << 30;
    return 0;
}
"""
NVML = r"""
#include <stdlib.h>
#include <string.h>

static int index_of(const char *uuid) {
    if (strncmp(uuid, "GPU-", 4) && strncmp(uuid, "MIG-", 4)) return -1;
    return (int)strtol(uuid + strlen(uuid) - 2, 0, 16);
}
int nvmlInitWithFlags(unsigned flags) { return 0; }
const char *nvmlErrorString(int code) { return "no such GPU"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    int index = index_of(uuid);
    if (index < 0) return 6;
    *device = (void *)(size_t)(index + 1);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    memory[0] = (7 + (size_t)device) << 30;
    memory[1] = (size_t)device << 30;
    memory[2] = memory[0] - memory[1];
    return 0;
}
"""


def compiled(folder: Path, *, nvml: bool) -> Path:
    """The stand-ins as shared libraries in ``folder``, for ``LD_LIBRARY_PATH``; needs ``cc``."""
    _library(folder / "libcuda.so.1", CUDA)
    if nvml:
        _library(folder / "libnvidia-ml.so.1", NVML)
    return folder


def _library(path: Path, source: str) -> None:
    compiler = shutil.which("cc")
    assert compiler is not None
    command = [compiler, "-D_GNU_SOURCE", "-shared", "-fPIC", "-x", "c", "-o", str(path), "-"]
    subprocess.run(command, input=source.encode(), check=True, capture_output=True)
