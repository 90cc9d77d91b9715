"""`%watch`: one panel for a running job, live while cells run.

The saved page has text, curves and tables, which need neither a kernel nor scripts and look right on light and dark
pages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from msgspec import Struct, to_builtins

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.inspection.status import JobSnapshot, request_job
from axon_nb.records.colors import INK, KINDS, RANKS
from axon_nb.records.units import format_bytes, format_seconds
from axon_nb.widgets import html
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.panel import LivePanel, LiveView
from axon_nb.widgets.watch import store as job_store

WIDTH, HEIGHT = 300, 90
"""Of the picture, in units."""
_NUM_TICKS = 4
_ZERO_SHARE = 0.4
"""The axis of plain numbers begins at zero if the lowest value is below this share of the highest."""
_MIN_RELATIVE = 0.02
"""The axis spans at least this share of the highest value, so that noise does not fill it."""
RANK_TITLES = ("rank", "activity", "step", "steps/s", "communication", "memory")
"""Columns of the table of ranks."""
_MAX_PAGE_RANKS = 256
_MEASURED_COLORS = {"steps/s": "forward", "communication": "collective", "memory": "p2p"}
_MAX_LIVE_RANKS = 64
_MIN_INTERVAL_S = 2.0
_MAX_REQUESTS = 8


class Axis(Struct, frozen=True):
    """The vertical axis, from tick to tick."""

    low: float
    high: float
    ticks: tuple[float, ...]
    """From low to high, evenly spaced."""

    def place(self, value: float) -> float:
        """Return the place of a value: 0 at the bottom, 1 at the top."""
        # Divide first: the difference of two large numbers may overflow.
        length = self.high / 2 - self.low / 2
        return max(0.0, min(1.0, value / 2 / length - self.low / 2 / length))


def value_axis(points: Sequence[job_store.Point], kind: str) -> Axis:
    """Return the axis of a curve; that of rates, shares and bytes begins at zero.

    Args:
        points: The curve.
        kind: ``number``, ``rate``, ``share`` or ``bytes``.
    """
    low, high = (min(p.low for p in points), max(p.high for p in points)) if points else (0.0, 1.0)
    if kind == "share" and high > 0.5:
        return _axis(0.0, 1.0, 1.0)
    if kind != "number" or 0 <= low < _ZERO_SHARE * high:
        low = 0.0
    lacking = _MIN_RELATIVE * max(abs(low), abs(high)) - (high - low)
    if lacking > 0:
        low, high = low - lacking / 2, high + lacking / 2
    return _axis(low, high, _binary_unit(high) if kind == "bytes" else 1.0)


def _axis(low: float, high: float, unit: float) -> Axis:
    if not high > low:
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low), low + abs(low))
    step = _round_step(high / unit / 2 - low / unit / 2) * unit
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks)


def _round_step(half_length: float) -> float:
    rough = half_length / _NUM_TICKS * 2
    power = 10.0 ** math.floor(math.log10(rough))
    digit = rough / power
    return (1 if digit < 1.5 else 2 if digit < 3.5 else 5 if digit < 7.5 else 10) * power


def _binary_unit(size: float) -> float:
    return float(1024 ** max(0, int(math.log(max(1.0, size), 1024) + 1e-9)))


def is_stepped(points: Sequence[job_store.Point]) -> bool:
    """Whether a value holds for several steps and then changes, as a learning rate that a schedule sets does."""
    changes = sum(before.mean != after.mean for before, after in pairwise(points))
    return len(points) > 3 and 0 < changes <= len(points) / 3


def chart_svg(
    points: Sequence[job_store.Point], axis: Axis, color: str, earlier: Sequence[Sequence[job_store.Point]] = ()
) -> str:
    """Draw the mean as a line, with a band around it from the lowest to the highest rank, and earlier lines pale."""
    first, last = _ends([points, *earlier])
    length = (last - first) or 1.0
    stepped = is_stepped(points)

    def place(step: float, value: float) -> str:
        return f"{WIDTH * (step - first) / length:.1f} {HEIGHT * (1 - axis.place(value)):.1f}"

    grid = "".join(f"M0 {HEIGHT * (1 - axis.place(tick)):.1f}h{WIDTH}" for tick in axis.ticks)
    band = mean = ""
    pale = "".join(
        f'<path d="M{"L".join(place(p.step, p.mean) for p in line)}" fill="none" stroke="{color}" '
        'stroke-opacity=".45" stroke-width="1.25"/>'
        for line in earlier
    )
    if pale and points:
        start = place(points[0].step, axis.low).split()[0]
        pale += f'<path d="M{start} 0v{HEIGHT}" stroke="{INK}" stroke-opacity=".6" stroke-dasharray="3 3"/>'
    if len(points) > 1 and stepped:
        x = [f"{WIDTH * (p.step - first) / length:.1f}" for p in points]
        y = [f"{HEIGHT * (1 - axis.place(p.mean)):.1f}" for p in points]
        line = f"{x[0]} {y[0]}" + "".join(f"H{right}V{down}" for right, down in zip(x[1:], y[1:], strict=True))
    elif len(points) > 1:
        edges = [*(place(p.step, p.high) for p in points), *(place(p.step, p.low) for p in reversed(points))]
        band = f'<path d="M{"L".join(edges)}z" fill="{color}" fill-opacity=".25"/>'
        line = "L".join(place(p.step, p.mean) for p in points)
    if len(points) > 1:
        mean = f'<path d="M{line}" fill="none" stroke="{color}" stroke-width="1.75"/>'
    elif points:
        left, top = place(points[0].step, points[0].mean).split()
        mean = f'<circle cx="{max(3.0, float(left))}" cy="{top}" r="2.5" fill="{color}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {WIDTH + 2} {HEIGHT + 2}" width="{WIDTH}" '
        f'height="{HEIGHT}" preserveAspectRatio="none"><path d="{grid}" stroke="{INK}" stroke-opacity=".3"/>'
        f"{pale}{band}{mean}</svg>"
    )


def _ends(lines: Sequence[Sequence[job_store.Point]]) -> tuple[float, float]:
    steps = [end.step for line in lines for end in (*line[:1], *line[-1:])]
    return (min(steps), max(steps)) if steps else (0.0, 1.0)


def chart_html(
    points: Sequence[job_store.Point],
    axis: Axis,
    color: str,
    *,
    alt: str,
    y_text: Callable[[float], str],
    x_texts: Sequence[str],
    earlier: Sequence[Sequence[job_store.Point]] = (),
) -> str:
    """Return the picture with its labels.

    Args:
        points: The curve.
        earlier: Those of earlier cells.
        axis: A result of `value_axis`.
        color: Hex RGB.
        alt: What the picture shows, in words.
        y_text: Formats a tick.
        x_texts: Labels at the start and the end of the horizontal axis.
    """
    small = f"font-size:80%;line-height:1;{html.MUTED}"
    labels = "".join(f"<span>{escape(y_text(tick))}</span>" for tick in reversed(axis.ticks))
    column = f"display:flex;flex-direction:column;justify-content:space-between;text-align:right;{small}"
    ends = "".join(f"<span>{escape(text)}</span>" for text in x_texts)
    return (
        f'<div style="display:flex;gap:6px"><div style="{column};height:{HEIGHT + 10}px;min-width:3em;margin-top:-5px">'
        f'{labels}</div><div style="flex:1"><img alt="{escape(alt)}" title="{escape(alt)}" '
        f'src="{html.svg_uri(chart_svg(points, axis, color, earlier))}" width="{WIDTH}" height="{HEIGHT}" '
        'style="display:block;margin:0;width:100%;max-width:none">'
        f'<div style="display:flex;justify-content:space-between;margin-top:4px;{small}">{ends}</div></div></div>'
    )


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
    "steps/s": ("rate", job_store.format_rate),
}
"""How measured numbers are formatted: the kind, as JavaScript knows it, and a function. Others are plain numbers."""


def heading(store: job_store.JobStore) -> str:
    """Return text such as ``4 ranks, In [5] is running: 12.3 steps/s, 31 % of the time in communication``."""
    count = len(store.rows())
    ranks = f"{count} rank{'' if count == 1 else 's'}"
    after = f" after {format_seconds(store.cell_seconds)}" if store.cell_seconds else ""
    ended = f"In [{store.last_cell}] has ended{after}" if store.last_cell else "no cell is running"
    state = f"In [{store.cell}] is running" if store.cell else ended
    if store.cell == 0:
        state = "a cell is running"
    state += f", slowed: {store.slowed}" if store.slowed else ""
    facts = []
    if store.steps_per_s is not None:
        facts.append(f"{job_store.format_rate(store.steps_per_s)} steps/s")
    if store.items_per_s is not None:
        facts.append(f"{job_store.format_rate(store.items_per_s)} items/s")
    if store.communication is not None:
        facts.append(f"{_format_share(store.communication)} of the time in communication")
    return f"{ranks}, {state}{': ' if facts else ''}{', '.join(facts)}"


def context(store: job_store.JobStore) -> str:
    """Return text such as ``In [5] · 4 ranks · 394 items/s``."""
    count = len(store.rows())
    ended = f"In [{store.last_cell}] has ended" if store.last_cell else "no cell is running"
    parts = [f"In [{store.cell}]" if store.cell else "a cell" if store.cell == 0 else ended]
    parts.append(f"{count} rank{'' if count == 1 else 's'}")
    if store.items_per_s is not None:
        parts.append(f"{job_store.format_rate(store.items_per_s)} items/s")
    if store.slowed:
        parts.append(f"slowed: {store.slowed}")
    return " · ".join(parts)


def series_value(series: job_store.Series, *, measured: bool) -> tuple[str, str]:
    """Return the mean over ranks now, and its range; that is empty if they agree."""
    now = series.now
    if now is None:
        return "–", ""
    formatted = FORMATS[series.name][1] if measured else format_number
    low, high = formatted(now.low), formatted(now.high)
    return formatted(now.mean), "" if low == high else f"ranks {low} – {high}"


def series_text(series: job_store.Series, *, measured: bool) -> str:
    """Describe what a curve shows now, such as ``2.306 at step 120 (2.29 on rank 1 to 2.35 on rank 3)``."""
    now = series.now
    if now is None:
        return "no finite number yet"
    formatted = FORMATS[series.name][1] if measured else format_number
    at = "" if measured else f" at step {format_number(now.step)}"
    return f"{formatted(now.mean)}{at}{_spread(series, now, formatted)}"


def _spread(series: job_store.Series, now: job_store.Point, formatted: Callable[[float], str]) -> str:
    if formatted(now.low) == formatted(now.high):
        return ""
    by_value = {value: rank for rank, (_, value) in sorted(series.latest.items(), reverse=True)}
    return f" ({formatted(now.low)} on rank {by_value[now.low]} to {formatted(now.high)} on rank {by_value[now.high]})"


def rank_cells(row: job_store.RankRow) -> tuple[str, str, str, str, str]:
    """Return a rank's state, step, steps per second, share of communication and memory, as in the table."""
    return (
        row.text,
        "–" if row.step is None else str(row.step),
        "–" if row.steps_per_s is None else job_store.format_rate(row.steps_per_s),
        "–" if row.communication is None else _format_share(row.communication),
        format_bytes(row.memory) if row.memory else "–",
    )


