"""Spans and pipeline steps as SVG that looks right on light and dark pages; text is left to the page around it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from axon_nb.cluster.inspection.span_table import SpanTable
from axon_nb.records.spans import Span
from axon_nb.widgets.palette import BUBBLE, OTHER, SPAN_CODES, SPAN_PAINTS, SpanPaint, needs_outline

__all__ = ["rank_svg", "step_svg", "swatch_svg"]

_WIDTHS = ((8, 600), (24, 360), (1 << 30, 200))
"""(largest number of rows, width of each in units); narrow for many rows, as pictures are saved with the notebook."""
_LANES = ((1.0, 14.0), (16.0, 9.0))
"""Top and height of each lane, in units."""
_HEIGHT = 26
_STEP_ROW = 18
_STEP_WIDTH = 600
_EDGE = "#767676"
_MIN_SHARE = 0.02

_PATTERNS = {
    "rows": '<path d="M0 2h8M0 6h8" stroke="#fff" stroke-opacity=".7"/>',
    "cross": '<path d="M0 0l8 8M8 0l-8 8" stroke="#fff" stroke-opacity=".6" stroke-width="1.2"/>',
    "bars": '<path d="M1.5 0v8M5.5 0v8" stroke="#fff" stroke-opacity=".45"/>',
    "dots": '<path d="M1 2h2M5 6h2" stroke="#111" stroke-opacity=".7" stroke-width="2"/>',
    "hatch": '<path d="M-2 2l4-4M0 8l8-8M6 10l4-4" stroke="#111" stroke-opacity=".65" stroke-width="1.5"/>',
}


def rank_svg(table: SpanTable, rank: int, start_ns: int, end_ns: int, *, num_rows: int) -> str:
    """Draw one rank between two times, its code above communication; 26 units high, and it may be stretched."""
    width = next(width for rows, width in _WIDTHS if num_rows <= rows)
    shapes: dict[int, list[tuple[float, float, float, float]]] = {}
    for lane, shares in enumerate(_shares(table, rank, start_ns, end_ns, width)):
        top, height = _LANES[lane]
        for left, right, code in _runs(shares):
            shapes.setdefault(code, []).append((left, top, right - left, height))
    return _svg(width, _HEIGHT, (_shape(SPAN_PAINTS[code], shapes[code]) for code in sorted(shapes)))


def swatch_svg(paint: SpanPaint) -> str:
    """Draw a sample of one paint for a legend, 24 x 14 units."""
    return _svg(24, 14, [_shape(paint, [(0, 0, 24, 14)])])


def step_svg(spans: Sequence[Span], ranks: Sequence[int], seconds: float) -> str:
    """Draw a pipeline step: a row per rank, microbatches in boxes, bubbles between them; `seconds` is its width."""
    scale = _STEP_WIDTH / (seconds * 1e9)
    origin = min(span.start_ns for span in spans)
    shapes: dict[int, list[tuple[float, float, float, float]]] = {}
    labels = []
    for row, rank in enumerate(ranks):
        rank_spans = sorted((span for span in spans if span.rank == rank), key=lambda span: span.start_ns)
        top, free = row * _STEP_ROW + 1.0, 0.0
        for span in rank_spans:
            left, width = (span.start_ns - origin) * scale, (span.end_ns - span.start_ns) * scale
            if left - free > 1:
                shapes.setdefault(BUBBLE, []).append((free, top, left - free, _STEP_ROW - 2.0))
            shapes.setdefault(SPAN_CODES.get(span.kind, OTHER), []).append((left, top, width, _STEP_ROW - 2.0))
            free = left + width
            if width >= 6 * len(str(span.microbatch)) + 3:
                labels.append(
                    f'<text x="{left + width / 2:.1f}" y="{top + 12:g}" font-size="10" text-anchor="middle" '
                    'fill="#fff" stroke="#222" stroke-width="2.5" paint-order="stroke" font-family="sans-serif">'
                    f"{span.microbatch}</text>"
                )
    body = [_shape(SPAN_PAINTS[code], shapes[code]) for code in sorted(shapes)]
    return _svg(_STEP_WIDTH, len(ranks) * _STEP_ROW, [*body, *labels])


def _shares(
    table: SpanTable, rank: int, start_ns: int, end_ns: int, width: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return each kind's share of each unit of the width, 0 to 1; one array (kinds, width) per lane."""
    columns, codes = table.columns, [SPAN_CODES.get(label[0], OTHER) for label in table.labels]
    lanes = (np.zeros((len(SPAN_PAINTS), width)), np.zeros((len(SPAN_PAINTS), width)))
    scale = width / max(1, end_ns - start_ns)
    kind = np.array(codes, dtype=np.int64)[columns["label"]] if codes else np.zeros(0, dtype=np.int64)
    for code, paint in enumerate(SPAN_PAINTS):
        if paint.lane < 0:
            continue
        selected = (columns["rank"] == rank) & (kind == code)
        left, right = ((columns[name][selected] - start_ns) * scale for name in ("start", "end"))
        ready = left + columns["late"][selected] * scale
        _cover(lanes[paint.lane][code], ready if paint.lane == 1 else left, right)
        if paint.lane == 1:
            _cover(lanes[1][SPAN_CODES["wait"]], left, ready)
    waiting = lanes[0][SPAN_CODES["wait"]]
    # Code that waits does not compute, even within a forward or a backward.
    for code in (SPAN_CODES["forward"], SPAN_CODES["backward"], SPAN_CODES["optimizer"]):
        lanes[0][code] -= np.minimum(lanes[0][code], waiting)
    return lanes


