"""The calls that are timed: every row full, every row its own slot, as the contract describes calls."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from oracle.calls import AnyCall
from oracle.calls.commit import Commit
from oracle.calls.conv import ConvPrefill, ConvUpdate, PackedConv
from oracle.calls.fused_verify import FusedVerify
from oracle.calls.verify import Verify

OPERATIONS = ("verify", "fused_verify", "commit", "conv_update", "conv_prefill", "packed_conv")
"""What can be timed, as ``--op`` names it, in the order of the tables."""
PREFILLS = ("conv_prefill", "packed_conv")
"""Operations whose size is a number of tokens; that of the others is rows and window."""
K = V = 128
WIDTH = 4
PARTS = 3
"""q, k and v, side by side in a projection."""
LOWER_BOUND = -5.0


@dataclass(frozen=True)
class Size:
    """One row of a table. Prefills have ``tokens`` and ``channels``, the others the rest."""

    op: str
    rows: int = 0
    window: int = 0
    heads: int = 0
    layers: int = 0
    tokens: int = 0
    channels: int = 0

    @property
    def label(self) -> str:
        """The size in a few words."""
        if self.op in PREFILLS:
            return f"{self.tokens} x {self.channels}"
        return f"N {self.rows} Q {self.window}"

    @property
    def needs(self) -> int:
        """Slots that a call takes."""
        return PREFILL_ROWS if self.op in PREFILLS else self.rows


@dataclass(frozen=True)
class Grid:
    """The sizes that options ask for."""

    rows: Sequence[int]
    windows: Sequence[int]
    heads: int
    layers: int
    tokens: Sequence[int]
    channels: int

    def sizes(self, op: str) -> Iterator[Size]:
        """An operation's, in the order of its table."""
        if op in PREFILLS:
            for tokens in self.tokens:
                yield Size(op, tokens=tokens, channels=self.channels)
            return
        layers = self.layers if op == "commit" else 1
        for window in self.windows:
            for rows in self.rows:
                yield Size(op, rows=rows, window=window, heads=self.heads, layers=layers)


PREFILL_ROWS = 4
_CONTINUED = (True, False, True, True)
"""Which sequences of a prefill have an initial state."""


def call_of(size: Size, slots: tuple[int, ...], pool: int) -> AnyCall:
    """The call of this size on some slots of a pool; it is within the contract."""
    made = _prefill(size, slots, pool) if size.op in PREFILLS else _window(size, slots, pool)
    made.check()
    return made


def _window(size: Size, slots: tuple[int, ...], pool: int) -> AnyCall:
    N, Q, H = size.rows, size.window, size.heads
    channels = PARTS * H * K
    full = (Q,) * N
    rows: dict[str, Any] = {"pool": pool, "qlens": full, "slots": slots, "ids": tuple(range(N))}
    match size.op:
        case "verify":
            return Verify(
                **rows,
                heads=H,
                key_dim=K,
                value_dim=V,
                window=Q,
                capacity=N,
                activation="bfloat16",
                out="bfloat16",
                state="bfloat16",
                lower_bound=LOWER_BOUND,
            )
        case "fused_verify":
            return FusedVerify(
                **rows,
                heads=H,
                window=Q,
                capacity=N,
                accepted=full,
                lower_bound=LOWER_BOUND,
            )
        case "conv_update":
            return ConvUpdate(
                **rows,
                channels=channels,
                state_len=Q + WIDTH - 2,
                window=Q,
                accepted=full,
                activation="bfloat16",
                conv="bfloat16",
                taps="bfloat16",
            )
    return Commit(
        **rows,
        layers=size.layers,
        heads=H,
        key_dim=K,
        value_dim=V,
        window=Q,
        channels=channels,
        state_len=Q + WIDTH - 2,
        capacity=N,
        accepted=full,
        activation="bfloat16",
        state="bfloat16",
        conv="bfloat16",
        lower_bound=LOWER_BOUND,
    )


def _prefill(size: Size, slots: tuple[int, ...], pool: int) -> ConvPrefill:
    """Four sequences of different lengths that end inside the kernels' blocks of tokens."""
    T = size.tokens
    cuts = (0, T // 7, T // 2 + 5, T - T // 5 - 1, T)
    lengths = tuple(end - start for start, end in pairwise(cuts))
    fields: dict[str, Any] = {
        "pool": pool,
        "qlens": lengths,
        "slots": slots,
        "ids": tuple(range(PREFILL_ROWS)),
        "channels": size.channels,
        "state_len": WIDTH - 1,
        "most_tokens": T,
        "initial": _CONTINUED,
        "activation": "bfloat16",
        "conv": "float32",
        "taps": "float32",
    }
    if size.op == "packed_conv":
        return PackedConv(**fields, part_dim=size.channels // PARTS)
    return ConvPrefill(**fields)


def _rows(call: FusedVerify) -> dict[str, Any]:
    return {"pool": call.pool, "qlens": call.qlens, "slots": call.slots, "ids": call.ids}


def updated(call: FusedVerify) -> ConvUpdate:
    """The convolution's step within a fused verify."""
    return ConvUpdate(
        **_rows(call),
        channels=call.channels,
        state_len=call.state_len,
        window=call.window,
        accepted=call.accepted,
        activation="bfloat16",
        conv="bfloat16",
        taps=call.taps,
    )


def verified(call: FusedVerify, records: str) -> Verify:
    """The verify within a fused verify, with one record row per batch ``row`` or per state ``slot``."""
    return Verify(
        **_rows(call),
        heads=call.heads,
        key_dim=K,
        value_dim=V,
        window=call.window,
        capacity=call.capacity,
        records="slot" if records == "slot" else "row",
        activation="bfloat16",
        out="bfloat16",
        state="bfloat16",
        lower_bound=call.lower_bound,
    )
