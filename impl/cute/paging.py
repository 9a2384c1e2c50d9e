"""What both verify kernels share besides arithmetic: pages by tensor copies, tickets, stores of a token."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint16, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from impl.cute.compile import VERIFY
from impl.cute.device import address, mbarrier_expect
from impl.cute.guarded import load_global_if, store_global_if, store_shared_if, take_ticket_if
from impl.cute.mma import HALF, ROWS, K, narrow_bf16

_BOX_BYTES = HALF * ROWS * 2


def fake_arguments(*, f32_taps: bool) -> tuple[Any, ...]:
    """Stand-ins of the arguments and the stream, for ``cute.compile``: all but the last stride is free."""
    taps = Float32 if f32_taps else BFloat16
    kinds = (
        (BFloat16, 2), (BFloat16, 2), (BFloat16, 2), (Float32, 1), (Float32, 1), (BFloat16, 4), (Float32, 4),
        (BFloat16, 4), (BFloat16, 2), (Int32, 1), (Int32, 1), (BFloat16, 3), (taps, 2), (Int32, 1),
        (Int32, 1),
    )  # fmt: skip
    fakes = []
    for name, (kind, rank) in zip(VERIFY.arguments, kinds, strict=False):
        shape = tuple(cute.sym_int() for _ in range(rank))
        strides = [cute.sym_int64() for _ in range(rank - 1)]
        if name == "state":
            strides[0] = cute.sym_int64(divisibility=8)
        align = 4 if name == "counter" else 16
        fakes.append(make_fake_tensor(kind, shape, (*strides, 1), assumed_align=align))
    return (*fakes, Float32(0.0), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True))


def page_copies(state: cute.Tensor, heads: Int32) -> tuple[Any, Any]:
    """The copy atom of half a page, and the coordinates [H * 128, 128, S] of the states."""
    layout = cute.make_layout((heads * ROWS, K, state.shape[0]), stride=(K, 1, state.stride[0]))
    box = cute.make_composed_layout(
        cute.make_swizzle(3, 4, 3), 0, cute.make_layout((ROWS, HALF), stride=(HALF, 1))
    )
    states = cute.make_tensor(state.iterator, layout)
    atom, pages = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), states, box, (ROWS, HALF))
    return atom, pages


@cute.jit
def fetch_page(atom: Any, pages: Any, page: Any, full: Any, slot: Int32, head: Int32) -> None:
    """Copy the state of a slot and head to the pointer ``page``, for a whole warp; counts toward ``full``."""
    with cute.arch.elect_one():
        mbarrier_expect(address(full), 2 * _BOX_BYTES)
    for half in cutlass.range_constexpr(2):
        to = (page + half * _BOX_BYTES).align(1024)
        to = cute.recast_ptr(to, cute.make_swizzle(3, 4, 3), dtype=BFloat16)
        box = cute.make_tensor(to, cute.make_layout((ROWS, HALF), stride=(HALF, 1)))
        source = cute.local_tile(pages[None, None, slot], (ROWS, HALF), (head, half))
        into, what = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(box, 0, 2), cute.group_modes(source, 0, 2)
        )
        cute.copy(atom, what, into, tma_bar_ptr=full)


def at(tensor: cute.Tensor, *index: Any) -> Int64:
    """The address of an element: leading indices, then one into the last mode."""
    place = Int64(0)
    for i, step in zip(index, tensor.stride[: len(index)], strict=True):
        place = place + Int64(i) * Int64(step)
    return tensor.iterator.toint() + place * (tensor.element_type.width // 8)


class Space(NamedTuple):
    """A piece of a CTA's shared memory, in bytes."""

    size: int
    alignment: int


def allocate(spaces: Sequence[Space]) -> list[Any]:
    """Pointers to the pieces of a CTA's shared memory."""
    memory = cutlass.memory.SmemAllocator()
    return [memory.allocate(each.size, byte_alignment=each.alignment) for each in spaces]


