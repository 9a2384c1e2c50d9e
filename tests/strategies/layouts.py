"""Strategies over memory: offsets, strides, dimension orders, fences and shared pages."""

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from oracle.layout import DENSE, Fence, Layout, Page, TensorSpec, extent, strides

_WALLS: tuple[Fence, ...] = ("none", "above", "above", "below", "above")
GRAIN = 16
"""Multiples of this many elements keep every divisibility a compiler looks at."""

MOST = 1 << 20
"""Elements from first to last that gaps inside a tensor may spread it over."""


@st.composite
def layouts(draw: st.DrawFn, spec: TensorSpec, *, wall: Fence = "none") -> Layout:
    """A place for one tensor, fenced like its neighbours (``wall``) more often than not.

    Gaps are 0 to 48 elements; index vectors take the widths of block tables. Shrinks
    towards dense and aligned.
    """
    ndim = len(spec.shape)
    gaps, order = [0] * ndim, tuple(range(ndim))
    if spec.strided == "any":
        # One or two dimensions get a gap; all of them at once would only make large tensors.
        for dim in draw(st.lists(st.integers(0, ndim - 1), min_size=1, max_size=2, unique=True)):
            gaps[dim] = draw(STEPS)
        if ndim > 1 and draw(st.integers(0, 3)) == 3:
            order = tuple(draw(st.permutations(range(ndim))))
        if extent(spec.shape, strides(spec, Layout(gaps=tuple(gaps), order=order))) > MOST:
            # A gap inside the fastest dimension multiplies a large tensor; a short one does as well.
            gaps = [min(gap, 1) for gap in gaps]
    elif spec.strided == "leading":
        gaps[0] = draw(STEPS)
    offset = draw(STEPS)
    fence: Fence = draw(st.sampled_from(("none", wall, wall, "above")))
    if order == tuple(range(ndim)):
        order = ()
    return Layout(
        offset=0 if fence != "none" else offset,
        gaps=tuple(gaps) if any(gaps) else (),
        order=order,
        fence=fence,
    )


Pick = Callable[[Sequence[int]], int]


def layout_of_class(pick: Pick, spec: TensorSpec, *, odd: bool, ordered: bool = False) -> Layout:
    """A place that a compiler cannot tell from any other of its class (see ``variants``).

    The class is: every stride that dense memory has plus multiples of 16 elements, and an
    aligned start; or, if ``odd``, a leading stride and a start off every alignment, and for
    tensors of free strides an innermost stride of 2. ``ordered`` turns the inner dimensions
    round where that is allowed.
    """
    ndim = len(spec.shape)
    gaps, offset = [0] * ndim, pick(COARSE)
    if ordered and spec.strided == "any" and ndim > 2:
        return Layout(offset=offset, order=(0, *reversed(range(1, ndim))))
    movable = {"dense": 0, "leading": 1, "any": ndim - 1}[spec.strided]
    for dim in range(movable):
        gaps[dim] = pick(COARSE)
    if odd and spec.strided != "dense":
        offset += 1
        gaps[-1] += ndim > 1 and spec.strided == "any"
        gaps[0] += 1
        if strides(spec, Layout(gaps=tuple(gaps)))[0] % GRAIN == 0:
            gaps[0] += 2
    return Layout(offset=offset, gaps=tuple(gaps) if any(gaps) else ())


COARSE = (0, GRAIN, 2 * GRAIN, 3 * GRAIN)
STEPS = st.one_of(st.sampled_from((0, 1, 3)), st.sampled_from(COARSE), st.integers(1, 40))
Arrangement = tuple[dict[str, Layout], tuple[Page, ...]]


def arrangement_of_class(
    pick: Pick,
    specs: dict[str, TensorSpec],
    *,
    skewed: Sequence[str],
    pageable: Sequence[Sequence[str]],
    ordered: bool = False,
) -> Arrangement:
    """Layouts within the class in which the tensors of ``skewed`` are odd and no others.

    Groups of ``pageable`` whose slots are all multiples of 64 bytes may share a page.
    """
    pages = tuple(
        _page_of_class(pick, [specs[name] for name in group])
        for group in pageable
        if not skewed
        and not ordered
        and group
        and all(_is_coarse(specs[name]) for name in group)
        and pick((0, 1, 2)) == 2
    )
    paged = {name for page in pages for name in page.members}
    chosen = {}
    for name, spec in specs.items():
        if name in paged:
            continue
        odd = name in skewed or name.partition(".")[0] in skewed
        if odd or ordered or pick((0, 1, 2)) == 2:
            layout = layout_of_class(pick, spec, odd=odd, ordered=ordered)
            if layout != DENSE:
                chosen[name] = layout
    return alike(specs, chosen), pages


