"""Tensor elements from a seed: the same bits on every machine, Python and numpy.

Philox, a counter-based generator, gives raw 64-bit words for a key made of (seed, tensor,
row id, head); our own integer and exact binary arithmetic turns them into numbers, so no
library's notion of a normal variate enters. One stream serves one (row, head) block in
token order: dropping later tokens, other rows or other heads, permuting rows and renaming
slots leaves every remaining element as it was. Metamorphic relations and shrinking rely on
this.

A *regime* names a distribution. Each is a function of a stream and of the block's shape
``[tokens, channels]`` and returns float64, which
torch converts to the tensor's dtype (to narrow ones through fp32).
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from oracle.case import Case
from oracle.layout import DTYPES, TensorSpec

Array = npt.NDArray[Any]
SPECIALS = np.array([np.nan, np.inf, -np.inf, 3.0e38, -3.0e38, 1e-45, -0.0, 6.0e4])


class Stream:
    """Raw 64-bit words of one (seed, tensor, row id, head) block, and exact numbers from them."""

    def __init__(self, seed: int, tensor: str, row: int, head: int) -> None:
        name = f"{seed}/{tensor}/{row}/{head}".encode()
        key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
        self._philox = np.random.Philox(key=key)

    def words(self, shape: tuple[int, ...]) -> Array:
        """Uniform uint64 words."""
        raw: Array = np.asarray(self._philox.random_raw(int(np.prod(shape))))
        return raw.reshape(shape)

    def below(self, n: int, shape: tuple[int, ...]) -> Array:
        """Integers in [0, n), int64; n is far below 2**32, so the bias is under n / 2**32."""
        scaled: Array = (self.words(shape) >> np.uint64(32)) * np.uint64(n) >> np.uint64(32)
        return scaled.astype(np.int64)

    def uniform(self, low: float, high: float, shape: tuple[int, ...]) -> Array:
        """Float64 in [low, high) on a grid of 2**-24 of the width."""
        unit: Array = (self.words(shape) >> np.uint64(40)).astype(np.float64) * 2.0**-24
        spread: Array = low + (high - low) * unit
        return spread

    def normal(self, shape: tuple[int, ...]) -> Array:
        """Mean 0, variance 1, |x| < 3.5: the centred sum of a word's four 16-bit lanes."""
        words = self.words(shape)
        total: Array = np.full(shape, -131070.0)
        for shift in (0, 16, 32, 48):
            total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.float64)
        total *= 3.0**0.5 / 65536.0
        return total

    def binades(self, low: int, high: int, shape: tuple[int, ...]) -> Array:
        """Random sign and mantissa, exponent uniform in [low, high]."""
        mantissa = self.uniform(1.0, 2.0, shape)
        sign = 1.0 - 2.0 * self.below(2, shape)
        scaled: Array = np.ldexp(sign * mantissa, low + self.below(high - low + 1, shape))
        return scaled


Shape = tuple[int, int]
Regime = Callable[[Stream, Shape], Array]


def _aligned(s: Stream, shape: Shape) -> Array:
    """Nearly equal vectors: pairwise cosine about 0.999 (class 24)."""
    return s.normal((1, shape[1])) + 0.03125 * s.normal(shape)


def _one_hot(s: Stream, shape: Shape) -> Array:
    """A single non-zero channel a token, so that a swapped axis cannot hide (class 11)."""
    result = np.zeros(shape)
    result[np.arange(shape[0]), s.below(shape[1], (shape[0],))] = s.binades(-2, 2, (shape[0],))
    return result


def _alternating(s: Stream, shape: Shape) -> Array:
    """One vector with the sign alternating by token: corrections that do not settle."""
    signs: Array = 1.0 - 2.0 * (np.arange(shape[0])[:, None] % 2)
    return s.normal((1, shape[1])) * signs


def _ties(s: Stream, shape: Shape) -> Array:
    """Small multiples of 2**-4: sums land on rounding ties of a narrow output (class 30)."""
    return (s.below(65, shape) - 32) / 16.0


