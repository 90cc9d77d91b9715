"""A timeline as one SVG for papers and slides: rows with names, a time axis, the legend, and what costs most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from axon_nb.cluster.inspection.span_table import SpanTable
from axon_nb.records.colors import INK
from axon_nb.widgets.palette import SPAN_PAINTS
from axon_nb.widgets.timeline.content import MAX_ROWS, format_duration, summarize
from axon_nb.widgets.timeline.svg import rank_svg, swatch_svg

_WIDTH, _LEFT, _ROW, _GAP = 960, 72, 30, 4
_TEXT = "#212529"
_MAX_TICKS = 10


def timeline_svg(table: SpanTable, ranks: Sequence[int], *, title: str) -> str:
    """Return the picture, on white; of more than 64 ranks, the first ones.

    Args:
        table: The spans.
        ranks: Rows, from the top.
        title: What is shown, such as ``In [3]``.
    """
    start = int(table.columns["start"].min()) if len(table) else 0
    seconds = (int(table.columns["end"].max()) - start) / 1e9 if len(table) else 0.0
    shown = list(ranks)[:MAX_ROWS]
    notice = summarize(table).notice
    parts = [_text(f"{title}: {len(ranks)} ranks, {format_duration(seconds)}", 0, 16, weight=600)]
    top = 28
    if notice is not None:
        parts.append(_text(str(notice), 0, 34))
        top = 50
    scale = (_WIDTH - _LEFT) / (seconds or 1.0)
    bottom = top + 14 + len(shown) * (_ROW + _GAP)
    for at in _ticks(seconds):
        x = _LEFT + at * scale
        parts.append(f'<path d="M{x:.1f} {top + 4}V{bottom}" stroke="{INK}" stroke-opacity=".3"/>')
        anchor = "start" if at == 0 else "middle"
        parts.append(_text(format_duration(at) if at else "0", x, top, anchor=anchor, size=10, color=INK))
    for row, rank in enumerate(shown):
        y = top + 14 + row * (_ROW + _GAP)
        drawing = rank_svg(table, rank, start, start + max(1, round(seconds * 1e9)), num_rows=1)
        place = f'<svg x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT}" height="{_ROW}"'
        parts += [_text(f"rank {rank}", 0, y + 15), _nested(drawing, place)]
    parts += _legend(table, bottom + 8)
    height = bottom + 28
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -4 {_WIDTH + 16} {height + 8}" width="{_WIDTH + 16}" '
        f'height="{height + 8}" font-family="Inter, system-ui, sans-serif">'
        f'<rect x="-8" y="-4" width="{_WIDTH + 16}" height="{height + 8}" fill="#FFFFFF"/>{"".join(parts)}</svg>\n'
    )


def round_step(length: float, count: int) -> float:
    """Return a step of 1, 2 or 5 times a power of ten of which at most `count` make up a length above 0."""
    power = 10.0 ** np.floor(np.log10(length / count))
    return float(next(digit * power for digit in (1, 2, 5, 10) if length / (digit * power) <= count))


def _ticks(seconds: float) -> Iterator[float]:
    if seconds > 0:
        step = round_step(seconds, _MAX_TICKS)
        yield from (number * step for number in range(int(seconds / step) + 1))


def _legend(table: SpanTable, top: float) -> Iterator[str]:
    seen = {table.labels[label][0] for label in np.unique(table.columns["label"])}
    seen |= {"other"} if "cell" in seen else set()
    seen |= {"wait"} if (table.columns["late"] > 0).any() else set()
    left = float(_LEFT)
    for paint in SPAN_PAINTS:
        if paint.lane < 0 or paint.kind not in seen:
            continue
        yield _nested(swatch_svg(paint), f'<svg x="{left:g}" y="{top:g}" width="18" height="10"')
        yield _text(paint.label, left + 23, top + 9)
        left += 40 + 6.4 * len(paint.label)


def _nested(svg: str, place: str) -> str:
    """Place a picture within another one."""
    head, _, rest = svg.partition(">")
    box = head[head.index("viewBox") : head.index(" width")]
    return f'{place} {box} preserveAspectRatio="none">{rest}'


def _text(
    text: str, x: float, y: float, *, anchor: str = "start", size: int = 12, weight: int = 400, color: str = _TEXT
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{color}">{escape(text)}</text>'
    )
