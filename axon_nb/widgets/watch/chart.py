"""A curve as a picture with axes that needs no script: shapes in an SVG, and the labels of its ticks around it.

It looks right on light and dark pages, because its text is the page's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from axon_nb.records.colors import INK
from axon_nb.widgets.html import MUTED, svg_uri
from axon_nb.widgets.watch.series import Point

WIDTH, HEIGHT = 300, 90
"""Of the picture, in units."""
_NUM_TICKS = 4
_ZERO_SHARE = 0.4
"""The axis of plain numbers begins at zero if the lowest value is below this share of the highest."""
_MIN_RELATIVE = 0.02
"""The axis spans at least this share of the highest value, so that noise does not fill it."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The vertical axis, from tick to tick."""

    low: float
    high: float
    ticks: tuple[float, ...]
    """From low to high, evenly spaced."""

    def place(self, value: float) -> float:
        """Return the place of a value: 0 at the bottom, 1 at the top."""
        # Divide first: the difference of two large numbers may overflow.
        length = self.high / 2 - self.low / 2
        return max(0.0, min(1.0, value / 2 / length - self.low / 2 / length))


def value_axis(points: Sequence[Point], kind: str) -> Axis:
    """Return the axis of a curve; that of rates, shares and bytes begins at zero.

    Args:
        points: The curve.
        kind: ``number``, ``rate``, ``share`` or ``bytes``.
    """
    low, high = (min(p.low for p in points), max(p.high for p in points)) if points else (0.0, 1.0)
    if kind == "share" and high > 0.5:
        return _axis(0.0, 1.0, 1.0)
    if kind != "number" or 0 <= low < _ZERO_SHARE * high:
        low = 0.0
    lacking = _MIN_RELATIVE * max(abs(low), abs(high)) - (high - low)
    if lacking > 0:
        low, high = low - lacking / 2, high + lacking / 2
    return _axis(low, high, _binary_unit(high) if kind == "bytes" else 1.0)


def _axis(low: float, high: float, unit: float) -> Axis:
    if not high > low:
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low), low + abs(low))
    step = _round_step(high / unit / 2 - low / unit / 2) * unit
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks)


def _round_step(half_length: float) -> float:
    rough = half_length / _NUM_TICKS * 2
    power = 10.0 ** math.floor(math.log10(rough))
    digit = rough / power
    return (1 if digit < 1.5 else 2 if digit < 3.5 else 5 if digit < 7.5 else 10) * power


def _binary_unit(size: float) -> float:
    return float(1024 ** max(0, int(math.log(max(1.0, size), 1024) + 1e-9)))


def is_stepped(points: Sequence[Point]) -> bool:
    """Whether a value holds for several steps and then changes, as a learning rate that a schedule sets does."""
    changes = sum(before.mean != after.mean for before, after in pairwise(points))
    return len(points) > 3 and 0 < changes <= len(points) / 3


def chart_svg(points: Sequence[Point], axis: Axis, color: str) -> str:
    """Draw the mean as a line, with a band around it from the lowest to the highest rank."""
    first, last = (points[0].step, points[-1].step) if points else (0.0, 1.0)
    length = (last - first) or 1.0
    stepped = is_stepped(points)

    def place(step: float, value: float) -> str:
        return f"{WIDTH * (step - first) / length:.1f} {HEIGHT * (1 - axis.place(value)):.1f}"

    grid = "".join(f"M0 {HEIGHT * (1 - axis.place(tick)):.1f}h{WIDTH}" for tick in axis.ticks)
    band = mean = ""
    if len(points) > 1 and stepped:
        x = [f"{WIDTH * (p.step - first) / length:.1f}" for p in points]
        y = [f"{HEIGHT * (1 - axis.place(p.mean)):.1f}" for p in points]
        line = f"{x[0]} {y[0]}" + "".join(f"H{right}V{down}" for right, down in zip(x[1:], y[1:], strict=True))
    elif len(points) > 1:
        edges = [*(place(p.step, p.high) for p in points), *(place(p.step, p.low) for p in reversed(points))]
        band = f'<path d="M{"L".join(edges)}z" fill="{color}" fill-opacity=".25"/>'
        line = "L".join(place(p.step, p.mean) for p in points)
    if len(points) > 1:
        mean = f'<path d="M{line}" fill="none" stroke="{color}" stroke-width="1.75"/>'
    elif points:
        mean = f'<circle cx="3" cy="{HEIGHT * (1 - axis.place(points[0].mean)):.1f}" r="2.5" fill="{color}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {WIDTH + 2} {HEIGHT + 2}" width="{WIDTH}" '
        f'height="{HEIGHT}" preserveAspectRatio="none"><path d="{grid}" stroke="{INK}" stroke-opacity=".3"/>'
        f"{band}{mean}</svg>"
    )


def chart_html(
    points: Sequence[Point], axis: Axis, color: str, *, alt: str, y_text: Callable[[float], str], x_texts: Sequence[str]
) -> str:
    """Return the picture with its labels.

    Args:
        points: The curve.
        axis: A result of `value_axis`.
        color: Hex RGB.
        alt: What the picture shows, in words.
        y_text: Formats a tick.
        x_texts: Labels at the start and the end of the horizontal axis.
    """
    small = f"font-size:80%;line-height:1;{MUTED}"
    labels = "".join(f"<span>{escape(y_text(tick))}</span>" for tick in reversed(axis.ticks))
    column = f"display:flex;flex-direction:column;justify-content:space-between;text-align:right;{small}"
    ends = "".join(f"<span>{escape(text)}</span>" for text in x_texts)
    return (
        f'<div style="display:flex;gap:6px"><div style="{column};height:{HEIGHT + 10}px;min-width:3em;margin-top:-5px">'
        f'{labels}</div><div style="flex:1"><img alt="{escape(alt)}" title="{escape(alt)}" '
        f'src="{svg_uri(chart_svg(points, axis, color))}" width="{WIDTH}" height="{HEIGHT}" '
        'style="display:block;margin:0;width:100%;max-width:none">'
        f'<div style="display:flex;justify-content:space-between;margin-top:4px;{small}">{ends}</div></div></div>'
    )
