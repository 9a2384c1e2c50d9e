"""Where a case's tensors lie in memory: shapes, strides, offsets and shared pages.

One rule gives every stride: walking the dimensions from the fastest to the slowest,
``stride = (elements spanned by the faster dimensions) + gap``. A dense tensor has no
gaps, a slice of a wider projection has a gap in its token dimension, and a column of a
block table is a vector whose only dimension has a gap. Sizes of one keep their gap, so a
one-element view has the wide stride that a real slice would have.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import torch

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
FLOATS = ("bfloat16", "float16", "float32", "float64")

Fence = Literal["none", "below", "above"]
Strided = Literal["dense", "leading", "inner", "any"]
Role = Literal["token", "slot", "parameter", "index", "output"]


def intern_field(struct: msgspec.Struct, name: str) -> None:
    """Make a text field the one object that equal texts share.

    msgspec leaves a field out of the JSON where it *is* the default, not where it equals it;
    a text that was read from JSON or unpickled would be written again, and a case's bytes, and
    with them its id, would depend on where it comes from.
    """
    msgspec.structs.force_setattr(struct, name, sys.intern(getattr(struct, name)))


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a call: what it is, before anything is said of where it lies.

    ``axes`` names the dimensions for messages. ``strided`` is what the contract lets the
    layout change: nothing, the leading stride, all strides but the innermost (which is 1), or
    any stride and the order of dimensions.
    ``role`` says what makes its elements: the tokens of a row, the slot or record row of a
    row, parameters, the call's own lists (elements that address others), or nothing, as for
    outputs. ``values`` names its table of regimes where that is not the tensor's name, and
    ``like`` a tensor whose trailing strides it must share.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    role: Role
    strided: Strided = "any"
    values: str = ""
    like: str = ""

    @property
    def table(self) -> str:
        """Name of its table of regimes."""
        return self.values or self.name

    @property
    def index(self) -> bool:
        """Whether its elements address others."""
        return self.role == "index"

    @property
    def output(self) -> bool:
        """Whether all of it is poison before the call."""
        return self.role == "output"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tensor's place: storage offset and gaps in elements, dimension order, fence.

    ``gaps`` has one entry a dimension, in the tensor's own dimension order; empty means
    dense. ``order`` lists the dimensions from slowest to fastest; empty means as they
    stand. ``fence`` asks for an inaccessible page right below the first or right above the
    last byte where the device can give one; it overrules ``offset``.
    """

    offset: int = 0
    gaps: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    fence: Fence = "none"

    def __post_init__(self) -> None:
        intern_field(self, "fence")