def shared_bytes(spaces: Sequence[Space]) -> int:
    """What ``allocate`` takes."""
    total = 0
    for size, alignment in spaces:
        total = -(-total // alignment) * alignment + size
    return total


class Items:
    """The work: item ``i`` is head ``i % heads`` of row ``i // heads``.

    CTA c starts with item c, then takes tickets: ticket t is item ``grid + t``. Every CTA takes one
    ticket too many, so that as many are taken as there are items (there are no more CTAs than
    items), and whoever takes the last one makes the counter 0 again.
    """

    def __init__(
        self,
        starts: cute.Tensor,
        slots: cute.Tensor,
        accepted: cute.Tensor,
        counter: cute.Tensor,
        heads: Int32,
        window: int,
    ) -> None:
        self.heads, self.window = heads, window
        self.count = slots.shape[0] * heads
        self.grid = cute.arch.grid_dim()[0]
        self._starts, self._slots, self._accepted, self._counter = starts, slots, accepted, counter

    def find(self, item: Int32, index: Any = 0) -> tuple[Int32, Int32, Int32, Int32]:
        """Slot, first token, number of tokens and accepted count of an item, in the thread of index 0.

        A row without tokens has no more than 0.
        """
        row = item // self.heads
        begin, end = (load_global_if(at(self._starts, row + i), index, 1, Int32) for i in (0, 1))
        slot = load_global_if(at(self._slots, row), index, 1, Int32)
        accepted = load_global_if(at(self._accepted, row), index, 1, Int32)
        return slot, begin, cutlass.min(end - begin, self.window), accepted

    def take(self, index: Any) -> Int32:
        """A ticket, in the thread of index 0."""
        return take_ticket_if(at(self._counter, 0), index, 1)

    def look_ahead(self, ticket: Int32, index: Any) -> tuple[Int32, ...]:
        """The ticket's item, and what ``find`` says of it, in the thread of index 0.

        An item of ``count`` or more does not exist; the rest is another's.
        """
        last = self.count - 1
        reset = Int32(0)
        # In one thread alone: index 0, and the last ticket.
        store_global_if(at(self._counter, 0), reset, index + (last - ticket), 1)
        item = ticket + self.grid
        return item, *self.find(cutlass.min(item, last), index)


def announce(to: Int32, ahead: tuple[Int32, ...], index: Any) -> None:
    """Store what ``look_ahead`` gave at a shared address, from the thread of index 0."""
    for i, value in enumerate(ahead):
        store_shared_if(to + 4 * i, value, index, 1)


def null_row(out: cute.Tensor, begin: Int32, count: Int32, channel: Int32, window: int) -> None:
    """Zeros in a channel of a null row's outputs."""
    for t in range(window):
        store_global_if(at(out, begin + t, channel), narrow_bf16(Float32(0.0)), t, count)


class TokenStore:
    """Where one thread's channel of a row's outputs and records goes, token by token."""

    def __init__(
        self,
        correction: cute.Tensor,
        key_gate: cute.Tensor,
        out: cute.Tensor,
        row: Int32,
        head: Int32,
        begin: Int32,
        count: Int32,
        channel: Int32,
    ) -> None:
        self._u = partial(at, correction, row, head)
        self._record = partial(at, key_gate, row, head)
        self._out = partial(at, out)
        self._begin, self._count, self._channel = begin, count, channel
        self._place = head * K + channel

    def records(self, keys: list[Uint16], gates: list[Uint16]) -> None:
        """Keys and raw gates, bit for bit."""
        for t, (key, gate) in enumerate(zip(keys, gates, strict=True)):
            to = self._record(t, self._channel)
            store_global_if(to, key, t, self._count)
            store_global_if(to + K * 2, gate, t, self._count)

    def result(self, t: int, u: Float32, o: Float32) -> None:
        """A correction and an output."""
        store_global_if(self._u(t, self._channel), u, t, self._count)
        store_global_if(self._out(self._begin + t, self._place), narrow_bf16(o), t, self._count)
