"""Spans and pipeline steps as SVG that looks right on light and dark pages; text is left to the page around it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from axon_nb.cluster.inspection.span_table import SpanTable
from axon_nb.records.spans import Span
from axon_nb.widgets.palette import BUBBLE, OTHER, SPAN_CODES, SPAN_PAINTS, SpanPaint, text_color
from axon_nb.widgets.timeline.facts import running_cell
from axon_nb.widgets.timeline.intervals import Intervals, join, subtract, tails, union

_WIDTHS = ((8, 600), (24, 360), (1 << 30, 200))
"""(largest number of rows, width of each in units); narrow for many rows, as pictures are saved with the notebook."""
_LANES = ((1.0, 17.0), (20.0, 9.0))
"""Top and height of each lane, in units."""
_HEIGHT = 30
_STEP_ROW = 18
_STEP_WIDTH = 600
_MIN_SHARE = 0.02
_Box = tuple[float, float, float, float]
"""Left, top, width, height."""
_NONE: Intervals = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def rank_svg(
    table: SpanTable, rank: int, start_ns: int, end_ns: int, *, num_rows: int, running_since: int | None = None
) -> str:
    """Draw one rank between two times, its code above communication; 30 units high, and it may be stretched."""
    width = next(width for rows, width in _WIDTHS if num_rows <= rows)
    shapes: dict[int, list[_Box]] = {}
    scale = width / max(1, end_ns - start_ns)
    for lane, sets in enumerate(_lanes(table, rank, running_since)):
        top, height = _LANES[lane]
        shares = np.zeros((len(SPAN_PAINTS), width))
        for code, (starts, ends) in sets.items():
            _cover(shares[code], (starts - start_ns) * scale, (ends - start_ns) * scale)
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
    shapes: dict[int, list[_Box]] = {}
    labels = []
    for row, rank in enumerate(ranks):
        rank_spans = sorted((span for span in spans if span.rank == rank), key=lambda span: span.start_ns)
        top, free = row * _STEP_ROW + 1.0, 0.0
        for span in rank_spans:
            left, width = (span.start_ns - origin) * scale, max(1.0, (span.end_ns - span.start_ns) * scale - 1)
            if left - free > 1:
                shapes.setdefault(BUBBLE, []).append((free, top, left - free, _STEP_ROW - 2.0))
            shapes.setdefault(SPAN_CODES.get(span.kind, OTHER), []).append((left, top, width, _STEP_ROW - 2.0))
            free = left + width + 1
            if width >= 6 * len(str(span.microbatch)) + 3:
                color = SPAN_PAINTS[SPAN_CODES.get(span.kind, OTHER)].color.both
                labels.append(
                    f'<text x="{left + width / 2:.1f}" y="{top + 12:g}" font-size="10" text-anchor="middle" '
                    f'fill="{text_color(color)}" font-family="sans-serif">{span.microbatch}</text>'
                )
    body = [_shape(SPAN_PAINTS[code], shapes[code]) for code in sorted(shapes)]
    return _svg(_STEP_WIDTH, len(ranks) * _STEP_ROW, [*body, *labels])


def _lanes(table: SpanTable, rank: int, running_since: int | None) -> tuple[dict[int, Intervals], dict[int, Intervals]]:
    """Return what is drawn in each lane, by kind; in one lane no kind covers another."""
    columns, is_own = table.columns, table.columns["rank"] == rank

    def times(*kinds: str) -> Intervals:
        selected = is_own & table.of_kind(*kinds)
        return columns["start"][selected], columns["end"][selected]

    moving = is_own & table.of_kind("collective", "p2p")
    ready = np.minimum(columns["start"] + columns["late"], columns["end"])
    waits = union(join(times("wait"), tails(times("backward"), times("collective", "p2p"))))
    code, taken = {SPAN_CODES["wait"]: waits}, waits
    for kind in ("optimizer", "backward", "forward", "other"):
        code[SPAN_CODES[kind]] = subtract(times(kind), taken)
        taken = join(taken, code[SPAN_CODES[kind]])
    own_code = subtract(join(times("cell"), running_cell(columns["end"][is_own], running_since)), taken)
    code[OTHER] = join(code[OTHER], own_code)
    communication = {
        SPAN_CODES[kind]: (ready[mask], columns["end"][mask])
        for kind in ("collective", "p2p")
        if (mask := is_own & table.of_kind(kind)).any()
    }
    communication[SPAN_CODES["wait"]] = subtract(
        (columns["start"][moving], ready[moving]), join(*communication.values()) if communication else _NONE
    )
    return code, communication


def _cover(shares: npt.NDArray[np.float64], left: npt.NDArray[Any], right: npt.NDArray[Any]) -> None:
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
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'preserveAspectRatio="none">{"".join(body)}</svg>'
    )


def _shape(paint: SpanPaint, boxes: Sequence[_Box]) -> str:
    color = paint.color.both
    path = "".join(f"M{x:.4g} {y:g}h{width:.4g}v{height:g}h-{width:.4g}z" for x, y, width, height in boxes)
    if paint.form == "bubble":
        lines = "".join(f"M{x:.4g} {y + height / 2:g}h{width:.4g}" for x, y, width, height in boxes)
        return f'<path d="{lines}" stroke="{color}" stroke-opacity=".5"/>'
    if paint.form == "wait":
        feet = "".join(f"M{x:.4g} {y + height - 1:g}h{width:.4g}" for x, y, width, height in boxes)
        return (
            f'<path d="{path}" fill="{color}" fill-opacity=".25"/><path d="{feet}" stroke="{color}" stroke-width="2"/>'
        )
    return f'<path d="{path}" fill="{color}"/>'
