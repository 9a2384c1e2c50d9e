"""Tensor elements from a seed: the same bits on every machine, Python and numpy.

Philox, a counter-based generator, gives raw 64-bit words for a key made of (seed, tensor,
row id, head); our own integer and exact binary arithmetic turns them into numbers, so no
library's notion of a normal variate enters. One stream serves one (row, head) block in
token order: dropping later tokens, other rows or other heads, permuting rows and renaming
slots leaves every remaining element as it was. Metamorphic relations and shrinking rely on
this.

A *regime* names a distribution. Each is a function of a stream and of a block's shape
``[tokens, channels]`` and returns float64 (of several heads ``[heads, tokens, channels]``, or
what broadcasts to it), which torch converts to the tensor's dtype (to narrow ones through fp32).
"""

import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from oracle.calls import AnyCall
from oracle.calls.base import Place
from oracle.captured import take
from oracle.case import Case
from oracle.layout import DTYPES, TensorSpec

Array = npt.NDArray[Any]
_WORDS = 4
"""Words that one step of Philox's counter gives."""
SPECIALS = np.array([np.nan, np.inf, -np.inf, 3.0e38, -3.0e38, 1e-45, -0.0, 6.0e4])


class _Generator(threading.local):
    """One generator a thread, given key and counter each time: to make one takes longer than most draws."""

    def __init__(self) -> None:
        self.philox = np.random.Philox(key=0)
        self.state: Any = self.philox.state


_GENERATOR = _Generator()


def _philox(key: Array, step: int) -> np.random.Philox:
    """Philox with this key, ``step`` steps of its counter on from the start."""
    state = _GENERATOR.state
    state["state"] = {"counter": np.array([step, 0, 0, 0], dtype=np.uint64), "key": key}
    _GENERATOR.philox.state = state
    return _GENERATOR.philox


class Stream:
    """Raw 64-bit words of one (seed, tensor, row id, head) block, and exact numbers from them.

    For several heads every result has a leading axis, of blocks that know nothing of each other.
    """

    def __init__(self, seed: int, tensor: str, row: int, head: int | Sequence[int]) -> None:
        self._leading = () if isinstance(head, int) else (len(head),)
        names = (f"{seed}/{tensor}/{row}/{h}" for h in ((head,) if isinstance(head, int) else head))
        digests = (hashlib.blake2b(name.encode(), digest_size=16).digest() for name in names)
        self._keys = [np.frombuffer(digest, dtype="<u8") for digest in digests]
        self._taken = 0

    def words(self, shape: tuple[int, ...]) -> Array:
        """Uniform uint64 words."""
        count, skipped = math.prod(shape), self._taken % _WORDS
        result = np.empty((len(self._keys), count), dtype=np.uint64)
        for words, key in zip(result, self._keys, strict=True):
            words[:] = _philox(key, self._taken // _WORDS).random_raw(skipped + count)[skipped:]
        self._taken += count
        return result.reshape(self._leading + shape)

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
        lanes = self.words(shape)[..., None].view(np.uint16)
        total: Array = lanes.sum(-1, dtype=np.float64)
        total -= 131070.0
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
    value, place = s.binades(-2, 2, (shape[0], 1)), s.below(shape[1], (shape[0], 1))
    result = np.zeros((*place.shape[:-1], shape[1]))
    np.put_along_axis(result, place, value, -1)
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

_STATES: dict[str, Regime] = {
    "normal": _normal(),
    "zero": _ZERO,
    "one_hot": _one_hot,
    "ties": _ties,
    "binades": _binades(-20, 10),
    "large": _normal(2.0**20),
    "specials": _specials,
}
_ACTIVATIONS: dict[str, Regime] = {
    "normal": _normal(),
    "zero": _ZERO,
    "ties": _ties,
    "near_one": _choice(1.0078125, -1.0078125, 1.0, 0.9921875),  # products between two bf16 numbers (21)
    "saturated": _choice(-104.0, -100.0, -88.75, -88.0, -87.25, -20.0, 20.0, 88.0, 100.0),  # SiLU (22)
    "one_hot": _one_hot,
    "binades": _binades(-20, 10),
    "extreme": _binades(-126, 100),
    "specials": _specials,
}

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
    "state": _STATES,
    "correction": _STATES,
    "key_gate": {**_KEYS, "fast": _scaled(4.0, 40.0), "thresholds": _choice(*_THRESHOLDS)},
    "x": _ACTIVATIONS,
    "conv_state": _ACTIVATIONS,
    "weight": {
        "normal": _normal(0.5),
        "zero": _ZERO,
        "ties": _ties,
        "near_one": _choice(1.0078125, -1.0078125, 1.0, -1.015625, 0.99609375),
        "one_hot": _one_hot,
        "binades": _binades(-20, 10),
        "extreme": _binades(-126, 60),
        "specials": _specials,
    },
    # A projection: what the convolution makes keys, queries and values of.
    "mixed_qkv": {
        **_ACTIVATIONS,
        "tiny": _normal(2.0**-12),
        "aligned": _aligned,
        "alternating": _alternating,
    },
    "bias": {"normal": _normal(), "zero": _ZERO, "near_one": _choice(-1.015625, 1.0), "specials": _specials},
}
"""Per table, its regimes; the first is what an unnamed regime means and what shrinking aims at."""


