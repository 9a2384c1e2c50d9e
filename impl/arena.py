"""The memory a case runs in: every byte is an input, a defined output or poison.

A host image holds all segments one after the other. Tensors are views into it by the
drawn offsets, strides and pages; the rest is poison (a NaN pattern or a large finite one).
After the run the image is read back and compared byte by byte: tensors element-wise by the
judge, everything between them here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from impl.devices.base import Host, Memory, Reserved, Segment
from oracle.case import Case
from oracle.expectation import Stray
from oracle.kept import kept
from oracle.layout import DENSE, DTYPES, Layout, Page, TensorSpec, extent, strides
from oracle.values import Values

RED_ZONE = 256
"""Bytes of poison at either unfenced end of a segment, and the alignment of offset 0."""
_IMAGE_ALIGN = 4096
POISONS = {"nan": (0x7FF8, 0x7), "huge": (0x7B00, 0x7F)}
"""16-bit patterns and the bits of them that vary from place to place, so that dead bytes copied onto
dead bytes show. They are quiet NaNs, or finite and huge, in bf16, fp16, fp32 and fp64 alike."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: segment, byte offset in it, strides in elements."""

    spec: TensorSpec
    segment: int
    offset: int
    strides: tuple[int, ...]

    @property
    @kept
    def extent(self) -> int:
        """Elements from the first to the last."""
        return extent(self.spec.shape, self.strides)


@dataclass(frozen=True)
class Plan:
    """Segments of the image and every tensor's place in them."""

    segments: tuple[Segment, ...]
    places: dict[str, Place]

    @property
    def size(self) -> int:
        """Bytes of the image."""
        return max((s.start + s.size for s in self.segments), default=0)


def plan(case: Case) -> Plan:
    """Lay the case's tensors out; pages first, then every other tensor on its own."""
    specs = case.call.tensors()
    segments: list[Segment] = []
    places: dict[str, Place] = {}
    paged = {name for page in case.pages for name in page.members}
    for page in case.pages:
        _place_page(page, specs, case.layouts, segments, places)
    for name, spec in specs.items():
        if name not in paged:
            layout = case.layouts.get(name, DENSE)
            steps = strides(spec, layout)
            size = extent(spec.shape, steps) * spec.itemsize
            offset = _append(segments, size, layout.offset * spec.itemsize, layout.fence)
            places[name] = Place(spec, len(segments) - 1, offset, steps)
    return Plan(tuple(segments), places)


