"""Strategies over value regimes."""

from collections.abc import Sequence

from hypothesis import strategies as st

from oracle.layout import TensorSpec
from oracle.values import REGIMES

THEMES: tuple[dict[str, str], ...] = (
    {},
    {"raw_g": "thresholds", "A_log": "spread"},  # softplus near its threshold, decay still visible
    {"raw_g": "fast", "A_log": "spread"},
    # One channel's decay alone: nothing else rounds.
    {
        "raw_g": "thresholds",
        "A_log": "spread",
        "dt_bias": "zero",
        "k": "one_hot",
        "q": "one_hot",
        "v": "zero",
    },
    {"q": "tiny", "k": "tiny"},  # eps decides
    {"q": "tiny", "k": "zero"},  # and keeps what would be 0 * inf from being NaN
    {"k": "aligned", "raw_beta": "near_one", "raw_g": "slow", "v": "alternating"},  # corrections grow
    {"k": "one_hot", "q": "one_hot", "state": "one_hot"},  # an axis swapped or shifted
    {"k": "one_hot", "v": "ties", "state": "ties", "raw_beta": "half"},  # sums on rounding ties
    {"raw_g": "mixed", "k": "aligned"},
    {"raw_g": "thresholds", "raw_beta": "thresholds", "dt_bias": "zero"},
)
"""Regimes that show a fault only together; independent draws would hardly ever meet them."""
COMMIT_THEMES: tuple[dict[str, str], ...] = (
    {},
    {"key_gate": "thresholds", "A_log": "spread"},
    # The decay alone: nothing else rounds.
    {"key_gate": "thresholds", "A_log": "spread", "dt_bias": "zero", "correction": "zero"},
    {"key_gate": "fast", "dt_bias": "spread"},
    {"key_gate": "tiny"},
    {"correction": "one_hot", "state": "zero", "key_gate": "one_hot"},
    {"correction": "zero", "A_log": "spread", "dt_bias": "spread"},
    {"state": "zero", "dt_bias": "spread"},
    {"correction": "ties", "state": "ties", "key_gate": "one_hot"},
    {"correction": "specials"},
)
FUSED_THEMES: tuple[dict[str, str], ...] = (
    {},
    {},
    {"raw_g": "fast", "A_log": "spread"},  # with a strong bound the decays reach e**-88
    {"raw_g": "mixed", "A_log": "zero"},
    {"raw_g": "slow", "raw_beta": "near_one", "mixed_qkv": "aligned", "conv_state": "zero"},
    {"mixed_qkv": "alternating", "raw_beta": "near_one", "raw_g": "slow"},
    {"mixed_qkv": "tiny", "conv_state": "zero"},  # eps decides
    {"mixed_qkv": "near_one", "conv_state": "near_one", "weight": "near_one"},
    {"mixed_qkv": "ties", "conv_state": "ties", "weight": "ties"},
    {"mixed_qkv": "saturated", "weight": "near_one", "conv_state": "zero"},
    {"weight": "one_hot", "mixed_qkv": "binades", "conv_state": "binades"},
    {"mixed_qkv": "one_hot", "conv_state": "zero", "state": "one_hot"},
    {"raw_g": "thresholds", "raw_beta": "thresholds", "dt_bias": "zero"},
)
CONV_THEMES: tuple[dict[str, str], ...] = (
    {},
    {"x": "near_one", "conv_state": "near_one", "weight": "near_one", "bias": "near_one"},
    {"x": "ties", "conv_state": "ties", "weight": "ties", "bias": "zero"},
    {"x": "saturated", "weight": "near_one", "conv_state": "zero"},
    {"weight": "one_hot", "x": "binades", "conv_state": "binades", "bias": "zero"},
    {"conv_state": "zero"},
)
UNBOUNDED = ("extreme", "specials", "large")
"""Regimes of which fp32 may make infinities."""
_BOUNDED = THEMES[:1] * len(THEMES) + THEMES
_UNBOUNDED = THEMES[:1] * 3 + THEMES + THEMES[1:4] * 3


def verify_themes(*, bounded: bool) -> tuple[dict[str, str], ...]:
    """Themes of verify; an unbounded gate gets those about gates more often."""
    return _BOUNDED if bounded else _UNBOUNDED


def commit_themes(*, bounded: bool) -> tuple[dict[str, str], ...]:
    """Themes of commit; an unbounded gate gets those about softplus as often as all others."""
    return COMMIT_THEMES if bounded else COMMIT_THEMES + COMMIT_THEMES[1:3] * 4


@st.composite
def regimes(
    draw: st.DrawFn,
    specs: dict[str, TensorSpec],
    *,
    themes: Sequence[dict[str, str]],
    finite: bool = False,
) -> dict[str, str]:
    """A regime for some of the tensors, the plain one for the rest.

    Reaches every regime of ``oracle.values.REGIMES``: saturated gates, thresholds of the
    softplus, keys that are nearly equal, tiny, one-hot or huge, ties, NaN and infinities.
    Starts from one of ``themes`` and changes little of it, or has up to three unusual
    tensors. Shrinks towards plain values.
    """
    candidates = list(dict.fromkeys(spec.table for spec in specs.values() if spec.table in REGIMES))
    theme = draw(st.sampled_from(themes))
    result = {name: regime for name, regime in theme.items() if name in candidates}
    size = draw(st.sampled_from((0, 0, 0, 1) if theme else (0, 1, 1, 2, 3)))
    for name in draw(st.lists(st.sampled_from(candidates), unique=True, min_size=size, max_size=size)):
        table = [regime for regime in REGIMES[name] if not finite or regime not in UNBOUNDED]
        regime = draw(st.sampled_from(table))
        result.pop(name, None)
        if regime != table[0]:
            result[name] = regime
    return result
