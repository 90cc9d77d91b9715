"""The table of `%%distributed --branch`: a row per value, with the curves of what `axon_nb.log` reported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from axon_nb.cluster.branches import Branch, Branches
from axon_nb.records.colors import KINDS
from axon_nb.records.units import format_bytes, format_seconds
from axon_nb.widgets.html import CELL, NUMBER, WRAPPED_CELL, data_cells, row_title, svg_uri, table, table_row

_WIDTH, _HEIGHT = 90, 24
_MAX_METRICS = 4
_STATES = {"ok": "finished", "timed_out": "timed out"}


def branches_bundle(branches: Branches) -> dict[str, str]:
    """Return the table as a MIME bundle: `text/html` without scripts, `text/plain`."""
    metrics = branches.metrics[:_MAX_METRICS]
    ranges = {metric: _range([row.curves.get(metric, ()) for row in branches.rows]) for metric in metrics}
    rows = [_row(row, metrics, ranges, is_kept=row.value == branches.kept) for row in branches.rows]
    titles = [branches.name, "", *(title for metric in metrics for title in (metric, "")), "time", "peak memory"]
    frame = branches.to_frame()
    return {"text/html": table(titles, rows), "text/plain": frame.to_string(index=False)}


def _row(row: Branch, metrics: Sequence[str], ranges: dict[str, tuple[float, float]], *, is_kept: bool) -> str:
    state = _STATES.get(row.state, row.state)
    if is_kept:
        state += ", kept"
    error = f"<br>{escape(row.error)}" if row.error else ""
    cells = [row_title(escape(row.value)), f'<td style="{WRAPPED_CELL}">{escape(state)}{error}</td>']
    for metric in metrics:
        last = row.last(metric)
        cells.append(data_cells(["" if last is None else f"{last:.4g}"], NUMBER))
        cells.append(f'<td style="{CELL}">{_sparkline(metric, row.curves.get(metric, ()), ranges[metric])}</td>')
    has_run = row.state != "not run"
    figures = [format_seconds(row.seconds), format_bytes(row.peak_bytes)] if has_run else ["", ""]
    return table_row(*cells, data_cells(figures, NUMBER))


def _range(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[float, float]:
    values = [value for curve in curves for _, value in curve if math.isfinite(value)]
    return (min(values), max(values)) if values else (0.0, 0.0)


def _sparkline(metric: str, curve: Sequence[tuple[int, float]], limits: tuple[float, float]) -> str:
    """Draw a curve; all rows of a metric share their range."""
    finite = [(step, value) for step, value in curve if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high = limits
    first, width = finite[0][0], max(1, finite[-1][0] - finite[0][0])
    points = " ".join(
        f"{1 + (step - first) / width * (_WIDTH - 2):.1f},"
        f"{_HEIGHT - 2 - (value - low) / ((high - low) or 1.0) * (_HEIGHT - 4):.1f}"
        for step, value in finite
    )
    size, color = f'width="{_WIDTH}" height="{_HEIGHT}"', KINDS["forward"].both
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" {size}><polyline points="{points}" '
        f'fill="none" stroke="{color}" stroke-width="2" stroke-linejoin="round"/></svg>'
    )
    what = f"{metric} from {finite[0][1]:.3g} to {finite[-1][1]:.3g}"
    return f'<img alt="{escape(what)}" src="{svg_uri(svg)}" {size} style="margin:0;max-width:none">'
