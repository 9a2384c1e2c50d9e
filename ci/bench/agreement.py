"""Whether two implementations left about the same: a benchmark of a wrong kernel is worthless.

This is no verdict on rounding, which is the fuzzer's; it finds what is not the same computation.
"""

import torch

from impl.bindings import Views

TOLERANCE = 0.05
"""Of a vector's norm. Two bf16 roundings differ by 0.004, a key that rounds the other way moves its
correction by up to 0.03; one wrong element in 128 is 0.09."""
_TINY = 1e-6


def difference(expected: Views, found: Views) -> str:
    """The tensor that differs most, and by how much; nothing if all agree. Integers must be equal."""
    missing = expected.keys() ^ found.keys()
    if missing:
        return f"only one has {', '.join(sorted(missing))}"
    worst, text = TOLERANCE, ""
    for name, wanted in expected.items():
        other = found[name]
        if wanted.shape != other.shape or wanted.dtype != other.dtype:
            return f"{name}: {tuple(other.shape)} {other.dtype}, not {tuple(wanted.shape)} {wanted.dtype}"
        if not wanted.is_floating_point():
            count = int((wanted != other).sum())
            if count:
                return f"{name}: {count} of {wanted.numel()} integers differ"
            continue
        off = _distance(wanted, other)
        if not off <= worst:
            worst, text = off, f"{name}: a vector differs by {off:.1%} of its norm"
    return text


def _distance(wanted: torch.Tensor, other: torch.Tensor) -> float:
    """The largest distance of vectors along the last axis, over their norm; infinite where not finite."""
    if wanted.numel() == 0:
        return 0.0
    a, b = wanted.float(), other.float()
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return float("inf")
    off = torch.linalg.vector_norm(a - b, dim=-1) / (torch.linalg.vector_norm(a, dim=-1) + _TINY)
    return float(off.max())