class Page(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tensors that share one allocation, interleaved along their leading dimension.

    A key/value-cache page holds one slot of several tensors; a fused projection holds one
    token of several activations. ``gaps`` are the bytes of padding before each member
    (rounded up to its alignment) and ``tail`` those after the last one.
    """

    members: tuple[str, ...]
    gaps: tuple[int, ...] = ()
    tail: int = 0
    offset: int = 0
    fence: Fence = "none"

    def __post_init__(self) -> None:
        intern_field(self, "fence")


DENSE = Layout()


def strides(spec: TensorSpec, layout: Layout) -> tuple[int, ...]:
    """Strides in elements, in the tensor's dimension order, by the rule at the top."""
    ndim = len(spec.shape)
    order = layout.order or tuple(range(ndim))
    gaps = layout.gaps or (0,) * ndim
    result, span = [0] * ndim, 1
    for dim in reversed(order):
        result[dim] = span + gaps[dim]
        span += result[dim] * (spec.shape[dim] - 1) if spec.shape[dim] else 0
    return tuple(result)


def extent(shape: tuple[int, ...], strides_: tuple[int, ...]) -> int:
    """Elements from the first to the last one, both included; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides_, strict=True))


class Spot(NamedTuple):
    """Where a tensor starts, in bytes past a multiple of ``GROUND``, and its strides in elements."""

    start: int
    strides: tuple[int, ...]


GROUND = 256
"""Bytes that offset 0 is a multiple of, on every device."""


def placed(
    specs: Mapping[str, TensorSpec], layouts: Mapping[str, Layout], pages: Sequence[Page]
) -> dict[str, Spot]:
    """Every tensor's alignment and strides; an empty tensor has no address and counts as aligned."""
    spots = {}
    for name, spec in specs.items():
        layout = layouts.get(name, DENSE)
        steps = strides(spec, layout)
        start = layout.offset * spec.itemsize
        if layout.fence != "none":  # from the start of a memory page, or up to the end of one
            start = -extent(spec.shape, steps) * spec.itemsize if layout.fence == "above" else 0
        spots[name] = Spot(start, steps)
    for page in pages:
        spots |= _placed_in_page(page, specs, layouts)
    return {
        name: Spot(0 if 0 in specs[name].shape else spot.start % GROUND, spot.strides)
        for name, spot in spots.items()
    }


def _placed_in_page(
    page: Page, specs: Mapping[str, TensorSpec], layouts: Mapping[str, Layout]
) -> dict[str, Spot]:
    starts, pitch = page_parts(page, specs, layouts)
    base = page.offset + -page.offset % max(specs[name].itemsize for name in page.members)
    if page.fence != "none":
        base = -pitch * specs[page.members[0]].shape[0] if page.fence == "above" else 0
    return {
        name: Spot(
            base + start,
            (pitch // specs[name].itemsize, *strides(specs[name], layouts.get(name, DENSE))[1:]),
        )
        for name, start in starts.items()
    }


def page_parts(
    page: Page, specs: Mapping[str, TensorSpec], layouts: Mapping[str, Layout]
) -> tuple[dict[str, int], int]:
    """The byte where each member starts in its page, and the bytes from one page to the next."""
    at, starts = 0, {}
    for name, gap in zip(page.members, page.gaps or (0,) * len(page.members), strict=True):
        spec = specs[name]
        at += gap
        at += -at % spec.itemsize
        starts[name] = at
        at += extent(spec.shape[1:], strides(spec, layouts.get(name, DENSE))[1:]) * spec.itemsize
    at += page.tail
    return starts, at + -at % max(specs[name].itemsize for name in page.members)


def check_layout(spec: TensorSpec, layout: Layout) -> None:
    """Raise ``ValueError`` if ``layout`` asks for what ``spec`` does not allow."""
    ndim = len(spec.shape)
    if layout.gaps and len(layout.gaps) != ndim:
        raise ValueError(f"layout of {spec.name} needs {ndim} gaps; found {len(layout.gaps)}")
    if layout.order and sorted(layout.order) != list(range(ndim)):
        raise ValueError(
            f"layout of {spec.name} needs an order of its {ndim} dimensions; found {layout.order}"
        )
    if min((layout.offset, *layout.gaps)) < 0:
        raise ValueError(f"layout of {spec.name} needs offset and gaps of at least 0; found {layout}")
    still = layout.gaps[-1:] if spec.strided == "inner" else layout.gaps[1:]
    moved = any(still) or layout.order not in ((), tuple(range(ndim)))
    if spec.strided != "any" and moved:
        raise ValueError(f"layout of {spec.name} may not move its trailing dimensions; found {layout}")
    if spec.strided == "dense" and any(layout.gaps):
        raise ValueError(f"layout of {spec.name} must be dense; found {layout}")


def check_alike(specs: dict[str, TensorSpec], layouts: dict[str, Layout]) -> None:
    """Raise ``ValueError`` unless tensors that must share their trailing strides do."""
    for name, spec in specs.items():
        if spec.like:
            model = specs[spec.like]
            found = strides(spec, layouts.get(name, DENSE))[1:]
            if found != strides(model, layouts.get(spec.like, DENSE))[1:]:
                raise ValueError(f"{name} must have the trailing strides of {spec.like}; found {found}")


def check_page(page: Page, specs: dict[str, TensorSpec], layouts: dict[str, Layout]) -> None:
    """Raise ``ValueError`` if ``page`` cannot be laid out."""
    unknown = [name for name in page.members if name not in specs]
    if unknown or len(set(page.members)) != len(page.members) or not page.members:
        raise ValueError(f"a page needs distinct tensors of the call; found {page.members}")
    if page.gaps and len(page.gaps) != len(page.members):
        raise ValueError(f"a page needs one gap a member; found {len(page.gaps)} for {len(page.members)}")
    if min((page.tail, page.offset, *page.gaps)) < 0:
        raise ValueError(f"a page needs gaps, tail and offset of at least 0; found {page}")
    if len({specs[name].shape[0] for name in page.members}) != 1:
        raise ValueError(f"a page needs members of one leading size; found {page.members}")
    for name in page.members:
        layout = layouts.get(name, DENSE)
        if specs[name].strided == "dense":
            raise ValueError(f"{name} must be dense, so it cannot lie in a page")
        if (
            layout.offset
            or layout.fence != "none"
            or any(layout.gaps[:1])
            or layout.order[:1] not in ((), (0,))
        ):
            raise ValueError(f"the page places {name}: its layout may only arrange the inner dimensions")