def _specials(s: Stream, shape: Shape) -> Array:
    """Normal values with about one element in 64 not finite, subnormal, -0 or huge."""
    picks = SPECIALS[s.below(len(SPECIALS), shape)]
    return np.where(s.below(64, shape) == 0, picks, s.normal(shape))


def _mixed(s: Stream, shape: Shape) -> Array:
    """Per channel either hardly any decay or full decay (class 24)."""
    fast = s.below(2, (1, shape[1])) == 1
    return np.where(fast, s.uniform(3.0, 30.0, shape), s.uniform(-30.0, -8.0, shape))


def _choice(*values: float) -> Regime:
    table = np.array(values)
    return lambda s, shape: table[s.below(len(table), shape)]


def _scaled(low: float, high: float) -> Regime:
    return lambda s, shape: s.uniform(low, high, shape)


def _normal(scale: float = 1.0) -> Regime:
    return lambda s, shape: scale * s.normal(shape)


def _binades(low: int, high: int) -> Regime:
    return lambda s, shape: s.binades(low, high, shape)


_ZERO: Regime = lambda s, shape: np.zeros(shape)  # noqa: E731

_KEYS: dict[str, Regime] = {
    "normal": _normal(),
    "zero": _ZERO,
    "tiny": _normal(2.0**-12),  # squared norm near eps = 1e-6: eps decides (class 24)
    "aligned": _aligned,
    "one_hot": _one_hot,
    "binades": _binades(-20, 10),
    "extreme": _binades(-126, 60),  # squared norms past the fp32 range, subnormals (class 22)
    "specials": _specials,
}
_THRESHOLDS = (
    -1e4,
    -104.0,
    -100.0,
    -88.5,
    -17.5,
    -16.0,
    -1.0,
    0.0,
    10.5,
    15.0,
    19.99,
    20.0,
    20.01,
    88.5,
    100.0,
    1e4,
)

REGIMES: dict[str, dict[str, Regime]] = {
    "q": _KEYS,
    "k": _KEYS,
    "v": {
        "normal": _normal(),
        "zero": _ZERO,
        "alternating": _alternating,
        "ties": _ties,
        "binades": _binades(-20, 10),
        "extreme": _binades(-126, 100),
        "specials": _specials,
    },
    "raw_g": {
        "normal": _normal(2.0),
        "slow": _scaled(-14.0, -6.0),
        "fast": _scaled(4.0, 40.0),
        "mixed": _mixed,
        "thresholds": _choice(*_THRESHOLDS),
        "specials": _specials,
    },
    "raw_beta": {
        "normal": _normal(2.0),
        "half": _choice(0.5),
        "near_one": _scaled(6.0, 18.0),
        "thresholds": _choice(*_THRESHOLDS),
        "specials": _specials,
    },
    "A_log": {"normal": _normal(0.5), "zero": _ZERO, "spread": _scaled(-4.0, 3.0)},
    "dt_bias": {"normal": _normal(), "zero": _ZERO, "spread": _scaled(-6.0, 6.0)},
    "state": {
        "normal": _normal(),
        "zero": _ZERO,
        "one_hot": _one_hot,
        "ties": _ties,
        "binades": _binades(-20, 10),
        "large": _normal(2.0**20),
        "specials": _specials,
    },
}
"""Per tensor, its regimes; the first is what an unnamed regime means and what shrinking aims at."""


@dataclass(frozen=True)
class Values:
    """Dense input tensors on the CPU, and which of their cells hold inputs.

    ``tensors[name]`` has the case's shape and dtype. ``filled[name]`` is a bool tensor of
    the leading dimensions that are inputs; cells outside it are dead and hold poison in the
    arena. Output tensors do not appear: all their cells are poison before the launch.
    """

    tensors: dict[str, torch.Tensor]
    filled: dict[str, torch.Tensor]


