"""A job as pictures, tables and text, which need neither a kernel nor scripts."""

from __future__ import annotations

from html import escape

from axon_nb.widgets.chart_svg import HEIGHT, WIDTH, chart_svg
from axon_nb.widgets.html import MUTED, cell_style, data_cells, figure, head_cells, note_lines, svg_uri, table_style
from axon_nb.widgets.job_bars import MergedBar
from axon_nb.widgets.job_store import MAX_CURVES, JobStore
from axon_nb.widgets.job_words import heading, rank_cells, series_words
from axon_nb.widgets.series import Series

__all__ = ["RANK_TITLES", "shown_series", "watch_bundle"]

RANK_TITLES = ("rank", "what it does", "step", "steps/s", "communication", "memory")
"""Columns of the table of ranks."""
_CELL = cell_style(14)
_MAX_RANKS = 256


def shown_series(store: JobStore) -> list[tuple[Series, bool]]:
    """The curves, in order, each with whether it is measured instead of logged; those without a point left out."""
    logged = [(series, False) for series in store.metrics.values()][:MAX_CURVES]
    measured = [(series, True) for series in store.vitals.values()]
    return [(series, is_measured) for series, is_measured in (*logged, *measured) if series.latest]


def watch_bundle(store: JobStore) -> dict[str, str]:
    """`text/html` and `text/plain`."""
    return {"text/html": _html(store), "text/plain": _text(store)}


def _text(store: JobStore) -> str:
    series = [f"  {own.name}: {series_words(own, measured=measured)}" for own, measured in shown_series(store)]
    bars = [f"  {bar.desc or 'progress'}: {bar.words}" for bar in store.bars()]
    ranks = []
    for row in store.rows():
        words, step, pace, share, memory = rank_cells(row)
        told = [words, f"step {step}", f"{pace} steps/s", f"communication {share}", memory]
        ranks.append(f"  rank {row.rank}: " + "; ".join(part for part in told if "–" not in part))
    return "\n".join([heading(store), *series, *bars, *ranks, *store.notes()])


def _html(store: JobStore) -> str:
    curves = "".join(_curve(series, measured=measured) for series, measured in shown_series(store))
    bars = "".join(map(_bar, store.bars()))
    shown = store.rows()[:_MAX_RANKS]
    rows = "".join(
        f'<tr style="background:none"><th scope="row" style="{_CELL};font-weight:normal">{row.rank}</th>'
        f"{data_cells(rank_cells(row), _CELL)}</tr>"
        for row in shown
    )
    notes = [*store.notes(), *([f"{len(store.rows()) - _MAX_RANKS} more ranks."] if len(shown) == _MAX_RANKS else [])]
    body = (
        f'<div style="display:flex;flex-wrap:wrap;gap:10px 24px;margin:6px 0">{curves}</div>{bars}'
        f'<table style="{table_style(margin="4px 0")}"><thead><tr style="background:none">'
        f"{head_cells(RANK_TITLES, _CELL)}</tr></thead><tbody>{rows}</tbody></table>{note_lines(notes)}"
    )
    return figure(body, heading=heading(store))


def _curve(series: Series, *, measured: bool) -> str:
    points = series.points()
    words = series_words(series, measured=measured)
    along = "seconds" if measured else "steps"
    ends = f"{along} {points[0].step:g} to {points[-1].step:g}" if points else ""
    said = escape(f"{series.name}: {words}; {ends}")
    return (
        f'<div style="width:380px"><div><b style="font-weight:600">{escape(series.name)}</b> {escape(words)}</div>'
        f'<img alt="{said}" title="{said}" src="{svg_uri(chart_svg(points))}" width="{WIDTH}" height="{HEIGHT}" '
        f'style="display:block;margin:0;max-width:none"><div style="{MUTED}">{escape(ends)}</div></div>'
    )


def _bar(bar: MergedBar) -> str:
    width = 160
    low, high = round(width * bar.low), round(width * bar.high)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 10" width="{width}" height="10">'
        f'<rect width="{high}" height="10" fill="#0072B2" fill-opacity=".35"/><rect width="{low}" height="10" '
        f'fill="#0072B2"/><rect x=".5" y=".5" width="{width - 1}" height="9" fill="none" stroke="#767676"/></svg>'
    )
    return (
        f'<div style="white-space:nowrap"><img alt="" src="{svg_uri(svg)}" width="{width}" height="10" '
        f'style="display:inline-block;vertical-align:middle;margin:0 8px 0 0">{escape(bar.desc or "progress")}: '
        f"{escape(bar.words)}</div>"
    )