def shown_series(store: job_store.JobStore) -> list[tuple[job_store.Series, bool]]:
    """Return the curves that have points, in order, each with whether it is measured instead of logged."""
    logged = [(series, False) for series in store.metrics.values()][: job_store.MAX_CURVES]
    measured = [(series, True) for series in store.vitals.values()]
    return [(series, is_measured) for series, is_measured in (*logged, *measured) if series.latest]


def watch_bundle(store: job_store.JobStore) -> dict[str, str]:
    """Return the job as `text/html` and `text/plain`."""
    return {"text/html": _page_html(store), "text/plain": _page_text(store)}


def _page_text(store: job_store.JobStore) -> str:
    curves = [f"  {series.name}: {series_text(series, measured=measured)}" for series, measured in shown_series(store)]
    bars = [f"  {bar.desc or 'progress'}: {bar.text}" for bar in store.bars()]
    ranks = []
    for row in store.rows():
        state, step, rate, share, memory = rank_cells(row)
        parts = [state, f"step {step}", f"{rate} steps/s", f"communication {share}", memory]
        ranks.append(f"  rank {row.rank}: " + "; ".join(part for part in parts if "–" not in part))
    return "\n".join([heading(store), *curves, *bars, *ranks, *store.notes()])


def _page_html(store: job_store.JobStore) -> str:
    curves = "".join(
        _curve(series, number, store, measured=measured)
        for number, (series, measured) in enumerate(shown_series(store))
    )
    bars = "".join(map(_bar, store.bars()))
    shown = store.rows()[:_MAX_PAGE_RANKS]
    rows = (
        html.table_row(
            html.row_title(f"rank {row.rank}"), html.data_cells(cells[:1]), html.data_cells(cells[1:], html.NUMBER)
        )
        for row in shown
        for cells in [rank_cells(row)]
    )
    notes = [
        *store.notes(),
        *([f"{len(store.rows()) - _MAX_PAGE_RANKS} more ranks."] if len(shown) == _MAX_PAGE_RANKS else []),
    ]
    body = (
        f'{html.table((), [bars]) if bars else ""}<div style="display:flex;flex-wrap:wrap;gap:14px 28px;margin:6px 0">'
        f"{curves}</div>{html.table(RANK_TITLES, rows, style=html.table_style(margin='4px 0'))}{html.note_lines(notes)}"
    )
    return html.figure(body, heading=f"Job on {heading(store)}")