@dataclass(frozen=True)
class Values:
    """Dense input tensors on the CPU, and which of their cells hold inputs.

    ``tensors[name]`` has the case's shape and dtype. ``filled[name]`` is a bool tensor of
    leading dimensions, or all, that are inputs; cells outside it are dead and hold poison in the
    arena. Output tensors do not appear: all their cells are poison before the launch.
    """

    tensors: dict[str, torch.Tensor]
    filled: dict[str, torch.Tensor]

    @classmethod
    def full(cls, tensors: dict[str, torch.Tensor]) -> "Values":
        """Tensors of which every cell is an input, such as what an earlier call left."""
        return cls(tensors, {name: torch.ones(x.shape, dtype=torch.bool) for name, x in tensors.items()})


def build(case: Case) -> Values:
    """Build the case's inputs; deterministic to the bit. ``ValueError`` for an unknown regime."""
    if without := sorted(case.regimes.keys() - REGIMES.keys()):
        raise ValueError(f"{without[0]} has no regimes: its values follow from the case")
    indices = index_tensors(case.call)
    tensors: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for name, spec in case.call.tensors().items():
        if spec.output:
            continue
        if spec.index:
            tensors[name], filled[name] = indices[name], torch.ones(spec.shape, dtype=torch.bool)
            continue
        data, mask = _MAKERS[spec.role](case, spec, _regime(case, spec))
        tensors[name] = torch.from_numpy(data).to(DTYPES[spec.dtype])
        filled[name] = torch.from_numpy(mask)
    return Values(tensors, filled)


def peek(case: Case, spec: TensorSpec, row: int = 0) -> Array:
    """What ``build`` would make of one row of a tensor, or of a parameter, in float64 and alone.

    A row of tokens ``[T, ...]`` comes as ``[H, L, ...]`` or ``[L, ...]`` with its whole window, a
    record or a slot likewise; cells that are dead in the case have values too.
    """
    draw = _regime(case, spec)
    if spec.role == "parameter":
        made = _parameters(case, spec, draw)[0]
    else:
        own = spec.axes[1:2] == ("head",) or spec.axes[:2] == ("row", "position")
        inner = spec.shape[2:] if own else spec.shape[1:]
        token = (case.call.longest, *(inner or (1,)))
        made = _block(case, spec, draw, row, token if spec.role == "token" else inner)
    return torch.from_numpy(made).to(DTYPES[spec.dtype]).double().numpy()


def index_tensors(call: AnyCall) -> dict[str, torch.Tensor]:
    """The call's index tensors: their elements follow from its lists."""
    elements = call.index_values()
    return {
        name: torch.tensor(elements[name], dtype=DTYPES[spec.dtype]).reshape(spec.shape)
        for name, spec in call.tensors().items()
        if spec.index
    }


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


def regime_of(case: Case, table: str) -> str:
    """The regime in force for a table: the case's, else its first."""
    return case.regimes.get(table, next(iter(REGIMES[table])))


def _regime(case: Case, spec: TensorSpec) -> Regime:
    table, wanted = REGIMES[spec.table], regime_of(case, spec.table)
    if wanted not in table:
        raise ValueError(f"{spec.table} has no regime {wanted!r}; it has {', '.join(table)}")
    return table[wanted]


def _parameters(case: Case, spec: TensorSpec, draw: Regime) -> tuple[Array, Array]:
    """Parameters: a stream per head where there are heads ([H], [H, K]), else one ([C], [C, W])."""
    filled = np.ones(spec.shape[0], dtype=bool)
    if case.captured is not None and (given := take(case.captured, case.call, spec, 0)):
        return given[0], filled
    width = spec.shape[1] if len(spec.shape) == 2 else 1
    data = np.empty((spec.shape[0], width))
    if spec.axes[0] == "head":
        data[:, None] = draw(_stream(case, spec, 0, range(spec.shape[0])), (1, width))
    else:
        data[:] = draw(_stream(case, spec, 0, [0]), data.shape)[0]
    return data.reshape(spec.shape), filled


