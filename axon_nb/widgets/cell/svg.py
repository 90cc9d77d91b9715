"""SVG pictures that look right on light and dark pages: they have shapes only; text is left to the page around them."""

from __future__ import annotations

from collections.abc import Iterator

from axon_nb.widgets.cell.segments import RankHistory
from axon_nb.widgets.palette import ACTIVITY_CODES, PAINTS, Paint, needs_outline

__all__ = ["WIDTH", "row_svg", "swatch_svg"]

WIDTH = 600
"""Width of a row's picture, in units; nothing shorter than one unit is drawn."""

_HEIGHT = 16
_EDGE = "#767676"

_PATTERNS = {
    "bars": '<path d="M1.5 0v8M5.5 0v8" stroke="#fff" stroke-opacity=".45"/>',
    "hatch": '<path d="M-2 2l4-4M0 8l8-8M6 10l4-4" stroke="#111" stroke-opacity=".65" stroke-width="1.5"/>',
    "cross": '<path d="M0 0l8 8M8 0l-8 8" stroke="#fff" stroke-opacity=".6" stroke-width="1.5"/>',
}


def row_svg(history: RankHistory, end: float) -> str:
    """Draw the strip of one rank from 0 to `end` seconds; `WIDTH` x 16 units, and it may be stretched."""
    shapes: dict[int, list[tuple[int, int]]] = {}
    for left, right, code in _runs(history, end):
        shapes.setdefault(code, []).append((left, right))
    return _svg(WIDTH, [(PAINTS[code], shapes[code]) for code in sorted(shapes)])


def swatch_svg(paint: Paint) -> str:
    """Draw a sample of one paint for a legend, 24 x 16 units."""
    return _svg(24, [(paint, [(0, 24)])])


def _runs(history: RankHistory, end: float) -> Iterator[tuple[int, int, int]]:
    """Yield (left, right, code) of the intervals in which one activity takes most of each unit of the width."""
    if not history.segments or end <= 0:
        return
    shares = [[0.0] * len(PAINTS) for _ in range(WIDTH)]
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


def _svg(width: int, shapes: list[tuple[Paint, list[tuple[int, int]]]]) -> str:
    body = "".join(_shape(paint, spans) for paint, spans in shapes)
    patterns = "".join(
        f'<pattern id="{name}" width="8" height="8" patternUnits="userSpaceOnUse">{lines}</pattern>'
        for name, lines in _PATTERNS.items()
        if f"url(#{name})" in body
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" width="{width}" height="{_HEIGHT}" '
        f'preserveAspectRatio="none">{f"<defs>{patterns}</defs>" if patterns else ""}{body}</svg>'
    )


def _shape(paint: Paint, spans: list[tuple[int, int]]) -> str:
    if paint.pattern == "line":
        path = "".join(f"M{left} 8h{right - left}" for left, right in spans)
        return f'<path d="{path}" stroke="{paint.color}" stroke-width="2"/>'
    if paint.pattern == "hollow":
        path = "".join(f"M{left + 0.5} 4.5h{right - left - 1}v7h-{right - left - 1}z" for left, right in spans)
        return f'<path d="{path}" fill="none" stroke="{paint.color}"/>'
    path = "".join(f"M{left} 2h{right - left}v12h-{right - left}z" for left, right in spans)
    edge = f' stroke="{_EDGE}" stroke-width=".75"' if needs_outline(paint.color) else ""
    plain = f'<path d="{path}" fill="{paint.color}"{edge}/>'
    return plain if paint.pattern == "solid" else f'{plain}<path d="{path}" fill="url(#{paint.pattern})"/>'
