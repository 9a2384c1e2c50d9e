"""The decay gate of the recurrence in Triton, one copy for every kernel that applies it (contract, 1.2)."""

import triton
import triton.language as tl


@triton.jit
def log_decay(x, a, lower_bound, BOUNDED: tl.constexpr):
    """Log of the decay of a raw gate ``x`` with its bias, fp32; ``a`` is exp(A_log)."""
    if BOUNDED:
        return lower_bound * tl.sigmoid(a * x)
    return -a * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))