def _cover(shares: npt.NDArray[np.float64], left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> None:
    """Add the share of each unit that the intervals from `left` to `right` cover."""
    width = len(shares)
    left, right = left.clip(0, width), right.clip(0, width)
    steps = np.zeros(width + 2)
    # The area below a point grows by one per unit: its difference from unit to unit is the share.
    for edges, sign in ((left, 1.0), (right, -1.0)):
        unit = edges.astype(np.int64)
        fraction = edges - unit
        np.add.at(steps, unit, sign * (1 - fraction))
        np.add.at(steps, unit + 1, sign * fraction)
    shares += np.cumsum(steps)[:width].clip(0, 1)


def _runs(shares: npt.NDArray[np.float64]) -> Iterable[tuple[int, int, int]]:
    """Yield (left, right, code) of the intervals in which one kind has the largest share."""
    best = np.where(shares.max(axis=0) > _MIN_SHARE, shares.argmax(axis=0), -1)
    edges = [0, *(np.flatnonzero(np.diff(best)) + 1).tolist(), len(best)]
    for left, right in itertools.pairwise(edges):
        if right > left and best[left] >= 0:
            yield left, right, int(best[left])


def _svg(width: int, height: int, body: Iterable[str]) -> str:
    shapes = "".join(body)
    patterns = "".join(
        f'<pattern id="{name}" width="8" height="8" patternUnits="userSpaceOnUse">{lines}</pattern>'
        for name, lines in _PATTERNS.items()
        if f"url(#{name})" in shapes
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'preserveAspectRatio="none">{f"<defs>{patterns}</defs>" if patterns else ""}{shapes}</svg>'
    )


def _shape(paint: SpanPaint, boxes: Sequence[tuple[float, float, float, float]]) -> str:
    path = "".join(f"M{x:.4g} {y:g}h{width:.4g}v{height:g}h-{width:.4g}z" for x, y, width, height in boxes)
    if paint.pattern == "dashed":
        return f'<path d="{path}" fill="none" stroke="{paint.color}" stroke-dasharray="2 2"/>'
    edge = f' stroke="{_EDGE}" stroke-width=".75"' if needs_outline(paint.color) else ""
    plain = f'<path d="{path}" fill="{paint.color}"{edge}/>'
    return f'{plain}<path d="{path}" fill="url(#{paint.pattern})"/>' if paint.pattern in _PATTERNS else plain
