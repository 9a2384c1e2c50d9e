"""Every value regime has the property that it is there for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from oracle.calls.commit import Commit
from oracle.calls.conv import ConvUpdate
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.values import REGIMES, Stream, build

Array = np.ndarray
HEADS, TOKENS, CHANNELS = 4, 64, 16

Property = Callable[[Array], None]


def sample(name: str, regime: str) -> Array:
    """A table's values as ``[head, token or value row, channel]`` in float64."""
    if name == "mixed_qkv":
        return _of_a_projection(name, regime)
    if name in ("x", "conv_state", "weight", "bias"):
        return _of_a_convolution(name, regime)
    if name in ("correction", "key_gate"):
        return _of_a_commit(name, regime)
    return _of_verify(name, regime)


def _of_a_convolution(name: str, regime: str) -> Array:
    fields: dict[str, Any] = {"pool": 2, "qlens": (TOKENS,), "slots": (1,), "ids": (0,), "bias": "float32"}
    call = ConvUpdate(**fields, channels=256, state_len=8, window=TOKENS)
    x = build(Case(call=call, regimes={name: regime}, seed=99)).tensors[name].double()
    x = x[1] if name == "conv_state" else x
    return np.asarray(x.reshape(1, x.shape[0], -1).numpy())


def _of_a_projection(name: str, regime: str) -> Array:
    """As drawn: a case rounds it to bf16. Every head is a row with a stream of its own."""
    draw = REGIMES[name][regime]
    rows = [draw(Stream(99, name, row, 0), (TOKENS, CHANNELS)) for row in range(HEADS)]
    return np.stack(rows).astype(np.float32).astype(np.float64)


def _of_a_commit(name: str, regime: str) -> Array:
    fields: dict[str, Any] = {"pool": 2, "qlens": (TOKENS,), "slots": (1,), "ids": (0,), "capacity": 1}
    fields |= {"heads": HEADS, "key_dim": CHANNELS, "value_dim": CHANNELS, "window": TOKENS}
    call = Commit(**fields, channels=1, state_len=TOKENS, accepted=(TOKENS,))
    x = build(Case(call=call, regimes={name: regime}, seed=99)).tensors[f"{name}.0"].double()
    return np.asarray(x[0].numpy())


def _of_verify(name: str, regime: str) -> Array:
    call = Verify(
        heads=HEADS,
        key_dim=CHANNELS,
        value_dim=CHANNELS,
        window=TOKENS,
        pool=2,
        qlens=(TOKENS,),
        slots=(1,),
        ids=(0,),
        capacity=1,
    )
    x = build(Case(call=call, regimes={name: regime}, seed=99)).tensors[name].double()
    if name == "state":
        x = x[1]
    elif name not in ("A_log", "dt_bias"):
        x = x.transpose(0, 1)
    return np.asarray(x.reshape(HEADS, -1, CHANNELS if x.shape[-1] == CHANNELS else 1).numpy())


def normal(scale: float) -> Property:
    def check(x: Array) -> None:
        n = x.size
        assert np.abs(x).max() < 3.5 * scale
        assert abs(x.mean()) < 5 * scale / n**0.5
        assert n < 1000 or abs(x.std() / scale - 1) < 5 / n**0.5
        assert len(np.unique(x)) > 0.9 * n

    return check


def between(low: float, high: float) -> Property:
    def check(x: Array) -> None:
        assert low <= x.min() <= x.max() <= high
        # Reaching a quarter of the range from either end, for samples large enough to.
        assert x.size < 64 or (x.min() < low + (high - low) / 4 and x.max() > high - (high - low) / 4)

    return check


def binades(low: int, high: int) -> Property:
    def check(x: Array) -> None:
        exponents = np.frexp(x)[1] - 1
        assert exponents.min() >= low
        assert exponents.max() <= high
        assert set(exponents.flat) >= set(range(low + 2, high - 1)) or x.size < 50 * (high - low)
        assert 0.4 < (x > 0).mean() < 0.6

    return check


def zero(x: Array) -> None:
    assert not x.any()


def tiny(x: Array) -> None:
    # The squared norm and eps = 1e-6 are of one size: an eps ten times off would show.
    norms = (x**2).sum(-1)
    assert ((norms > 1e-7) & (norms < 1e-5)).mean() > 0.95


def aligned(x: Array) -> None:
    unit = x / np.sqrt((x**2).sum(-1, keepdims=True))
    cosine = unit @ unit.transpose(0, 2, 1)
    off_diagonal = cosine[:, ~np.eye(x.shape[1], dtype=bool)]
    assert 0.9985 < off_diagonal.mean() < 0.9995
    assert off_diagonal.min() > 0.995
    assert off_diagonal.max() < 1.0


