"""A job as pictures, tables and text, which need neither a kernel nor scripts.

A running job in words: what `%watch` says above its pictures, in its tables, and where there are no pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from axon_nb.records.units import format_bytes
from axon_nb.widgets.html import MUTED, cell_style, data_cells, figure, head_cells, note_lines, svg_uri, table_style
from axon_nb.widgets.watch.series import HEIGHT, WIDTH, Point, Series, chart_svg
from axon_nb.widgets.watch.store import MAX_CURVES, JobStore, MergedBar, RankRow

__all__ = [
    "FORMATS",
    "RANK_TITLES",
    "heading",
    "rank_cells",
    "series_words",
    "shown_number",
    "shown_series",
    "watch_bundle",
]


def shown_number(value: float) -> str:
    """Four digits: ``2.306``, ``1.2e-05``, ``12345`` stays whole."""
    if float(value).is_integer() and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


FORMATS: dict[str, tuple[str, Callable[[float], str]]] = {
    "communication": ("share", _share),
    "memory": ("bytes", lambda value: format_bytes(int(value))),
    "steps/s": ("number", lambda value: f"{value:.3g}"),
}
"""How numbers that are measured are shown: the kind, as JavaScript knows it, and a function; others are plain."""


def heading(store: JobStore) -> str:
    """Such as ``4 ranks, In [5] is running: 12.3 steps/s, 394 items/s, 31 % of the time in communication``."""
    count = len(store.rows())
    ranks = f"{count} rank{'' if count == 1 else 's'}"
    state = f"In [{store.cell}] is running" if store.cell else "no cell is running"
    if store.cell == 0:
        state = "a cell is running"
    facts = []
    if store.steps_per_s is not None:
        facts.append(f"{store.steps_per_s:.3g} steps/s")
    if store.items_per_s is not None:
        facts.append(f"{store.items_per_s:.3g} items/s")
    if store.communication is not None:
        facts.append(f"{_share(store.communication)} of the time in communication")
    return f"{ranks}, {state}{': ' if facts else ''}{', '.join(facts)}"


def series_words(series: Series, *, measured: bool) -> str:
    """What a curve shows now, such as ``2.306 at step 120 (2.29 on rank 1 to 2.35 on rank 3)``."""
    now = series.now
    if now is None:
        return "no finite number yet"
    show = FORMATS[series.name][1] if measured else shown_number
    at = "" if measured else f" at step {shown_number(now.step)}"
    return f"{show(now.mean)}{at}{_spread(series, now, show)}"


def _spread(series: Series, now: Point, show: Callable[[float], str]) -> str:
    if show(now.low) == show(now.high):
        return ""
    by_value = {value: rank for rank, (_, value) in sorted(series.latest.items(), reverse=True)}
    return f" ({show(now.low)} on rank {by_value[now.low]} to {show(now.high)} on rank {by_value[now.high]})"


def rank_cells(row: RankRow) -> tuple[str, str, str, str, str]:
    """State, step, steps a second, share of communication and memory of a rank, as the table has them."""
    return (
        row.words,
        "–" if row.step is None else str(row.step),
        "–" if row.steps_per_s is None else f"{row.steps_per_s:.3g}",
        "–" if row.communication is None else _share(row.communication),
        format_bytes(row.memory) if row.memory else "–",
    )


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
