"""What processes on a GPU share: its memory, of which each has a part, and compiled Triton kernels."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from impl.contract import UnavailableError
from impl.vllm.cache import cache_dir

VARIABLE = "KDAFUZZ_GPU_BYTES"


def limit_memory() -> None:
    """Hold torch's allocator to ``KDAFUZZ_GPU_BYTES``, if that is set; what else allocates is not held.

    A kernel that takes more then fails in its own process, and no other one goes without.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UnavailableError(f"{VARIABLE} takes a number of bytes; found {text!r}")
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, int(text) / total))


@contextmanager
def whole_memory() -> Iterator[None]:
    """Let torch's allocator have all that is free for a while; what it then keeps unused is given back."""
    torch.cuda.set_per_process_memory_fraction(1.0)
    try:
        yield
    finally:
        torch.cuda.empty_cache()
        limit_memory()


def share_compiled_kernels() -> None:
    """Keep Triton's compiled kernels in our cache folder, one folder a version and architecture.

    Who sets ``TRITON_CACHE_DIR`` keeps them there.
    """
    if os.environ.get("TRITON_CACHE_DIR"):
        return
    import triton

    major, minor = torch.cuda.get_device_capability()
    folder = cache_dir() / f"triton-{triton.__version__}-sm_{major}{minor}"
    os.environ["TRITON_CACHE_DIR"] = str(folder.absolute())
