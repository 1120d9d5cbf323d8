"""Charts as SVG text. Whatever has a ``tip`` shows it under the pointer or finger; page.js does that."""

import math
import statistics
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 480, 320  # of the drawing; it is scaled to the page, and its text stays readable on a phone
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 40
DOT = 5.5

Scale = Callable[[float], float]


class Series(NamedTuple):
    """A curve."""

    points: Sequence[tuple[float, float]]
    group: str
    """Curves of one group have one colour: ``--group`` in page.css."""
    tip: str


class Point(NamedTuple):
    x: float
    y: float
    group: str
    tip: str
    name: str = ""
    """Written beside it, for those that a reader looks for."""


def line_chart(series: Sequence[Series], *, x: str, y: str) -> str:
    xs = [a for each in series for a, _ in each.points]
    ys = [b for each in series for _, b in each.points]
    frame, across, down = _frame(_bounds(xs), _bounds(ys), x, y)
    body = []
    for each in series:
        path = "M" + "L".join(f"{across(a):.1f},{down(b):.1f}" for a, b in each.points)
        drawn = f'<path class="curve" d="{path}"/><path class="reach" d="{path}"/>'  # the second is wide, unseen, and easy to hit
        body.append(
            f'<g class="series {escape(each.group)}" tabindex="0" data-tip="{escape(each.tip)}">{drawn}</g>'
        )
    return _svg([*frame, *body], f"{y} against {x}")


def scatter_chart(points: Sequence[Point], *, x: str, y: str) -> str:
    """A point far from all others is drawn hollow, at the edge: it would press the others into a corner."""
    x_bounds, y_bounds = (
        _bounds(_without_outliers(values)) for values in ([p.x for p in points], [p.y for p in points])
    )
    frame, across, down = _frame(x_bounds, y_bounds, x, y)
    body, names = [], []
    for p in points:
        a, b = (min(max(value, low), high) for value, (low, high) in ((p.x, x_bounds), (p.y, y_bounds)))
        kind = f"dot {p.group}" + (" outside" if (a, b) != (p.x, p.y) else "")
        where = f'cx="{across(a):.1f}" cy="{down(b):.1f}" r="{DOT}"'
        body.append(f'<circle class="{escape(kind)}" tabindex="0" {where} data-tip="{escape(p.tip)}"/>')
        if p.name:
            names.append(
                f'<text class="name" x="{across(a) + 9:.1f}" y="{down(b) + 4:.1f}">{escape(p.name)}</text>'
            )
    return _svg([*frame, *names, *body], f"{y} against {x}")


def interval_chart(rows: Sequence[tuple[str, float, float, float]], *, x: str, band: float = 0.0) -> str:
    """Named estimates with their intervals, below each other, and a line at zero. Endless intervals reach over the edge.

    ``band``: so far from zero on both sides is shaded.
    """
    finite = [value for _, *numbers in rows for value in numbers if math.isfinite(value)]
    low, high = _bounds([-band, band, *finite])
    height = 34 * len(rows) + BOTTOM
    across = _scale((low, high), (12, WIDTH - RIGHT))
    shaded = (
        f'x="{across(-band):.1f}" width="{across(band) - across(-band):.1f}" y="0" height="{height - BOTTOM}"'
    )
    body = [f'<rect class="band" {shaded}/>'] if band else []
    body += [f'<line class="zero" x1="{across(0):.1f}" x2="{across(0):.1f}" y1="0" y2="{height - BOTTOM}"/>']
    for i, (name, value, begin, end) in enumerate(rows):
        middle = 34 * i + 25
        a, b = (across(min(max(edge, low), high)) for edge in (begin, end))
        tip = f"{name}: {value:+.3f}, 95 % interval {begin:+.3f} to {end:+.3f}"
        body.append(
            f'<g class="interval" tabindex="0" data-tip="{escape(tip)}">'
            f'<line class="bar" x1="{a:.1f}" x2="{b:.1f}" y1="{middle}" y2="{middle}"/>'
            f'<circle class="dot" cx="{across(value):.1f}" cy="{middle}" r="{DOT}"/>'
            f'<text x="12" y="{middle - 12}">{escape(name)}</text></g>'
        )
    for tick in ticks(low, high):
        body.append(
            f'<text class="tick" text-anchor="middle" x="{across(tick):.1f}" y="{height - 20}">{tick:g}</text>'
        )
    body.append(
        f'<text class="axis" text-anchor="middle" x="{WIDTH / 2}" y="{height - 4}">{escape(x)}</text>'
    )
    return _svg(body, x, height)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers within the bounds: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    return [
        round(i * step, 10) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """A little wider than the values."""
    low, high = min(values), max(values)
    margin = (high - low or abs(high) or 1.0) * 0.05
    return low - margin, high + margin


def _without_outliers(values: Sequence[float]) -> list[float]:
    """Those within three times the middle half's width of it."""
    if len(values) < 4:
        return list(values)
    low, _, high = statistics.quantiles(values)
    reach = 3 * (high - low)
    return [value for value in values if low - reach <= value <= high + reach]


def _scale(bounds: tuple[float, float], place: tuple[float, float]) -> Scale:
    (low, high), (begin, end) = bounds, place
    return lambda value: begin + (value - low) / (high - low) * (end - begin)


def _frame(
    x_bounds: tuple[float, float], y_bounds: tuple[float, float], x: str, y: str
) -> tuple[list[str], Scale, Scale]:
    across, down = _scale(x_bounds, (LEFT, WIDTH - RIGHT)), _scale(y_bounds, (HEIGHT - BOTTOM, TOP))
    drawn = []
    for tick in ticks(*x_bounds):
        drawn.append(
            f'<text class="tick" text-anchor="middle" x="{across(tick):.1f}" y="{HEIGHT - BOTTOM + 16}">{tick:g}</text>'
        )
    for tick in ticks(*y_bounds):
        at = f"{down(tick):.1f}"
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        drawn.append(f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{at}" dy="4">{tick:g}</text>')
    drawn.append(
        f'<text class="axis" text-anchor="middle" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">{escape(x)}</text>'
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    drawn.append(
        f'<text class="axis" text-anchor="middle" transform="translate(13 {middle}) rotate(-90)">{escape(y)}</text>'
    )
    return drawn, across, down


def _svg(parts: Sequence[str], label: str, height: float = HEIGHT) -> str:
    return (
        f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {WIDTH} {height}">{"".join(parts)}</svg>'
    )
