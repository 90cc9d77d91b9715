"""A curve as a picture that looks right on light and dark pages: shapes only, its words are around it."""

from __future__ import annotations

from collections.abc import Sequence

from axon_nb.widgets.palette import OKABE_ITO
from axon_nb.widgets.series import Point

__all__ = ["HEIGHT", "WIDTH", "chart_svg"]

WIDTH, HEIGHT = 300, 70
"""Of the picture, in units."""
_PAD = 3.0
_COLOR = OKABE_ITO["blue"]


def chart_svg(points: Sequence[Point]) -> str:
    """The mean as a line, and what lies between the lowest and the highest rank as a band around it."""
    low, high = (min(p.low for p in points), max(p.high for p in points)) if points else (0.0, 1.0)
    first, last = (points[0].step, points[-1].step) if points else (0.0, 1.0)
    tall, wide = (high - low) or 1.0, (last - first) or 1.0

    def place(step: float, value: float) -> str:
        # Divided first: a difference of two large numbers may be beyond what a float holds.
        y = HEIGHT / 2 if high == low else _PAD + (HEIGHT - 2 * _PAD) * (1 - (value / tall - low / tall))
        return f"{WIDTH * (step - first) / wide:.1f} {y:.1f}"

    upper = [place(p.step, p.high) for p in points]
    lower = [place(p.step, p.low) for p in reversed(points)]
    line = "L".join(place(p.step, p.mean) for p in points)
    band = f'<path d="M{"L".join([*upper, *lower])}z" fill="{_COLOR}" fill-opacity=".3"/>' if points else ""
    dot = f'<circle cx="0" cy="{HEIGHT / 2}" r="2.5" fill="{_COLOR}"/>' if len(points) == 1 else ""
    mean = f'<path d="M{line}" fill="none" stroke="{_COLOR}" stroke-width="1.5"/>' if len(points) > 1 else dot
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'preserveAspectRatio="none"><path d="M0 .5h{WIDTH}M0 {HEIGHT - 0.5}h{WIDTH}" stroke="#767676" '
        f'stroke-width=".5"/>{band}{mean}</svg>'
    )
