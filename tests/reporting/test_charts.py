"""Charts: what is drawn where."""

import re

import pytest

from hypermlp.reporting.charts import Point, Series, interval_chart, line_chart, scatter_chart, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (2.93, 3.41, [3, 3.1, 3.2, 3.3, 3.4]),
        (0, 600, [0, 200, 400, 600]),
        (-0.3, 0.3, [-0.2, 0, 0.2]),
    ],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def places(svg):
    return [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg)]


def test_a_larger_value_is_higher_and_further_right():
    (x1, y1), (x2, y2) = places(scatter_chart([Point(1, 1, "S", "a"), Point(2, 3, "S", "b")], x="x", y="y"))
    assert x1 < x2
    assert y1 > y2


def test_outliers_are_drawn_at_the_edge():
    points = [Point(i, i, "S", "") for i in range(8)]
    with_outlier = scatter_chart([*points, Point(1e6, 3, "S", "far")], x="x", y="y")
    assert with_outlier.count("outside") == 1
    assert max(x for x, _ in places(with_outlier)[:8]) > 300  # the others still have the room


def test_names_cannot_break_the_page():
    evil = '"><script>alert(1)</script>'
    for svg in (
        line_chart([Series([(0, 0), (1, 1)], evil, evil)], x=evil, y=evil),
        scatter_chart([Point(1, 1, evil, evil)], x=evil, y=evil),
        interval_chart([(evil, 0, -1, 1)], x=evil),
    ):
        assert "<script" not in svg


def test_an_interval_without_end_stays_in_the_picture():
    svg = interval_chart([("a", 0.1, float("-inf"), float("inf"))], x="effect")
    numbers = [float(x) for x in re.findall(r'x[12]="([^"]+)"', svg)]
    assert all(0 <= x <= 480 for x in numbers)
