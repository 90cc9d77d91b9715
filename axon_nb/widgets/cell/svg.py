"""SVG pictures that look right on light and dark pages: they have shapes only; text is left to the page around them."""

from __future__ import annotations

from collections.abc import Iterator

from axon_nb.widgets.cell.segments import RankHistory
from axon_nb.widgets.palette import ACTIVITIES, ACTIVITY_CODES, ActivityPaint

WIDTH = 600
"""Width of a row's picture, in units; nothing shorter than one unit is drawn."""

_HEIGHT = 16


def row_svg(history: RankHistory, end: float) -> str:
    """Draw the strip of one rank from 0 to `end` seconds; `WIDTH` x 16 units, and it may be stretched."""
    shapes: dict[int, list[tuple[int, int]]] = {}
    for left, right, code in _runs(history, end):
        shapes.setdefault(code, []).append((left, right))
    return _svg(WIDTH, [(ACTIVITIES[code], shapes[code]) for code in sorted(shapes)])


def swatch_svg(paint: ActivityPaint) -> str:
    """Draw a sample of one paint for a legend, 24 x 16 units."""
    return _svg(24, [(paint, [(0, 24)])])


def _runs(history: RankHistory, end: float) -> Iterator[tuple[int, int, int]]:
    """Yield (left, right, code) of the intervals in which one activity takes most of each unit of the width."""
    if not history.segments or end <= 0:
        return
    shares = [[0.0] * len(ACTIVITIES) for _ in range(WIDTH)]
    last = history.segments[-1]
    for segment in history.segments:
        code = ACTIVITY_CODES[segment.activity]
        segment_end = history.last_end(end) if segment is last else segment.end
        left, right = (min(seconds / end, 1.0) * WIDTH for seconds in (segment.start, segment_end))
        for x in range(int(left), min(WIDTH, int(right) + 1)):
            shares[x][code] += max(0.0, min(right, x + 1) - max(left, x))
    start, current = 0, -1
    for x, share in enumerate(shares):
        largest = max(share)
        code = share.index(largest) if largest > 0.02 else -1
        if code != current:
            if current >= 0:
                yield start, x, current
            start, current = x, code
    if current >= 0:
        yield start, WIDTH, current


def _svg(width: int, shapes: list[tuple[ActivityPaint, list[tuple[int, int]]]]) -> str:
    body = "".join(_shape(paint, spans) for paint, spans in shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" width="{width}" height="{_HEIGHT}" '
        f'preserveAspectRatio="none">{body}</svg>'
    )


def _shape(paint: ActivityPaint, spans: list[tuple[int, int]]) -> str:
    color = paint.color.both
    middle = "".join(f"M{left} 8h{right - left}" for left, right in spans)
    line = f'<path d="{middle}" stroke="{color}" stroke-width="2"/>'
    if paint.form == "line":
        return line
    if paint.form in ("hollow", "cross"):
        path = "".join(f"M{left + 0.5} 4.5h{right - left - 1}v7h-{right - left - 1}z" for left, right in spans)
        return f'<path d="{path}" fill="none" stroke="{color}"/>{line if paint.form == "cross" else ""}'
    path = "".join(f"M{left} 2h{right - left}v12h-{right - left}z" for left, right in spans)
    if paint.form == "wait":
        foot = "".join(f"M{left} 13h{right - left}" for left, right in spans)
        return (
            f'<path d="{path}" fill="{color}" fill-opacity=".25"/><path d="{foot}" stroke="{color}" stroke-width="2"/>'
        )
    return f'<path d="{path}" fill="{color}"/>'
