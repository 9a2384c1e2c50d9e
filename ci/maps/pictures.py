"""Error maps as pictures, a PNG for each tensor; needs matplotlib, which the extra ``report`` brings."""

import importlib.util
import io
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ci.maps.grades import CHANGED, COPY, FREE, KEPT, MOST_OVER, OVER, RIGHT, UNFIT, UNWRITTEN, graded
from ci.maps.sheets import Table, tables
from ci.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

NEEDED = "no pictures: matplotlib is not installed (pip install -e '.[report]')"
LEAST_LOG, MOST_LOG = -3.0, float(MOST_OVER)
COLOURS = {
    FREE: ("#ffffff", "not compared"),
    KEPT: ("#e6e6e6", "kept"),
    RIGHT: ("#9fc5a0", "right copy"),
    COPY: ("#7a3fa0", "~ other bits"),
    CHANGED: ("#00a5b5", "x changed"),
    UNFIT: ("#000000", "# not finite"),
    UNWRITTEN: ("#ff00c8", "! not written"),
}
"""Of grades that are no number of times the bound."""


def available() -> bool:
    """Whether there is anything to draw with."""
    return importlib.util.find_spec("matplotlib") is not None


def pictures(run: Run) -> Iterator[tuple[str, bytes]]:
    """The name of each tensor with something to show, and its picture."""
    for one in graded(run):
        maps = tables(one, run.call)
        if maps:
            yield one.name, _picture(f"{one.name}, {one.stage}", maps)


def _picture(title: str, maps: list[Table]) -> bytes:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    high = [min(8.0, 1.2 + 0.22 * len(table.lines)) for table in maps]
    figure = Figure(figsize=(9.0, sum(high) + 1.2), layout="constrained")
    figure.suptitle(title)
    places = figure.subplots(len(maps), 1, squeeze=False, height_ratios=high)[:, 0]
    for place, table in zip(places, maps, strict=True):
        drawn = _draw(place, table)
    figure.colorbar(drawn, ax=list(places), label="log10 of error / bound", shrink=0.6)
    handles = [Patch(facecolor=colour, edgecolor="#888888", label=told) for colour, told in COLOURS.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=7)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=100)
    return data.getvalue()


def _draw(place: "Axes", table: Table) -> "AxesImage":
    """One table; returns what a colour bar needs."""
    from matplotlib.colors import ListedColormap, TwoSlopeNorm

    number = (table.grade >= RIGHT) & (table.grade <= OVER + MOST_OVER) & ~table.ratio.isnan()
    logs = table.ratio.log10().nan_to_num(nan=LEAST_LOG, posinf=MOST_LOG, neginf=LEAST_LOG)
    logs = logs.clamp(LEAST_LOG, MOST_LOG)
    codes = list(COLOURS)
    kinds = torch.full(table.grade.shape, math.nan, dtype=torch.float64)
    for i, code in enumerate(codes):
        kinds[(table.grade == code) & ~number] = i
    look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
    plain = ListedColormap([COLOURS[code][0] for code in codes])
    place.imshow(kinds.numpy(), cmap=plain, vmin=-0.5, vmax=len(codes) - 0.5, **look)
    logs[~number] = math.nan
    norm = TwoSlopeNorm(0.0, LEAST_LOG, MOST_LOG)
    drawn = place.imshow(logs.numpy(), cmap="RdYlGn_r", norm=norm, **look)
    each = f", {table.step} in a place" if table.step > 1 else ""
    place.set_title(table.title, fontsize=9)
    place.set_xlabel(f"{table.across}{each}", fontsize=8)
    shown = range(0, len(table.lines), max(1, math.ceil(len(table.lines) / MOST_MARKS)))
    place.set_yticks(list(shown), [table.lines[i] for i in shown], fontsize=7)
    marks = range(0, table.grade.shape[1], max(1, math.ceil(table.grade.shape[1] / MOST_MARKS)))
    place.set_xticks(list(marks), [str(j * table.step) for j in marks], fontsize=7)
    return drawn


MOST_MARKS = 32
"""Labels along an axis."""