def _append(segments: list[Segment], size: int, offset: int, fence: str) -> int:
    """Add a segment for ``size`` bytes of data; returns the data's offset in it."""
    below = 0 if fence == "below" else RED_ZONE + (offset if fence == "none" else 0)
    above = 0 if fence == "above" else RED_ZONE
    start = -(-(segments[-1].start + segments[-1].size) // _IMAGE_ALIGN) * _IMAGE_ALIGN if segments else 0
    if fence == "above":
        # The data ends where the segment ends; its alignment follows from its size.
        total = -(-(below + size) // _IMAGE_ALIGN) * _IMAGE_ALIGN
        segments.append(Segment(start, total))
        return total - size
    # Whole pages, so that offset 0 is aligned on every device.
    total = -(-(below + size + above) // _IMAGE_ALIGN) * _IMAGE_ALIGN
    segments.append(Segment(start, total))
    return below


def _place_page(
    page: Page,
    specs: dict[str, TensorSpec],
    layouts: dict[str, Layout],
    segments: list[Segment],
    places: dict[str, Place],
) -> None:
    """Interleave the members: one page per index of their leading dimension."""
    align = max(specs[name].itemsize for name in page.members)
    at, starts, inner = 0, [], []
    for name, gap in zip(page.members, page.gaps or (0,) * len(page.members), strict=True):
        spec = specs[name]
        steps = strides(spec, layouts.get(name, DENSE))
        at = -(-(at + gap) // spec.itemsize) * spec.itemsize
        starts.append(at)
        inner.append(steps)
        at += extent(spec.shape[1:], steps[1:]) * spec.itemsize
    pitch = -(-(at + page.tail) // align) * align
    count = specs[page.members[0]].shape[0]
    base = _append(segments, pitch * count, -(-page.offset // align) * align, page.fence)
    for name, start, steps in zip(page.members, starts, inner, strict=True):
        spec = specs[name]
        places[name] = Place(spec, len(segments) - 1, base + start, (pitch // spec.itemsize, *steps[1:]))


_PERIOD = 65521
"""A prime: no stride of a tensor is a multiple of it."""


@cache
def _pattern(kind: str) -> np.ndarray:
    base, varying = POISONS[kind]
    scattered = np.arange(_PERIOD, dtype=np.uint64) * np.uint64(2654435761) >> np.uint64(11)
    return (base | (scattered & np.uint64(varying))).astype(np.uint16)


def poison(kind: str, size: int) -> np.ndarray:
    """``size`` bytes of poison, a new array."""
    return np.resize(_pattern(kind), (size + 1) // 2).view(np.uint8)[:size]


class Arena:
    """One case's image, its copy on a device, and the comparison afterwards."""

    def __init__(self, case: Case, values: Values, device: Host) -> None:
        self.plan = plan(case)
        self._device = device
        self.before = poison(case.poison, self.plan.size)
        for name, tensor in values.tensors.items():
            place = self.plan.places[name]
            if place.spec.index:
                self._fill_decoys(place, tensor)
            mask, view = values.filled[name], self._in_image(self.before, place)
            if mask.all():
                view.copy_(tensor)
            else:
                view[mask] = tensor[mask]
        self._memory: Memory = device.memory(self.plan.segments)
        if isinstance(self._memory, Reserved):
            self._memory.leave(self._undefined(values))
        self._memory.upload(self.before)
        self.after = self.before

    def _undefined(self, values: Values) -> np.ndarray:
        """The bytes (bool) of tensors that hold nothing before the call."""
        flags = np.zeros(len(self.before), dtype=np.uint8)
        for name, place in self.plan.places.items():
            if name not in values.tensors:
                self._in_image(flags, place).view(_BITS[place.spec.itemsize]).fill_(-1)
        return np.asarray(flags != 0)

    def _fill_decoys(self, place: Place, tensor: torch.Tensor) -> None:
        """Put live indices between a strided index vector's elements: a wrong stride reads a wrong row."""
        if place.extent > 1 and tensor.numel():
            hull = self._flat(self.before, place)
            # Place j holds element j + 1, so that reading as if dense gets no element right.
            hull.copy_(tensor.flatten()[(torch.arange(place.extent) + 1) % tensor.numel()])

    def _flat(self, image: np.ndarray, place: Place) -> torch.Tensor:
        """All elements from the tensor's first to its last, as a 1-D tensor over the image."""
        start = self.plan.segments[place.segment].start + place.offset
        part = image[start : start + place.extent * place.spec.itemsize]
        return torch.from_numpy(part).view(DTYPES[place.spec.dtype])

    def _in_image(self, image: np.ndarray, place: Place) -> torch.Tensor:
        return _strided(self._flat(image, place), place)

    def views(self) -> dict[str, torch.Tensor]:
        """The tensors on the device."""
        result = {}
        for name, place in self.plan.places.items():
            dtype = DTYPES[place.spec.dtype]
            # An empty tensor has no bytes of its own; it starts where its segment does.
            offset, count = (place.offset, place.extent) if place.extent else (0, 1)
            flat = self._memory.view(place.segment, offset, count, dtype)[: place.extent]
            result[name] = _strided(flat, place)
        return result

    def parts(self) -> list[torch.Tensor]:
        """The bytes of every segment on the device."""
        return [self._memory.view(i, 0, s.size, torch.uint8) for i, s in enumerate(self.plan.segments)]

    def restore(self) -> None:
        """Give the device the starting bytes again."""
        self._memory.upload(self.before)

    def finish(self) -> None:
        """Wait for the device and read everything back."""
        self._device.synchronize()
        self.after = np.empty_like(self.before)
        self._memory.download(self.after)

    def dense(self, image: np.ndarray) -> dict[str, torch.Tensor]:
        """Every tensor of an image as a dense CPU tensor."""
        return {
            name: self._in_image(image, place).clone(memory_format=torch.contiguous_format)
            for name, place in self.plan.places.items()
        }

    def strays(self) -> tuple[Stray, ...]:
        """Bytes that changed though they belong to no tensor, one entry a segment."""
        changed = self.before != self.after
        if not changed.any():
            return ()
        for place in self.plan.places.values():
            covered = self._in_image(_as_bytes(changed), place)
            covered.zero_()
        return tuple(
            self._stray_of(i, changed) for i in range(len(self.plan.segments)) if self._part(i, changed).any()
        )

    def difference(self, other: np.ndarray) -> str:
        """The first place where the image that was read back is not ``other``, in words, or nothing."""
        changed = self.after != other
        if not changed.any():
            return ""
        for name, place in self.plan.places.items():
            cells = self._in_image(_as_bytes(changed), place).view(_BITS[place.spec.itemsize]) != 0
            if cells.any():
                index = ", ".join(str(int(i)) for i in cells.nonzero()[0])
                return f"first at {name}[{index}], {int(cells.sum())} of its {cells.numel()} elements"
        return f"{int(changed.sum())} bytes outside every tensor"

    def _part(self, segment: int, changed: np.ndarray) -> np.ndarray:
        s = self.plan.segments[segment]
        return changed[s.start : s.start + s.size]

    def _stray_of(self, segment: int, changed: np.ndarray) -> Stray:
        part = self._part(segment, changed)
        first = int(np.argmax(part))
        tensors: Sequence[Place] = [p for p in self.plan.places.values() if p.segment == segment]
        near = min(tensors, key=lambda p: abs(first - p.offset))
        return Stray(near.spec.name, first - near.offset, int(part.sum()))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_bytes(flags: np.ndarray) -> np.ndarray:
    return flags.view(np.uint8)


def _strided(flat: torch.Tensor, place: Place) -> torch.Tensor:
    return flat.as_strided(place.spec.shape, place.strides)