_COARSE_BYTES = 64
"""16 elements of the widest dtype that slots have."""


def _slot_bytes(spec: TensorSpec) -> int:
    return extent(spec.shape[1:], strides(spec, DENSE)[1:]) * spec.itemsize


def _is_coarse(spec: TensorSpec) -> bool:
    return spec.shape[0] > 0 and _slot_bytes(spec) % _COARSE_BYTES == 0


def _page_of_class(pick: Pick, members: Sequence[TensorSpec]) -> Page:
    """A page that keeps every divisibility of dense slots."""
    gaps = tuple(_COARSE_BYTES * pick((0, 0, 1, 3)) for _ in members)
    return Page(
        members=tuple(spec.name for spec in members),
        gaps=gaps if any(gaps) else (),
        tail=_COARSE_BYTES * pick((0, 1, 2)),
    )


@st.composite
def arrangements_of_class(
    draw: st.DrawFn,
    specs: dict[str, TensorSpec],
    *,
    skewed: Sequence[str],
    pageable: Sequence[Sequence[str]],
    ordered: bool = False,
) -> Arrangement:
    """``arrangement_of_class``, drawn. Shrinks towards dense."""

    def pick(options: Sequence[int]) -> int:
        return int(draw(st.sampled_from(options)))

    return arrangement_of_class(pick, specs, skewed=skewed, pageable=pageable, ordered=ordered)


def alike(specs: dict[str, TensorSpec], chosen: dict[str, Layout]) -> dict[str, Layout]:
    """The layouts with the trailing strides of tensors that must share them taken from their models."""
    result = dict(chosen)
    for name, spec in specs.items():
        if spec.like:
            model, own = chosen.get(spec.like, DENSE), chosen.get(name, DENSE)
            gaps = list(model.gaps or (0,) * len(spec.shape))
            if model.order[:1] in ((), (0,)):
                gaps[0] = own.gaps[0] if own.gaps else 0
            layout = Layout(own.offset, tuple(gaps) if any(gaps) else (), model.order, own.fence)
            result.pop(name, None)
            if layout != DENSE:
                result[name] = layout
    return result


@st.composite
def arrangements(
    draw: st.DrawFn, specs: dict[str, TensorSpec], *, pageable: Sequence[Sequence[str]]
) -> Arrangement:
    """Layouts for some of the tensors, and shared pages for some groups of ``pageable``.

    Either everything is dense, or one tensor is not, or any number; four cases
    in five have nearly all tensors fenced at one end, so that a read past any of them stops
    the process. Shrinks towards dense and unfenced.
    """
    chosen: dict[str, Layout] = {}
    wall: Fence = draw(st.sampled_from(_WALLS))
    flavour = draw(st.sampled_from(("dense", "one", "some", "all", "all")))
    names = list(specs)
    if flavour == "one":
        names = [draw(st.sampled_from(names))]
    elif flavour == "some":
        names = draw(st.lists(st.sampled_from(names), unique=True, max_size=4))
    elif flavour == "dense":
        names = []
    # Index vectors are columns of tables more often than not.
    must = [name for name in specs if specs[name].index and draw(st.booleans())]
    for name in dict.fromkeys([*names, *must]):
        layout = draw(layouts(specs[name], wall=wall))
        if layout != DENSE:
            chosen[name] = layout
    pages = []
    for group in pageable:
        if group and draw(st.integers(0, 3)) == 3:
            page = draw(_pages([name for name in group if name in specs], wall=wall))
            pages.append(page)
            for name in page.members:
                _keep_inside(chosen, name)
    if wall != "none":
        paged = {name for page in pages for name in page.members}
        chosen |= {name: Layout(fence=wall) for name in specs if name not in chosen and name not in paged}
    return alike(specs, chosen), tuple(pages)


def _keep_inside(chosen: dict[str, Layout], name: str) -> None:
    """Leave of a page member's layout what the page does not decide: its inner dimensions."""
    layout = chosen.pop(name, DENSE)
    inner = layout.gaps[1:]
    kept = Layout(
        gaps=(0, *inner) if any(inner) else (), order=layout.order if layout.order[:1] == (0,) else ()
    )
    if kept != DENSE:
        chosen[name] = kept


