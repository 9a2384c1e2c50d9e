"""The KDA gate: the log decay of one token, head and key channel (contract, section 1.2)."""

from oracle.tracked import Arithmetic, Tracked, exact


def log_decay(
    raw_g: Tracked, A_log: Tracked, dt_bias: Tracked, lower_bound: float | None, ar: Arithmetic
) -> Tracked:
    """Log decay g <= 0 from the raw gate.

    With x = raw_g + dt_bias and a = exp(A_log): ``b * sigmoid(a x)`` for a lower bound b
    (0 included), ``-a * softplus(x)`` without one. Arguments broadcast to ``[..., H, Q, K]``.
    """
    x = ar.add(raw_g, dt_bias)
    a = ar.exp(A_log)
    if lower_bound is None:
        g = ar.mul(a, ar.softplus(x))
        return Tracked(-g.v, g.e)
    # The bound reaches a kernel as one fp32 number.
    b = exact(x.v.new_tensor(lower_bound).float())
    return ar.mul(b, ar.sigmoid(ar.mul(a, x)))