def _block(case: Case, spec: TensorSpec, draw: Regime, row: int, shape: tuple[int, ...]) -> Array:
    """A row's elements, ``[H, *shape]`` from a stream per head, or ``shape`` from one; two axes at most."""
    two = (shape[0], math.prod(shape[1:]))
    heads = range(spec.shape[1] if spec.axes[1] == "head" else 1)
    hostile_from = case.call.hostile[row] if case.call.hostile and _has_positions(spec) else shape[0]
    result = np.empty((len(heads), *two))
    given = _captured(case, spec, row, shape)
    if given is not None:
        result[:] = given.reshape(result.shape)
    else:
        result[:] = draw(_stream(case, spec, case.call.ids[row], heads), two)
    if hostile_from < shape[0]:
        hostile = Stream(case.seed, f"hostile {spec.name}", case.call.ids[row], heads)
        result[:, hostile_from:] = SPECIALS[hostile.below(len(SPECIALS), two)][:, hostile_from:]
    return result.reshape(-1, *shape) if spec.axes[1] == "head" else result.reshape(shape)


def _stream(case: Case, spec: TensorSpec, row: int, heads: Sequence[int]) -> Stream:
    """The words of blocks; beside captured values they go by captured layers and heads."""
    if case.captured is None:
        return Stream(case.seed, spec.name, row, heads)
    heads = [case.captured.head(head) for head in heads] if "head" in spec.axes else heads
    return Stream(case.seed, case.captured.name(spec.name), row, heads)


def _captured(case: Case, spec: TensorSpec, row: int, shape: tuple[int, ...]) -> Array | None:
    """A row's captured elements in a block of ``[H, *shape]`` (or one head), zeros around them."""
    given = take(case.captured, case.call, spec, row) if case.captured is not None else None
    if given is None:
        return None
    data, cells = given
    if spec.role == "token":
        data = data if data.ndim > 1 else data[:, None]
        whole = np.zeros((shape[0], *data.shape[1:]))
        whole[: len(data)] = data
        return np.moveaxis(whole, 1, 0) if spec.axes[1] == "head" else whole[None]
    whole = np.zeros(spec.shape[1:])
    whole[cells] = data
    return whole if spec.axes[1] == "head" else whole[None]


def _has_positions(spec: TensorSpec) -> bool:
    """Whether the first axis of a row's block counts its tokens."""
    return spec.role == "token" or "position" in spec.axes


def _slots(case: Case, spec: TensorSpec, draw: Regime) -> tuple[Array, Array]:
    """Slots or record rows, keyed by the row that reads them; the rest is dead."""
    call, inner = case.call, spec.shape[2:] if spec.axes[1] == "head" else spec.shape[1:]
    data = np.zeros(spec.shape)
    whole, parts = np.zeros(spec.shape[0], dtype=bool), np.zeros(spec.shape, dtype=bool)
    entries: list[tuple[int, int, Place | None]] = list(call.blocks(spec.name))
    for index, (row, slot, cells) in enumerate(entries):
        if not index or entries[index - 1][0] != row:
            data[slot] = _block(case, spec, draw, row, inner)
        whole[slot] = True
        parts[(slot, *cells) if cells is not None else slot] = True
    return data, whole if all(cells is None for _, _, cells in entries) else parts


def _tokens(case: Case, spec: TensorSpec, draw: Regime) -> tuple[Array, Array]:
    """Rows' tokens [T, ...] or [N, L, ...]; those that nobody reads are dead."""
    call = case.call
    batched = spec.axes[0] == "row"
    heads = spec.axes[1] == "head"
    inner = spec.shape[2:] if batched or heads else spec.shape[1:]
    data, mask = np.zeros(spec.shape), np.zeros(spec.shape[: 2 if batched else 1], dtype=bool)
    for row, qlen in enumerate(call.qlens):
        if qlen and call.reads_tokens(row):
            # The whole window is drawn whatever the row's length, so a shorter row keeps its values.
            block = _block(case, spec, draw, row, (call.longest, *(inner or (1,))))
            if heads:
                block = np.moveaxis(block, 0, 1)
            place = call.token_place(row)
            data[place] = block[:qlen].reshape(data[place].shape)
            mask[place] = True
    return data, mask


_MAKERS: dict[str, Callable[[Case, TensorSpec, Regime], tuple[Array, Array]]] = {
    "token": _tokens,
    "slot": _slots,
    "parameter": _parameters,
}
