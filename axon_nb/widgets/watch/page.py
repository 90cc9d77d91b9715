"""A job as text, and as a saved page of pictures and tables that needs neither a kernel nor scripts."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from axon_nb.records.colors import KINDS, RANKS
from axon_nb.records.units import format_bytes
from axon_nb.widgets.html import (
    CELL,
    MUTED,
    NUMBER,
    data_cells,
    figure,
    note_lines,
    row_title,
    svg_uri,
    table,
    table_row,
    table_style,
)
from axon_nb.widgets.watch.chart import chart_html, value_axis
from axon_nb.widgets.watch.series import Point, Series
from axon_nb.widgets.watch.store import MAX_CURVES, JobStore, MergedBar, RankRow

RANK_TITLES = ("rank", "activity", "step", "steps/s", "communication", "memory")
"""Columns of the table of ranks."""
_MAX_RANKS = 256
_MEASURED_COLORS = {"steps/s": "forward", "communication": "collective", "memory": "p2p"}


def format_number(value: float) -> str:
    """Format a number with four digits, such as ``2.306`` or ``1.2e-05``; integers such as ``12345`` keep all."""
    if float(value).is_integer() and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def _format_share(value: float) -> str:
    return f"{100 * value:.0f} %"


FORMATS: dict[str, tuple[str, Callable[[float], str]]] = {
    "communication": ("share", _format_share),
    "memory": ("bytes", lambda value: format_bytes(int(value))),
    "steps/s": ("rate", lambda value: f"{value:.3g}"),
}
"""How measured numbers are formatted: the kind, as JavaScript knows it, and a function. Others are plain numbers."""


def heading(store: JobStore) -> str:
    """Return text such as ``4 ranks, In [5] is running: 12.3 steps/s, 31 % of the time in communication``."""
    count = len(store.rows())
    ranks = f"{count} rank{'' if count == 1 else 's'}"
    state = f"In [{store.cell}] is running" if store.cell else "no cell is running"
    if store.cell == 0:
        state = "a cell is running"
    state += f", slowed: {store.slowed}" if store.slowed else ""
    facts = []
    if store.steps_per_s is not None:
        facts.append(f"{store.steps_per_s:.3g} steps/s")
    if store.items_per_s is not None:
        facts.append(f"{store.items_per_s:.3g} items/s")
    if store.communication is not None:
        facts.append(f"{_format_share(store.communication)} of the time in communication")
    return f"{ranks}, {state}{': ' if facts else ''}{', '.join(facts)}"


def context(store: JobStore) -> str:
    """Return text such as ``In [5] · 4 ranks · 394 items/s``."""
    count = len(store.rows())
    parts = [f"In [{store.cell}]" if store.cell else "a cell" if store.cell == 0 else "no cell is running"]
    parts.append(f"{count} rank{'' if count == 1 else 's'}")
    if store.items_per_s is not None:
        parts.append(f"{store.items_per_s:.3g} items/s")
    if store.slowed:
        parts.append(f"slowed: {store.slowed}")
    return " · ".join(parts)


def series_value(series: Series, *, measured: bool) -> tuple[str, str]:
    """Return the mean over ranks now, and its range; that is empty if they agree."""
    now = series.now
    if now is None:
        return "–", ""
    formatted = FORMATS[series.name][1] if measured else format_number
    low, high = formatted(now.low), formatted(now.high)
    return formatted(now.mean), "" if low == high else f"{low} – {high}"


def series_text(series: Series, *, measured: bool) -> str:
    """Describe what a curve shows now, such as ``2.306 at step 120 (2.29 on rank 1 to 2.35 on rank 3)``."""
    now = series.now
    if now is None:
        return "no finite number yet"
    formatted = FORMATS[series.name][1] if measured else format_number
    at = "" if measured else f" at step {format_number(now.step)}"
    return f"{formatted(now.mean)}{at}{_spread(series, now, formatted)}"


def _spread(series: Series, now: Point, formatted: Callable[[float], str]) -> str:
    if formatted(now.low) == formatted(now.high):
        return ""
    by_value = {value: rank for rank, (_, value) in sorted(series.latest.items(), reverse=True)}
    return f" ({formatted(now.low)} on rank {by_value[now.low]} to {formatted(now.high)} on rank {by_value[now.high]})"


def rank_cells(row: RankRow) -> tuple[str, str, str, str, str]:
    """Return a rank's state, step, steps per second, share of communication and memory, as in the table."""
    return (
        row.text,
        "–" if row.step is None else str(row.step),
        "–" if row.steps_per_s is None else f"{row.steps_per_s:.3g}",
        "–" if row.communication is None else _format_share(row.communication),
        format_bytes(row.memory) if row.memory else "–",
    )