def _curve(series: job_store.Series, number: int, store: job_store.JobStore, *, measured: bool) -> str:
    points, mark = series.points(), store.mark(measured=measured)
    earlier = [line.outline() for line in store.earlier(series.name, measured=measured)]
    text = series_text(series, measured=measured)
    kind, formatted = FORMATS[series.name] if measured else ("number", format_number)
    color = KINDS[_MEASURED_COLORS[series.name]] if measured else RANKS[number % len(RANKS)]
    value, spread = series_value(series, measured=measured)
    first, last = _ends([points, *earlier])
    ends = [f"{end:.3g} s" if measured else f"step {end:g}" for end in dict.fromkeys((first, last))]
    alt = f"{series.name}: {text}; {' to '.join(ends)}"
    chart = chart_html(
        points,
        value_axis([point for line in (points, *earlier) for point in line], kind),
        color.both,
        alt=alt,
        y_text=lambda tick: _tick(tick, formatted),
        x_texts=ends,
        earlier=earlier,
    )
    title = escape(" · ".join(filter(None, (series.name, mark))))
    return (
        f'<div style="width:360px"><div style="{html.MUTED}">{title}</div><div style="margin-bottom:8px">'
        f'<b style="font-size:140%;font-weight:600">{escape(value)}</b> '
        f'<span style="{html.MUTED}">{escape(spread)}</span></div>{chart}</div>'
    )


