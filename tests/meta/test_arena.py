"""The arena lays out what was asked for, keeps every other byte as poison, and misses no change."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from impl.arena import POISONS, RED_ZONE, Arena, poison
from impl.contract import Domain
from impl.devices.base import Segment, T
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.layout import DENSE, DTYPES, Layout, Page, strides
from oracle.stored import same_bits
from oracle.values import build
from tests.strategies.verify import verify_cases

CASES = verify_cases(domain=Domain(head_dims=((5, 3), (1, 2), (4, 4)), windows=(1, 3)), relations=())


class HeapMemory:
    """The segments in plain memory, each an allocation of its own."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.parts = [torch.zeros(segment.size, dtype=torch.uint8) for segment in segments]

    def upload(self, image: np.ndarray) -> None:
        """Set every segment's bytes."""
        for segment, part in zip(self.segments, self.parts, strict=True):
            part.numpy()[:] = image[segment.start : segment.start + segment.size]

    def download(self, image: np.ndarray) -> None:
        """Read every segment's bytes; what lies between them is nobody's."""
        image[:] = 0xAA
        for segment, part in zip(self.segments, self.parts, strict=True):
            image[segment.start : segment.start + segment.size] = part.numpy()

    def view(self, segment: int, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the segment's bytes."""
        return self.parts[segment][offset : offset + count * dtype.itemsize].view(dtype)


class HeapDevice:
    """A device that keeps the last memory it gave out."""

    name = "heap"
    last: HeapMemory

    def memory(self, segments: Sequence[Segment]) -> HeapMemory:
        """New memory for these segments."""
        self.last = HeapMemory(segments)
        return self.last

    def replay(self, run: Callable[[], T], restore: Callable[[], None]) -> T:
        """There are no graphs."""
        return run()

    def synchronize(self) -> None:
        """Nothing to wait for."""


def opened(case: Case) -> tuple[Arena, HeapMemory]:
    device = HeapDevice()
    return Arena(case, build(case), device), device.last


def image_of(view: torch.Tensor, memory: HeapMemory) -> tuple[int, np.ndarray]:
    """Segment of a view and the byte offsets, in it, of every element's first byte."""
    start = view.data_ptr()
    owners = [i for i, p in enumerate(memory.parts) if p.data_ptr() <= start < p.data_ptr() + len(p)]
    offsets = np.full(view.shape, start - memory.parts[owners[0]].data_ptr(), np.int64)
    for dim, (n, step) in enumerate(zip(view.shape, view.stride(), strict=True)):
        shape = [1] * view.ndim
        shape[dim] = n
        offsets += (np.arange(n) * step * view.itemsize).reshape(shape)
    return owners[0], offsets


@given(CASES)
def test_views_have_the_memory_asked_for(case: Case) -> None:
    arena, memory = opened(case)
    specs, views = case.call.tensors(), arena.views()
    paged = {name: page for page in case.pages for name in page.members}
    assert views.keys() == specs.keys()
    for name, spec in specs.items():
        view, layout = views[name], case.layouts.get(name, DENSE)
        assert tuple(view.shape) == spec.shape
        assert view.dtype == DTYPES[spec.dtype]
        wanted = strides(spec, layout)
        if name in paged:
            assert view.stride()[1:] == wanted[1:]
        else:
            assert view.stride() == wanted
        if not view.numel():
            continue
        segment, offsets = image_of(view, memory)
        size = len(memory.parts[segment])
        assert offsets.max() + view.itemsize <= size
        if name not in paged:
            if layout.fence == "below":
                assert offsets.min() == 0
            elif layout.fence == "above":
                assert offsets.max() + view.itemsize == size
            else:
                assert offsets.min() == RED_ZONE + layout.offset * view.itemsize
        if (paged[name].fence if name in paged else layout.fence) != "above":
            assert size - offsets.max() - view.itemsize >= RED_ZONE
    for page in case.pages:
        pitches = {views[name].stride(0) * views[name].itemsize for name in page.members}
        assert len(pitches) == 1


@given(CASES)
def test_no_two_elements_share_a_byte_and_all_others_are_poison(case: Case) -> None:
    arena, memory = opened(case)
    counts = [np.zeros(len(part), np.int32) for part in memory.parts]
    hulls = [np.zeros(len(part), bool) for part in memory.parts]
    for name, view in arena.views().items():
        if view.numel():
            index, offsets = image_of(view, memory)
            for byte in range(view.itemsize):
                np.add.at(counts[index], offsets.flatten() + byte, 1)
            if case.call.tensors()[name].index:
                hulls[index][offsets.min() : offsets.max() + view.itemsize] = True
    empty = poison(case.poison, arena.plan.size)
    for count, hull, part, segment in zip(counts, hulls, memory.parts, memory.segments, strict=True):
        assert count.max(initial=0) <= 1
        dead = (count == 0) & ~hull
        assert (part.numpy()[dead] == empty[segment.start : segment.start + segment.size][dead]).all()


@given(CASES)
def test_inputs_arrive_bit_for_bit_and_dead_cells_are_poison(case: Case) -> None:
    arena, _ = opened(case)
    values, views = build(case), arena.views()
    empty = arena.dense(poison(case.poison, arena.plan.size))
    for name, view in views.items():
        wanted = empty[name]
        if name in values.tensors:
            mask = values.filled[name]
            wanted[mask] = values.tensors[name][mask]
        assert bool(same_bits(view, wanted).all()), name
    arena.finish()
    for image in (arena.before, arena.after):
        for name, tensor in arena.dense(image).items():
            assert tensor.is_contiguous()
            assert bool(same_bits(tensor, views[name]).all()), name
    assert arena.strays() == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_poisons_are_nan_and_huge_in_every_dtype(dtype: torch.dtype) -> None:
    raw = {kind: torch.from_numpy(poison(kind, 1 << 14)).view(dtype) for kind in POISONS}
    assert bool(raw["nan"].isnan().all())
    assert bool(raw["huge"].isfinite().all())
    assert float(raw["huge"].min()) > torch.finfo(dtype).max ** 0.9


@pytest.mark.parametrize("kind", POISONS)
def test_poison_differs_from_place_to_place(kind: str) -> None:
    words = poison(kind, 1 << 16).view(np.uint16)
    varieties = len(np.unique(words))
    assert varieties == POISONS[kind][1] + 1
    for step in (1, 2, 3, 16, 64, 128, 2048):
        assert (words[step:] == words[:-step]).mean() < 2 / varieties + 0.05


@given(CASES)
def test_decoys_between_strided_indices_are_live(case: Case) -> None:
    arena, memory = opened(case)
    for name in ("query_start_loc", "state_indices"):
        view = arena.views()[name]
        if not view.numel():
            continue
        segment, offsets = image_of(view, memory)
        hull = memory.parts[segment][offsets.min() : offsets.max() + view.itemsize].view(view.dtype)
        assert torch.isin(hull, view).all()
        assert torch.equal(hull[:: view.stride(0)][: len(view)], view)
        if view.stride(0) >= len(view) > 1:
            # Read as if dense, no element but the first is the right one where all differ.
            right = hull[: len(view)] == view
            assert int(right.sum()) == 1 or len(view.unique()) < len(view)


@pytest.mark.parametrize("rows", range(2, 10))
def test_a_strided_index_vector_read_as_dense_is_wrong_everywhere(rows: int) -> None:
    call = Verify(
        heads=1,
        key_dim=1,
        value_dim=1,
        window=1,
        pool=rows + 1,
        qlens=(1,) * rows,
        slots=tuple(range(1, rows + 1)),
        ids=tuple(range(rows)),
        capacity=rows,
    )
    gap = Layout(gaps=(rows + 1,))
    arena, memory = opened(Case(call=call, layouts={"query_start_loc": gap, "state_indices": gap}))
    for name in ("query_start_loc", "state_indices"):
        view = arena.views()[name]
        segment, offsets = image_of(view, memory)
        dense = memory.parts[segment][int(offsets[0]) :].view(view.dtype)[: len(view)]
        assert (dense == view).nonzero().flatten().tolist() == [0]


def small_case(**changes: Any) -> Case:
    call = Verify(
        heads=1,
        key_dim=2,
        value_dim=1,
        window=2,
        pool=3,
        qlens=(1, 2),
        slots=(2, 0),
        ids=(0, 1),
        capacity=3,
        tail=1,
        activation="bfloat16",
        slots_dtype="int64",
    )
    return Case(call=call, seed=3, **changes)


LAID_OUT = small_case(
    layouts={
        "v": Layout(gaps=(3, 0, 0), offset=1),
        "correction": Layout(gaps=(1, 0, 2, 1), order=(0, 2, 1, 3)),
        "state_indices": Layout(gaps=(2,), offset=3),
        "out": Layout(fence="above"),
        "A_log": Layout(fence="below"),
    },
    pages=(Page(("q", "k", "raw_g"), gaps=(2, 0, 3), tail=5, offset=6), Page(("state",), tail=4)),
)


def test_every_flipped_byte_is_reported() -> None:
    case = LAID_OUT
    arena, memory = opened(case)
    before = arena.dense(arena.before)
    owner = owners(case, arena, memory)
    arena.finish()
    unnamed = 0
    for index, segment in enumerate(memory.segments):
        for at in range(segment.size):
            place = segment.start + at
            arena.after[place] ^= 0x41
            strays, name = arena.strays(), owner[index][at]
            if name:
                assert strays == ()
                after = arena.dense(arena.after)[name]
                assert not bool(same_bits(after, before[name]).all()), (index, at)
            else:
                (stray,) = strays
                home = arena.plan.places[stray.near]
                assert stray.count == 1
                assert (home.segment, home.offset + stray.offset) == (index, at)
                unnamed += 1
            arena.after[place] ^= 0x41
    assert unnamed == sum(name is None for names in owner for name in names)


def owners(case: Case, arena: Arena, memory: HeapMemory) -> list[list[str | None]]:
    """Per segment and byte, the tensor whose element holds it."""
    result: list[list[str | None]] = [[None] * len(part) for part in memory.parts]
    for name, view in arena.views().items():
        segment, offsets = image_of(view, memory)
        for first in offsets.flatten():
            for byte in range(view.itemsize):
                result[segment][int(first) + byte] = name
    return result
