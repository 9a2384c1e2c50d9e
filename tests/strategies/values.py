"""Strategies over value regimes."""

from collections.abc import Iterable

from hypothesis import strategies as st

from oracle.values import REGIMES


@st.composite
def regimes(draw: st.DrawFn, names: Iterable[str]) -> dict[str, str]:
    """A regime for some of the tensors, the plain one for the rest.

    Reaches every regime of ``oracle.values.REGIMES``: saturated gates, thresholds of the
    softplus, keys that are nearly equal, tiny, one-hot or huge, ties, NaN and infinities.
    Half of the cases have at most one unusual tensor. Shrinks towards plain values.
    """
    candidates = [name for name in names if name in REGIMES]
    most = draw(st.sampled_from((0, 1, 1, 3, len(candidates))))
    chosen = draw(st.lists(st.sampled_from(candidates), unique=True, max_size=most)) if most else []
    result = {}
    for name in chosen:
        table = list(REGIMES[name])
        regime = draw(st.sampled_from(table))
        if regime != table[0]:
            result[name] = regime
    return result
