"""Strategies over memory: offsets, strides, dimension orders, fences and shared pages."""

from collections.abc import Sequence

from hypothesis import strategies as st

from oracle.layout import DENSE, Fence, Layout, Page, TensorSpec, extent, strides

_WALLS: tuple[Fence, ...] = ("none", "above", "above", "below", "above")
GRAIN = 16
"""Multiples of this many elements keep every divisibility a compiler looks at."""

MOST = 1 << 20
"""Elements from first to last that gaps inside a tensor may spread it over."""


@st.composite
def layouts(draw: st.DrawFn, spec: TensorSpec, *, skewed: bool | None = None, wall: Fence = "none") -> Layout:
    """A place for one tensor, fenced like its neighbours (``wall``) more often than not.

    ``skewed=True`` gives odd strides and a start off every alignment, ``False`` multiples
    of 16 elements only, ``None`` either. Gaps are 0 to 48 elements; index vectors take the
    widths of block tables. Shrinks towards dense and aligned.
    """
    steps = _steps(skewed)
    ndim = len(spec.shape)
    gaps, order = [0] * ndim, tuple(range(ndim))
    if spec.strided == "any":
        # One or two dimensions get a gap; all of them at once would only make large tensors.
        for dim in draw(st.lists(st.integers(0, ndim - 1), min_size=1, max_size=2, unique=True)):
            gaps[dim] = draw(steps)
        if ndim > 1 and draw(st.integers(0, 3)) == 3:
            order = tuple(draw(st.permutations(range(ndim))))
        if extent(spec.shape, strides(spec, Layout(gaps=tuple(gaps), order=order))) > MOST:
            # A gap inside the fastest dimension multiplies a large tensor; a short one does as well.
            gaps = [0 if skewed is False else min(gap, 1) for gap in gaps]
    elif spec.strided == "leading":
        gaps[0] = draw(steps)
    offset = draw(steps)
    if skewed and spec.strided != "dense":
        gaps[0] |= 1
        offset |= 1
    fence = draw(st.sampled_from(("none", wall, wall, "above"))) if skewed is not False else "none"
    if order == tuple(range(ndim)):
        order = ()
    return Layout(
        offset=0 if fence != "none" else offset,
        gaps=tuple(gaps) if any(gaps) else (),
        order=order,
        fence=fence,
    )


def _steps(skewed: bool | None) -> st.SearchStrategy[int]:
    coarse = st.sampled_from((0, GRAIN, 2 * GRAIN, 3 * GRAIN))
    if skewed is False:
        return coarse
    return st.one_of(st.sampled_from((0, 1, 3)), coarse, st.integers(1, 40))


@st.composite
def arrangements(
    draw: st.DrawFn,
    specs: dict[str, TensorSpec],
    *,
    pageable: Sequence[Sequence[str]],
    skewed: Sequence[str] | None,
) -> tuple[dict[str, Layout], tuple[Page, ...]]:
    """Layouts for some of the tensors, and shared pages for some groups of ``pageable``.

    Either everything is dense, or one tensor is not, or any number; four cases
    in five have nearly all tensors fenced at one end, so that a read past any of them stops
    the process. Shrinks towards dense and unfenced.
    """
    chosen: dict[str, Layout] = {}
    wall: Fence = draw(st.sampled_from(_WALLS)) if skewed is None else "none"
    flavour = draw(st.sampled_from(("dense", "one", "some", "all", "all")))
    # A dense tensor still has an offset and a fence, which a palette without skew leaves alone.
    names = [name for name in specs if skewed is None or specs[name].strided != "dense"]
    if flavour == "one":
        names = [draw(st.sampled_from(names))]
    elif flavour == "some":
        names = draw(st.lists(st.sampled_from(names), unique=True, max_size=4))
    elif flavour == "dense":
        names = []
    must = [name for name in skewed or () if name in specs]
    if skewed is None:
        # Index vectors are columns of tables more often than not.
        must += [name for name in specs if specs[name].index and draw(st.integers(0, 3)) == 3]
    for name in dict.fromkeys([*names, *must]):
        skew = None if skewed is None else name in skewed
        layout = draw(layouts(specs[name], skewed=skew, wall=wall))
        if layout != DENSE:
            chosen[name] = layout
    pages = []
    for group in pageable:
        # A page moves its members' alignment at will, so a palette without skew has none.
        if skewed in (None, ()) and draw(st.integers(0, 3)) == 3:
            page = draw(
                _pages([name for name in group if name in specs], coarse=skewed is not None, wall=wall)
            )
            pages.append(page)
            for name in page.members:
                _keep_inside(chosen, name)
    if wall != "none":
        paged = {name for page in pages for name in page.members}
        chosen |= {name: Layout(fence=wall) for name in specs if name not in chosen and name not in paged}
    return chosen, tuple(pages)


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
def _pages(draw: st.DrawFn, members: list[str], *, coarse: bool, wall: Fence) -> Page:
    step = st.sampled_from((0, 64, 128, 192)) if coarse else st.one_of(st.just(0), st.integers(0, 80))
    gaps = tuple(draw(step) for _ in members)
    fence = "none" if coarse else draw(st.sampled_from(("none", wall, wall, "above")))
    return Page(
        members=tuple(draw(st.permutations(members))),
        gaps=gaps if any(gaps) else (),
        tail=draw(step),
        offset=0 if fence != "none" else draw(step),
        fence=fence,
    )


@st.composite
def same_binary(
    draw: st.DrawFn, specs: dict[str, TensorSpec], layouts_: dict[str, Layout], pages: Sequence[Page]
) -> dict[str, Layout]:
    """Other layouts that no compiler can tell from ``layouts_``; tensors in pages stay where they are.

    Every stride and offset moves by a multiple of 16 elements, and a stride of one stays
    one. Shrinks towards the layouts given.
    """
    result = dict(layouts_)
    paged = {name for page in pages for name in page.members}
    movable = [name for name, spec in specs.items() if spec.strided != "dense" and name not in paged]
    for name in draw(st.lists(st.sampled_from(movable), unique=True, min_size=1, max_size=4)):
        spec, old = specs[name], layouts_.get(name, DENSE)
        if old.fence != "none":
            continue
        steps, ndim = strides(spec, old), len(spec.shape)
        gaps = list(old.gaps or (0,) * ndim)
        for dim in range(ndim if spec.strided == "any" else 1):
            if steps[dim] != 1:
                gaps[dim] += GRAIN * draw(st.integers(0, 2))
        result[name] = Layout(old.offset + GRAIN * draw(st.integers(0, 2)), tuple(gaps), old.order)
    return result
