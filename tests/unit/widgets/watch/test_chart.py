"""Saved curves: axes that do not exaggerate, and values that step."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from axon_nb.widgets.watch.store import Point
from axon_nb.widgets.watch.view import chart_html, chart_svg, is_stepped, value_axis

GIB = 2**30


def flat(*values: float) -> list[Point]:
    """A curve that is the same on all ranks."""
    return [Point(step, value, value, value) for step, value in enumerate(values)]


@pytest.mark.parametrize(("kind", "values"), [("rate", (6.4, 5.4)), ("share", (0.3, 0.31)), ("bytes", (98.0, 100.0))])
def test_axes_of_rates_shares_and_bytes_begin_at_zero(kind: str, values: tuple[float, ...]) -> None:
    axis = value_axis(flat(*values), kind)
    assert axis.ticks[0] == axis.low == 0
    assert axis.high >= max(values)
    # A fall by a sixth is a sixth of the height, or less.
    assert axis.place(values[0]) - axis.place(values[1]) == pytest.approx((values[0] - values[1]) / axis.high)


def test_memory_that_grows_by_two_percent_does_not_climb() -> None:
    axis = value_axis(flat(61 * GIB, 62.2 * GIB), "bytes")
    assert axis.place(62.2 * GIB) - axis.place(61 * GIB) < 0.03
    assert [tick / GIB for tick in axis.ticks] == [0, 20, 40, 60, 80]


def test_noise_does_not_fill_the_axis() -> None:
    axis = value_axis(flat(1000.0, 1000.1), "number")
    assert axis.place(1000.1) - axis.place(1000.0) < 0.02


def test_ticks_are_round_and_evenly_spaced() -> None:
    axis = value_axis(flat(1.543, 5.821), "number")
    assert axis.ticks == (0, 1, 2, 3, 4, 5, 6)


def test_piecewise_constant_learning_rate_has_no_slopes() -> None:
    points = flat(*[3e-4] * 5, *[1.5e-4] * 5, *[7.5e-5] * 5)
    assert is_stepped(points)
    (line,) = re.findall(r'd="([^"]*)" fill="none"', chart_svg(points, value_axis(points, "number"), "#123456"))
    assert set(re.findall("[A-Za-z]", line)) == {"M", "H", "V"}
    assert not is_stepped(flat(*(1 / (step + 1) for step in range(15))))
    assert not is_stepped(flat(1.0, 1.0, 1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    "points",
    [
        [],
        [Point(3, 1.0, 1.0, 1.0)],
        [Point(0, 0.0, 0.0, 0.0), Point(5, 0.0, 0.0, 0.0)],
        [Point(0, -1e308, 0.0, 1e308), Point(1, 0.0, 1.0, 2.0)],
        [Point(i, i, i + 1, i + 2) for i in range(240)],
        [Point(0, -5.0, -4.0, -3.0), Point(1, -6.0, -5.0, -3.0)],
    ],
)
@pytest.mark.parametrize("kind", ["number", "rate", "share", "bytes"])
def test_any_curve_has_a_picture(points: list[Point], kind: str) -> None:
    axis = value_axis(points, kind)
    svg = chart_svg(points, axis, "#123456")
    assert ET.fromstring(svg).tag.endswith("svg")
    assert "nan" not in svg
    assert "inf" not in svg
    assert len(svg) < 20_000
    html = chart_html(points, axis, "#123456", alt="<loss>", y_text=str, x_texts=["a", "b"])
    assert "&lt;loss&gt;" in html
