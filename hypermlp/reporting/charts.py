"""Charts as SVG text. An element with a ``data-tip`` shows it under the pointer; page.js does that."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

WIDTH, HEIGHT = 480, 320  # units of the drawing, chosen so that text stays readable on a phone
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 40  # margins around the plot
DOT = 5.5  # radius
LINE = 14  # height of a line of text
ROW = 34  # height of one estimate in an interval chart

Scale = Callable[[float], float]
Bounds = tuple[float, float]


class Series(NamedTuple):
    """One curve of a line chart."""

    points: Sequence[tuple[float, float]]
    group: str
    """CSS class. Curves of one group share a colour, ``--group`` in page.css."""
    tip: str


class Point(NamedTuple):
    """One point of a scatter chart."""

    x: float
    y: float
    group: str
    """CSS class, as for Series."""
    tip: str
    name: str = ""
    """Label drawn beside the point; empty for none."""


def line_chart(series: Sequence[Series], *, x: str, y: str, logarithmic: bool = False) -> str:
    """Return an SVG of curves. ``x`` and ``y`` are the titles of the axes; the x axis may be logarithmic."""
    xs, ys = zip(*(point for each in series for point in each.points), strict=True)
    place: Scale = math.log2 if logarithmic else float
    frame, across, down = _frame(_bounds([*map(place, xs)]), _bounds(ys), x, y, logarithmic)

    def curve(each: Series) -> str:
        path = "M" + "L".join(f"{across(place(a)):.1f},{down(b):.1f}" for a, b in each.points)
        # The second path is wide and invisible, so that a thin curve is easy to hit with the pointer.
        paths = [_element("path", kind=kind, d=path) for kind in ("curve", "reach")]
        return _element("g", *paths, kind=f"series {each.group}", tip=each.tip)

    return _svg([*frame, *map(curve, series)], f"{y} against {x}")


def scatter_chart(points: Sequence[Point], *, x: str, y: str) -> str:
    """Return an SVG of points. Outliers are drawn hollow at the edge, so that the others keep their room."""
    x_min, x_max = x_bounds = _bounds(_without_outliers([p.x for p in points]))
    y_min, y_max = y_bounds = _bounds(_without_outliers([p.y for p in points]))
    frame, across, down = _frame(x_bounds, y_bounds, x, y)

    def dot(p: Point) -> str:
        inside = x_min <= p.x <= x_max and y_min <= p.y <= y_max
        kind = f"dot {p.group}{'' if inside else ' outside'}{' named' if p.name else ''}"
        return _element("circle", kind=kind, tip=p.tip, cx=across(p.x), cy=down(p.y), r=DOT)

    named = sorted((p for p in points if p.name), key=lambda p: down(p.y))
    names, lowest = [], -math.inf
    for p in named:
        lowest = max(down(p.y) + 4, lowest + LINE)  # names of neighbours stand below each other
        names.append(_text("name", across(p.x) + 9, lowest, p.name))
    others = (p for p in points if not p.name)
    return _svg([*frame, *map(dot, others), *names, *map(dot, named)], f"{y} against {x}")


def interval_chart(rows: Sequence[tuple[str, float, float, float]], *, x: str, band: float = 0.0) -> str:
    """Return an SVG of estimates with their 95 % intervals, one below the other, and a line at zero.

    ``rows`` holds (name, value, low, high); an infinite interval reaches to the edge. The values within
    ``band`` of zero are shaded.
    """
    finite = [value for _, *numbers in rows for value in numbers if math.isfinite(value)]
    bounds = _bounds([-band, band, *finite])
    across, bottom = _scale(bounds, (12, WIDTH - RIGHT)), ROW * len(rows)
    width = across(band) - across(-band)
    body = [
        _element("rect", kind="band", x=across(-band), width=width, y=0, height=bottom),
        _element("line", kind="zero", x1=across(0), x2=across(0), y1=0, y2=bottom),
    ]
    for index, (name, value, low, high) in enumerate(rows):
        y = ROW * index + 25
        drawn = [
            _element("line", kind="bar", x1=across(low), x2=across(high), y1=y, y2=y),
            _element("circle", kind="dot", cx=across(value), cy=y, r=DOT),
            _text("label", 12, y - 12, name),
        ]
        tip = f"{name}: {value:+.3f}, 95 % interval {low:+.3f} to {high:+.3f}"
        body.append(_element("g", *drawn, kind="interval", tip=tip))
    body += [_text("tick", across(tick), bottom + BOTTOM - 20, f"{tick:g}") for tick in ticks(*bounds)]
    body.append(_text("axis", WIDTH / 2, bottom + BOTTOM - 4, x))
    return _svg(body, x, bottom + BOTTOM)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return about ``about`` round numbers within the bounds, 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def _bounds(values: Sequence[float]) -> Bounds:
    """Return bounds a little wider than the values."""
    low, high = min(values), max(values)
    margin = (high - low or abs(high) or 1.0) * 0.05
    return low - margin, high + margin


def _without_outliers(values: Sequence[float]) -> Sequence[float]:
    """Return the values within three interquartile ranges of the middle half."""
    if len(values) < 4:
        return values
    low, _, high = statistics.quantiles(values)
    reach = 3 * (high - low)
    return [value for value in values if low - reach <= value <= high + reach]


def _scale(bounds: Bounds, place: Bounds) -> Scale:
    """Return the linear map from ``bounds`` to ``place``; values outside go to the nearer end."""
    return lambda value: float(np.interp(value, bounds, place))


def _frame(
    x_bounds: Bounds, y_bounds: Bounds, x: str, y: str, logarithmic: bool = False
) -> tuple[list[str], Scale, Scale]:
    """Return the axes with their ticks and titles, and the scales of x and y.

    The bounds of a logarithmic x axis are logarithms to the base 2.
    """
    bottom, end = HEIGHT - BOTTOM, WIDTH - RIGHT
    across, down = _scale(x_bounds, (LEFT, end)), _scale(y_bounds, (bottom, TOP))
    powers = range(math.ceil(x_bounds[0]), math.floor(x_bounds[1]) + 1) if logarithmic else ()
    widths = [(float(power), f"{2**power:g}") for power in powers]
    widths = widths or [(tick, f"{tick:g}") for tick in ticks(*x_bounds)]
    heights = [(down(tick), f"{tick:g}") for tick in ticks(*y_bounds)]
    drawn = [
        *(_text("tick", across(place), bottom + 16, tick) for place, tick in widths),
        *(_element("line", kind="grid", x1=LEFT, x2=end, y1=height, y2=height) for height, _ in heights),
        *(_text("tick y", LEFT - 6, height + 4, tick) for height, tick in heights),
        _text("axis", (LEFT + end) / 2, HEIGHT - 6, x),
        _text("axis", -(TOP + bottom) / 2, 13, y, transform="rotate(-90)"),
    ]
    return drawn, across, down


def _text(kind: str, x: float, y: float, text: str, **attributes: str) -> str:
    """Return a text element, or nothing for an empty text. page.css aligns it by its class."""
    return _element("text", escape(text), kind=kind, x=x, y=y, **attributes) if text else ""


def _element(tag: str, *content: str, kind: str, tip: str | None = None, **attributes: str | float) -> str:
    """Return an SVG element with the class ``kind``. It can have the keyboard focus if it has a ``tip``."""
    attributes |= {"class": kind} if tip is None else {"class": kind, "tabindex": "0", "data-tip": tip}
    pairs = (
        f'{name}="{escape(value) if isinstance(value, str) else f"{value:.1f}"}"'
        for name, value in attributes.items()
    )
    return f"<{tag} {' '.join(pairs)}>{''.join(content)}</{tag}>"


def _svg(parts: Iterable[str], label: str, height: float = HEIGHT) -> str:
    attributes = {"viewBox": f"0 0 {WIDTH} {height}", "aria-label": label}
    return _element("svg", *parts, kind="chart", role="img", **attributes)