def one_hot(x: Array) -> None:
    assert ((x != 0).sum(-1) == 1).all()
    size = np.abs(x[x != 0])
    assert 0.25 <= size.min() < size.max() < 8.0
    assert len(np.unique((x != 0).argmax(-1))) >= min(x.shape[-1], x[..., 0].size // 2)


def alternating(x: Array) -> None:
    assert (x[:, 1:] == -x[:, :-1]).all()
    normal(1.0)(x[:, 0])


def ties(x: Array) -> None:
    assert (x * 16 == np.round(x * 16)).all()
    between(-2.0, 2.0)(x)


def specials(x: Array) -> None:
    strange = ~np.isfinite(x) | (np.abs(x) > 1e4) | ((np.abs(x) < 1e-40) & ((x != 0) | np.signbit(x)))
    # One in 64 is picked, all eight picks are strange; 4096 elements make 64 +- 8 of them.
    assert x.size < 2000 or 1 / 128 < strange.mean() < 1 / 32
    assert strange.any()
    assert x.size < 2000 or (np.isnan(x).any() and np.isposinf(x).any() and np.isneginf(x).any())
    normal(1.0)(x[~strange])


def mixed(x: Array) -> None:
    fast = x > 0
    assert (fast == fast[:, :1]).all()
    assert 0 < fast.mean() < 1
    between(3.0, 30.0)(x[fast])
    between(-30.0, -8.0)(x[~fast])


def thresholds(x: Array) -> None:
    seen = set(np.unique(x))
    # Either side of 20 and of 10, where exp underflows and overflows, and where 1 + e**x is 1.
    wanted = (20.0, 19.99, 20.01, 10.5, 15.0, -17.5, -16.0, 88.5, -88.5, 100.0, -104.0, 1e4, -1e4, 0.0)
    assert {float(np.float32(t)) for t in wanted} <= seen
    assert len(seen) <= 16


def among(*values: float) -> Property:
    wanted = {float(np.float32(value)) for value in values}

    def check(x: Array) -> None:
        assert set(np.unique(x)) == wanted

    return check


def half(x: Array) -> None:
    assert (x == 0.5).all()


KEYS: dict[str, Property] = {
    "normal": normal(1.0),
    "zero": zero,
    "tiny": tiny,
    "aligned": aligned,
    "one_hot": one_hot,
    "binades": binades(-20, 10),
    "extreme": binades(-126, 60),
    "specials": specials,
}
STATES: dict[str, Property] = {
    "normal": normal(1.0),
    "zero": zero,
    "one_hot": one_hot,
    "ties": ties,
    "binades": binades(-20, 10),
    "large": normal(2.0**20),
    "specials": specials,
}
ACTIVATIONS: dict[str, Property] = {
    "normal": normal(1.0),
    "zero": zero,
    "ties": ties,
    "near_one": among(1.0078125, -1.0078125, 1.0, 0.9921875),
    "saturated": among(-104.0, -100.0, -88.75, -88.0, -87.25, -20.0, 20.0, 88.0, 100.0),
    "one_hot": one_hot,
    "binades": binades(-20, 10),
    "extreme": binades(-126, 100),
    "specials": specials,
}
PROPERTIES: dict[str, dict[str, Property]] = {
    "q": KEYS,
    "k": KEYS,
    "v": {
        "normal": normal(1.0),
        "zero": zero,
        "alternating": alternating,
        "ties": ties,
        "binades": binades(-20, 10),
        "extreme": binades(-126, 100),
        "specials": specials,
    },
    "raw_g": {
        "normal": normal(2.0),
        "slow": between(-14.0, -6.0),
        "fast": between(4.0, 40.0),
        "mixed": mixed,
        "thresholds": thresholds,
        "specials": specials,
    },
    "raw_beta": {
        "normal": normal(2.0),
        "half": half,
        "near_one": between(6.0, 18.0),
        "thresholds": thresholds,
        "specials": specials,
    },
    "A_log": {"normal": normal(0.5), "zero": zero, "spread": between(-4.0, 3.0)},
    "dt_bias": {"normal": normal(1.0), "zero": zero, "spread": between(-6.0, 6.0)},
    "state": STATES,
    "correction": STATES,
    "key_gate": KEYS | {"fast": between(4.0, 40.0), "thresholds": thresholds},
    "x": ACTIVATIONS,
    "conv_state": ACTIVATIONS,
    "weight": {
        "normal": normal(0.5),
        "zero": zero,
        "ties": ties,
        "near_one": among(1.0078125, -1.0078125, 1.0, -1.015625, 0.99609375),
        "one_hot": one_hot,
        "binades": binades(-20, 10),
        "extreme": binades(-126, 60),
        "specials": specials,
    },
    "mixed_qkv": ACTIVATIONS | {"tiny": tiny, "aligned": aligned, "alternating": alternating},
    "bias": {"normal": normal(1.0), "zero": zero, "near_one": among(-1.015625, 1.0), "specials": specials},
}
ALL = [(name, regime) for name, table in REGIMES.items() for regime in table]


def test_every_regime_has_a_property() -> None:
    assert [(name, regime) for name, table in PROPERTIES.items() for regime in table] == ALL


@pytest.mark.parametrize(("name", "regime"), ALL)
def test_regime(name: str, regime: str) -> None:
    PROPERTIES[name][regime](sample(name, regime))


def test_the_first_regime_is_plain() -> None:
    assert {next(iter(table)) for table in REGIMES.values()} == {"normal"}


def test_streams_are_uniform_and_exact() -> None:
    s = Stream(1, "q", 0, 0)
    u = s.uniform(-1.0, 3.0, (1 << 14,))
    assert -1.0 <= u.min() < -0.99
    assert 2.99 < u.max() < 3.0
    assert (u * 2.0**22 == np.round(u * 2.0**22)).all()
    counts = np.bincount(s.below(8, (1 << 14,)), minlength=8)
    assert len(counts) == 8
    assert (np.abs(counts - 2048) < 5 * 2048**0.5).all()


def test_streams_of_other_names_are_independent() -> None:
    keys = [
        (1, "q", 0, 0),
        (2, "q", 0, 0),
        (1, "k", 0, 0),
        (1, "q", 1, 0),
        (1, "q", 0, 1),
        (1, "q", 1, 11),
        (1, "q", 11, 1),
    ]
    first = {tuple(Stream(*key).words((4,)).tolist()) for key in keys}
    assert len(first) == len(keys)
    assert torch.equal(*(torch.from_numpy(Stream(1, "q", 0, 0).normal((9,))) for _ in range(2)))