def _tick(value: float, formatted: Callable[[float], str]) -> str:
    return formatted(value) if value else "0"


def _bar(bar: job_store.MergedBar) -> str:
    width = 300
    low, high = round(width * bar.low), round(width * bar.high)
    color = KINDS["collective"].both
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 6" width="{width}" height="6">'
        f'<rect width="{width}" height="6" rx="3" fill="#767676" fill-opacity=".25"/><rect width="{high}" height="6" '
        f'rx="3" fill="{color}" fill-opacity=".45"/><rect width="{low}" height="6" rx="3" fill="{color}"/></svg>'
    )
    facts = ", ".join(filter(None, (bar.rate, bar.left, bar.behind)))
    return html.table_row(
        html.row_title(escape(bar.desc or "progress")),
        html.data_cells([bar.count], html.NUMBER),
        f'<td style="{html.CELL}"><img alt="{escape(bar.text)}" src="{html.svg_uri(svg)}" width="{width}" height="6" '
        'style="display:block;margin:0;max-width:none"></td>',
        html.data_cells([facts]),
    )


class WatchView(LiveView):
    """Curves, loops and states of a job, and a button that interrupts its cell.

    Args:
        stop: Called, on any thread, when the button is clicked.
    """

    _esm = script("watch")
    _css = style("watch")

    def __init__(self, stop: Callable[[], object]) -> None:
        self._store = job_store.JobStore()
        self._stop = stop
        super().__init__()

    @property
    def store(self) -> job_store.JobStore:
        """What is known of the job; read-only."""
        return self._store

    def add(self, replies: Sequence[JobSnapshot], now: float) -> None:
        """Show the ranks' replies, too; from any thread. `now` is in seconds of any clock."""
        with self._lock:
            for reply in replies:
                self._store.add(reply, now)
        self.refresh()

    def stop(self) -> None:
        """Show that the cluster has stopped; from any thread."""
        with self._lock:
            self._store.stop()
        self.refresh()

    def to_bundle(self) -> dict[str, str]:
        """Return what is shown now as `text/html` and `text/plain`, which need neither a kernel nor scripts."""
        with self._lock:
            return watch_bundle(self._store)

    def on_message(self, message: dict[str, Any]) -> None:
        """Handle a heartbeat or a click on the button."""
        super().on_message(message)
        if message.get("op") == "stop":
            self._stop()

    def make_content(self) -> dict[str, Any]:
        """Return curves with their points as bytes, loops, and the table of ranks."""
        store = self._store
        rows = store.rows()
        num_omitted = len(rows) - _MAX_LIVE_RANKS
        omitted = [f"{num_omitted} more ranks are left out of the table."] if num_omitted > 0 else []
        most_memory = max((row.memory for row in rows), default=0) or 1
        charts = [
            _live_chart(series, number, store, measured=measured)
            for number, (series, measured) in enumerate(shown_series(store))
        ]
        return {
            "heading": heading(store),
            "context": context(store),
            "running": store.cell is not None,
            "bars": [to_builtins(bar) for bar in store.bars()],
            "charts": charts,
            "titles": list(RANK_TITLES),
            "ranks": [_live_row(row, most_memory) for row in rows[:_MAX_LIVE_RANKS]],
            "notes": [*store.notes(), *omitted],
        }


