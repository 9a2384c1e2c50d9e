"""A kernel that writes memory late: it spins first, and may let dependent kernels start before.

For compiled kernels only: the interpreter has neither the clock nor programmatic launches.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl

_BLOCK = 1024
_PROGRAMS = 32
"""So few that all of them run at once: a dependent kernel starts when each has let it."""


@triton.jit
def _write_late_kernel(table_ptr, parts, nanoseconds, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    start = tl.extra.cuda.globaltimer()
    now = start
    while now - start < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    for part in range(parts):
        target = tl.load(table_ptr + 3 * part).to(tl.pointer_type(tl.uint8))
        source = tl.load(table_ptr + 3 * part + 1).to(tl.pointer_type(tl.uint8))
        size = tl.load(table_ptr + 3 * part + 2)
        for at in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
            places = at + tl.arange(0, BLOCK)
            bytes_ = tl.load(source + places, mask=places < size)
            tl.store(target + places, bytes_, mask=places < size)


def table(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> torch.Tensor:
    """Addresses and sizes of uint8 tensors, as ``write_late`` takes them; they must outlive it."""
    rows = [[t.data_ptr(), s.data_ptr(), t.numel()] for t, s in zip(targets, sources, strict=True)]
    assert all(t.numel() == s.numel() for t, s in zip(targets, sources, strict=True))
    return torch.tensor(rows, dtype=torch.int64).to(targets[0].device)


def write_late(places: torch.Tensor, microseconds: int, *, early: bool = False) -> None:
    """Copy every source to its target after a while; ``early``: dependent kernels may start at once."""
    _write_late_kernel[(_PROGRAMS,)](
        places, len(places), 1000 * microseconds, EARLY=early, BLOCK=_BLOCK, num_warps=1
    )