def build(case: Case) -> Values:
    """Build the case's inputs; deterministic to the bit. ``ValueError`` for an unknown regime."""
    call, specs = case.call, case.call.tensors()
    if without := sorted(case.regimes.keys() - REGIMES.keys()):
        raise ValueError(f"{without[0]} has no regimes: its values follow from the case")
    tensors: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for name, spec in specs.items():
        if spec.output:
            continue
        if spec.index:
            source = call.starts if name == "query_start_loc" else call.slots
            tensors[name] = torch.tensor(source, dtype=DTYPES[spec.dtype])
            filled[name] = torch.ones(spec.shape, dtype=torch.bool)
            continue
        draw = _regime(case, name)
        if name in ("A_log", "dt_bias"):
            data, mask = _parameters(case, spec, draw), np.ones(spec.shape[0], dtype=bool)
        elif name == "state":
            data, mask = _states(case, spec, draw)
        else:
            data, mask = _tokens(case, spec, draw)
        tensors[name] = torch.from_numpy(data).to(DTYPES[spec.dtype])
        filled[name] = torch.from_numpy(mask)
    return Values(tensors, filled)


def checksum(case: Case) -> str:
    """16 hexadecimal digits over every input element's bits."""
    digest = hashlib.blake2b(digest_size=8)
    values = build(case)
    for name, tensor in values.tensors.items():
        digest.update(name.encode())
        digest.update(np.packbits(values.filled[name].numpy()).tobytes())
        # Flattened first: torch gives an empty selection strides that no bytes can be viewed through.
        digest.update(tensor[values.filled[name]].flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def regime_of(case: Case, name: str) -> str:
    """The regime in force for a tensor: the case's, else the first of its table."""
    return case.regimes.get(name, next(iter(REGIMES[name])))


def _regime(case: Case, name: str) -> Regime:
    table, wanted = REGIMES[name], regime_of(case, name)
    if wanted not in table:
        raise ValueError(f"{name} has no regime {wanted!r}; it has {', '.join(table)}")
    return table[wanted]


def _parameters(case: Case, spec: TensorSpec, draw: Regime) -> Array:
    """Per-head parameters: [H] or [H, K]."""
    width = spec.shape[1] if len(spec.shape) == 2 else 1
    rows = [draw(Stream(case.seed, spec.name, 0, h), (1, width))[0] for h in range(spec.shape[0])]
    return np.stack(rows).reshape(spec.shape)


def _states(case: Case, spec: TensorSpec, draw: Regime) -> tuple[Array, Array]:
    """Live slots' states [S, H, V, K], keyed by the row that owns them; the rest is dead."""
    _, heads, value_dim, key_dim = spec.shape
    data, mask = np.zeros(spec.shape), np.zeros(spec.shape[0], dtype=bool)
    for row, slot in enumerate(case.call.slots):
        if case.call.live(row):
            mask[slot] = True
            for h in range(heads):
                data[slot, h] = draw(
                    Stream(case.seed, spec.name, case.call.ids[row], h), (value_dim, key_dim)
                )
    return data, mask


def _tokens(case: Case, spec: TensorSpec, draw: Regime) -> tuple[Array, Array]:
    """Live rows' tokens [T, H, C] or [T, H]; null rows' and padding tokens are dead."""
    call, heads = case.call, spec.shape[1]
    width = spec.shape[2] if len(spec.shape) == 3 else 1
    data, mask = np.zeros((spec.shape[0], heads, width)), np.zeros(spec.shape[0], dtype=bool)
    for row, (start, qlen) in enumerate(zip(call.starts, call.qlens, strict=False)):
        if not call.live(row):
            continue
        mask[start : start + qlen] = True
        hostile_from = call.hostile[row] if call.hostile else qlen
        for h in range(heads):
            # The whole window is drawn whatever the row's length, so a shorter row keeps its values.
            stream = Stream(case.seed, spec.name, call.ids[row], h)
            data[start : start + qlen, h] = draw(stream, (call.window, width))[:qlen]
            if hostile_from < qlen:
                hostile = Stream(case.seed, f"hostile {spec.name}", call.ids[row], h)
                picks = SPECIALS[hostile.below(len(SPECIALS), (call.window, width))]
                data[start + hostile_from : start + qlen, h] = picks[hostile_from:qlen]
    return data.reshape(spec.shape), mask