def _live_row(row: job_store.RankRow, most_memory: int) -> dict[str, Any]:
    cells: list[dict[str, Any]] = [{"text": text} for text in rank_cells(row)]
    if row.communication is not None:
        cells[-2] |= {"share": round(row.communication, 3), "token": "kind-collective"}
    if row.memory:
        cells[-1] |= {"share": round(row.memory / most_memory, 3), "token": "kind-p2p"}
    return {"rank": row.rank, "cells": cells}


def _live_chart(series: job_store.Series, number: int, store: job_store.JobStore, *, measured: bool) -> dict[str, Any]:
    value, spread = series_value(series, measured=measured)
    color = html.SERIES_TOKENS[series.name] if measured else f"rank-{number % len(RANKS)}"
    return {
        "name": series.name,
        "value": value,
        "spread": spread,
        "text": series_text(series, measured=measured),
        "token": color,
        "kind": FORMATS[series.name][0] if measured else "number",
        "axis": "seconds" if measured else "steps",
        "points": job_store.pack_points(series.points()),
        "earlier": [job_store.pack_points(line.outline()) for line in store.earlier(series.name, measured=measured)],
        "mark": store.mark(measured=measured),
    }


class WatchPanel(LivePanel):
    """A panel that polls at most every two seconds.

    Args:
        cluster: The cluster whose job is shown.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, min_interval_s=_MIN_INTERVAL_S)
        self.view: WatchView = WatchView(cluster.cancel)
        self.poll()
        self.view.refresh(unseen=True)

    def poll(self) -> float:
        """Read everything that was logged so far."""
        replies = read_job(self._cluster, self.view)
        self.view.add(replies, time.monotonic())
        return sum(reply.cost_s for reply in replies)

    def on_cluster_stopped(self) -> None:
        """Show that no cell runs anymore; the ranks' last states stay."""
        self.view.stop()


def read_job(cluster: Cluster, view: WatchView) -> list[JobSnapshot]:
    """Return what the ranks have logged since the view's last update, in as many requests as it takes."""
    known, replies = dict(view.store.reports), []
    for _ in range(_MAX_REQUESTS):
        replies.append(request_job(cluster.state, known))
        known.update(replies[-1].reports)
        if all(report.is_last for report in replies[-1].reports.values()):
            break
    return replies