def shown_series(store: JobStore) -> list[tuple[Series, bool]]:
    """Return the curves that have points, in order, each with whether it is measured instead of logged."""
    logged = [(series, False) for series in store.metrics.values()][:MAX_CURVES]
    measured = [(series, True) for series in store.vitals.values()]
    return [(series, is_measured) for series, is_measured in (*logged, *measured) if series.latest]


def watch_bundle(store: JobStore) -> dict[str, str]:
    """Return the job as `text/html` and `text/plain`."""
    return {"text/html": _html(store), "text/plain": _text(store)}


def _text(store: JobStore) -> str:
    curves = [f"  {series.name}: {series_text(series, measured=measured)}" for series, measured in shown_series(store)]
    bars = [f"  {bar.desc or 'progress'}: {bar.text}" for bar in store.bars()]
    ranks = []
    for row in store.rows():
        state, step, rate, share, memory = rank_cells(row)
        parts = [state, f"step {step}", f"{rate} steps/s", f"communication {share}", memory]
        ranks.append(f"  rank {row.rank}: " + "; ".join(part for part in parts if "–" not in part))
    return "\n".join([heading(store), *curves, *bars, *ranks, *store.notes()])


def _html(store: JobStore) -> str:
    curves = "".join(
        _curve(series, number, measured=measured) for number, (series, measured) in enumerate(shown_series(store))
    )
    bars = "".join(map(_bar, store.bars()))
    shown = store.rows()[:_MAX_RANKS]
    rows = (
        table_row(row_title(f"rank {row.rank}"), data_cells(cells[:1]), data_cells(cells[1:], NUMBER))
        for row in shown
        for cells in [rank_cells(row)]
    )
    notes = [*store.notes(), *([f"{len(store.rows()) - _MAX_RANKS} more ranks."] if len(shown) == _MAX_RANKS else [])]
    body = (
        f'{table((), [bars]) if bars else ""}<div style="display:flex;flex-wrap:wrap;gap:14px 28px;margin:6px 0">'
        f"{curves}</div>{table(RANK_TITLES, rows, style=table_style(margin='4px 0'))}{note_lines(notes)}"
    )
    return figure(body, heading=heading(store))


def _curve(series: Series, number: int, *, measured: bool) -> str:
    points = series.points()
    text = series_text(series, measured=measured)
    kind, formatted = FORMATS[series.name] if measured else ("number", format_number)
    color = KINDS[_MEASURED_COLORS[series.name]] if measured else RANKS[number % len(RANKS)]
    value, spread = series_value(series, measured=measured)
    unit = "s" if measured else "step"
    ends = [f"{point.step:g} {unit}" if measured else f"{unit} {point.step:g}" for point in points[:1] + points[-1:]]
    alt = f"{series.name}: {text}; {' to '.join(ends)}"
    chart = chart_html(
        points, value_axis(points, kind), color.both, alt=alt, y_text=lambda tick: _tick(tick, formatted), x_texts=ends
    )
    return (
        f'<div style="width:360px"><div style="{MUTED}">{escape(series.name)}</div><div style="margin-bottom:8px">'
        f'<b style="font-size:140%;font-weight:600">{escape(value)}</b> <span style="{MUTED}">{escape(spread)}</span>'
        f"</div>{chart}</div>"
    )


def _tick(value: float, formatted: Callable[[float], str]) -> str:
    return formatted(value) if value else "0"


def _bar(bar: MergedBar) -> str:
    width = 300
    low, high = round(width * bar.low), round(width * bar.high)
    color = KINDS["collective"].both
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 6" width="{width}" height="6">'
        f'<rect width="{width}" height="6" rx="3" fill="#767676" fill-opacity=".25"/><rect width="{high}" height="6" '
        f'rx="3" fill="{color}" fill-opacity=".45"/><rect width="{low}" height="6" rx="3" fill="{color}"/></svg>'
    )
    facts = ", ".join(filter(None, (bar.rate, bar.left, bar.behind)))
    return table_row(
        row_title(escape(bar.desc or "progress")),
        data_cells([bar.count], NUMBER),
        f'<td style="{CELL}"><img alt="{escape(bar.text)}" src="{svg_uri(svg)}" width="{width}" height="6" '
        'style="display:block;margin:0;max-width:none"></td>',
        data_cells([facts]),
    )
