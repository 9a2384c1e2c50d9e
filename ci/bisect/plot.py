"""A bisection as a picture: the ratio, or the verdict alone, of every item that was judged."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ci.bisect.rule import Kind

WIDTH, HEIGHT = 900, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 50, 90
_COLOURS: dict[Kind, str] = {"good": "#2a7d3f", "bad": "#c0392b", "skip": "#888888"}
_APART = 16.0
"""Between two names below the axis, at least."""
_SMALLEST, _LARGEST = 1e-6, 1e12
"""Ratios beyond are drawn at these."""


@dataclass(frozen=True)
class Point:
    """One judged item."""

    place: int
    name: str
    kind: Kind
    ratio: float | None
    why: str = ""


def svg(title: str, count: int, points: Sequence[Point], found: Sequence[int], threshold: float = 1.0) -> str:
    """An SVG: places 0 to ``count`` - 1 to the right, ratios upwards; ``found`` is shaded.

    A failure without a ratio stands at the upper edge, a pass without one at the lower, and what
    tells nothing below it.
    """
    area = _Area(count, [p.ratio for p in points if p.ratio is not None and p.kind != "skip"], threshold)
    low, high = min(found, default=0), max(found, default=-1)
    left, right = area.x(low - 0.5), area.x(high + 0.5)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    if found:
        shape = f'x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{area.bottom - _TOP}"'
        parts.append(f'<rect class="found" {shape} fill="#f5d76e" fill-opacity="0.6"/>')
    parts += [*area.axes(), *_legend()]
    parts += [_mark(area, point) for point in points]
    parts += [_name(area, point) for point in _named(area, points, found)]
    return "\n".join([*parts, "</svg>", ""])


class _Area:
    """The plane: a linear axis of places and a logarithmic one of ratios."""

    def __init__(self, count: int, ratios: Sequence[float], threshold: float) -> None:
        self.bottom = HEIGHT - _BOTTOM
        self._count, self._threshold = count, threshold
        logs = [math.log10(_drawn(ratio)) for ratio in (*ratios, threshold)]
        self._low, self._high = math.floor(min(logs)) - 0.3, math.ceil(max(logs)) + 0.3

    def x(self, place: float) -> float:
        inner = WIDTH - _LEFT - _RIGHT
        return _LEFT + inner * (place + 0.5) / self._count

    def y(self, ratio: float) -> float:
        share = (math.log10(_drawn(ratio)) - self._low) / (self._high - self._low)
        return self.bottom - share * (self.bottom - _TOP)

    def axes(self) -> list[str]:
        right = WIDTH - _RIGHT
        frame = f'x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{self.bottom - _TOP}"'
        lines = [f'<rect {frame} fill="none" stroke="#444"/>']
        step = max(1, round((self._high - self._low) / 8))
        for power in range(math.ceil(self._low), math.floor(self._high) + 1, step):
            y = self.y(10.0**power)
            lines.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
        y = self.y(self._threshold)
        dashes = 'stroke="#444" stroke-dasharray="5 4"'
        lines.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" {dashes}/>')
        lines.append(f'<text x="{_LEFT}" y="{_TOP - 8}">largest ratio; dashed: {self._threshold:g}</text>')
        return lines


def _drawn(ratio: float) -> float:
    return _LARGEST if math.isnan(ratio) else min(max(ratio, _SMALLEST), _LARGEST)


def _mark(area: _Area, point: Point) -> str:
    x, colour = area.x(point.place), _COLOURS[point.kind]
    if point.kind == "skip":
        y, shape = area.bottom + 10.0, "cross"
    elif point.ratio is None:
        y, shape = (_TOP + 8.0 if point.kind == "bad" else area.bottom - 8.0), "dot"
    else:
        y, shape = area.y(point.ratio), "dot"
    ratio = "" if point.ratio is None else f", ratio {point.ratio:.3g}"
    told = escape(f"{point.name}: {point.kind}{ratio}" + (f"; {point.why}" if point.why else ""))
    title = f"<title>{told}</title>"
    if shape == "cross":
        path = f"M{x - 4:.1f},{y - 4:.1f} l8,8 m0,-8 l-8,8"
        return f'<path class="skip" d="{path}" stroke="{colour}" stroke-width="2">{title}</path>'
    return f'<circle class="{point.kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}">{title}</circle>'


def _named(area: _Area, points: Sequence[Point], found: Sequence[int]) -> list[Point]:
    """Those whose names have room below the axis: of what was found first, the ends, then the rest."""
    ends = (points[0].place, points[-1].place) if points else ()
    chosen: list[Point] = []
    for point in sorted(points, key=lambda p: (p.place not in found[-1:], p.place not in ends)):
        if all(abs(area.x(point.place) - area.x(other.place)) >= _APART for other in chosen):
            chosen.append(point)
    return chosen


def _name(area: _Area, point: Point) -> str:
    x, y = area.x(point.place), area.bottom + 22
    turned = f'transform="rotate(-35 {x:.1f} {y})" text-anchor="end"'
    name = point.name if len(point.name) <= 12 else point.name[:9]
    return f'<text x="{x:.1f}" y="{y}" {turned}>{escape(name)}</text>'


def _legend() -> list[str]:
    parts = []
    for at, (kind, colour) in enumerate(_COLOURS.items()):
        x = WIDTH - _RIGHT - 190 + 65 * at
        parts.append(f'<circle cx="{x}" cy="{_TOP - 12}" r="4.5" fill="{colour}"/>')
        parts.append(f'<text x="{x + 9}" y="{_TOP - 8}">{kind}</text>')
    return parts