@st.composite
def _pages(draw: st.DrawFn, members: list[str], *, wall: Fence) -> Page:
    step = st.one_of(st.just(0), st.integers(0, 80))
    gaps = tuple(draw(step) for _ in members)
    fence: Fence = draw(st.sampled_from(("none", wall, wall, "above")))
    return Page(
        members=tuple(draw(st.permutations(members))),
        gaps=gaps if any(gaps) else (),
        tail=draw(step),
        offset=0 if fence != "none" else draw(step),
        fence=fence,
    )


def aligned(
    specs: dict[str, TensorSpec], layouts_: dict[str, Layout], pages: Sequence[Page], names: Sequence[str]
) -> Arrangement:
    """The arrangement with the tensors of ``names`` moved on to multiples of 16 bytes.

    Offsets, leading gaps and the gaps of their pages grow; a fence that cannot be kept goes.
    """
    result = dict(layouts_)
    paged = {name for page in pages for name in page.members}
    for name, layout in layouts_.items():
        spec = specs[name]
        if name.partition(".")[0] not in names or name in paged:
            continue
        grain = _BYTES // spec.itemsize
        gaps = list(layout.gaps or (0,) * len(spec.shape))
        if len(spec.shape) > 1:
            gaps[0] += -strides(spec, layout)[0] % grain
        moved = Layout(
            layout.offset + -layout.offset % grain,
            tuple(gaps) if any(gaps) else (),
            layout.order,
            layout.fence,
        )
        size = extent(spec.shape, strides(spec, moved)) * spec.itemsize
        if moved.fence == "above" and size % _BYTES:
            moved = Layout(moved.offset, moved.gaps, moved.order)
        result[name] = moved
    whole = tuple(
        _page_on_grain(page, specs, layouts_)
        if any(name.partition(".")[0] in names for name in page.members)
        else page
        for page in pages
    )
    return alike(specs, {name: layout for name, layout in result.items() if layout != DENSE}), whole


_BYTES = 16


def _page_on_grain(page: Page, specs: dict[str, TensorSpec], layouts_: dict[str, Layout]) -> Page:
    """The page with every member on a multiple of 16 bytes, and whole multiples of them long."""
    gaps, at = [], 0
    for name, gap in zip(page.members, page.gaps or (0,) * len(page.members), strict=True):
        grown = gap + -(at + gap) % _BYTES
        gaps.append(grown)
        spec = specs[name]
        inner = strides(spec, layouts_.get(name, DENSE))[1:]
        at += grown + extent(spec.shape[1:], inner) * spec.itemsize
    return Page(
        members=page.members,
        gaps=tuple(gaps) if any(gaps) else (),
        tail=page.tail + -(at + page.tail) % _BYTES,
        offset=page.offset + -page.offset % _BYTES,
        fence=page.fence,
    )


@st.composite
def same_binary(
    draw: st.DrawFn, specs: dict[str, TensorSpec], layouts_: dict[str, Layout], pages: Sequence[Page]
) -> dict[str, Layout]:
    """Other layouts that no compiler can tell from ``layouts_``; tensors in pages stay where they are.

    Every stride and offset moves by a multiple of 16 elements, a stride of one stays one, and
    what is dense inside stays so: kernels have paths of their own for that, and two paths may
    differ in the last bit. Shrinks towards the layouts given.
    """
    result = dict(layouts_)
    paged = {name for page in pages for name in page.members}
    tied = {name for spec in specs.values() if spec.like for name in (spec.name, spec.like)}
    movable = [name for name, spec in specs.items() if spec.strided != "dense" and name not in paged]
    for name in draw(st.lists(st.sampled_from(movable), unique=True, min_size=1, max_size=4)):
        spec, old = specs[name], layouts_.get(name, DENSE)
        if old.fence != "none":
            continue
        steps, ndim = strides(spec, old), len(spec.shape)
        gaps = list(old.gaps or (0,) * ndim)
        dense = not any(old.gaps[1:]) and old.order in ((), tuple(range(ndim)))
        inner = spec.strided == "any" and name not in tied and not dense
        outermost = old.order[:1] in ((), (0,))
        for dim in range(ndim if inner else 1 if outermost else 0):
            if steps[dim] != 1:
                gaps[dim] += GRAIN * draw(st.integers(0, 2))
        result[name] = Layout(old.offset + GRAIN * draw(st.integers(0, 2)), tuple(gaps), old.order)
    return result
