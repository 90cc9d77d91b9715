"""A strip after its cell: a picture and a table that survive saving, and a summary in words."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from axon_nb.records.telemetry import Activity
from axon_nb.records.units import format_seconds
from axon_nb.widgets.cell.segments import RankHistory
from axon_nb.widgets.cell.svg import WIDTH, row_svg, swatch_svg
from axon_nb.widgets.html import (
    MUTED,
    cell_style,
    data_cells,
    figure,
    head_cells,
    legend,
    note_lines,
    svg_uri,
    table_style,
)
from axon_nb.widgets.palette import PAINTS

__all__ = ["end_words", "strip_bundle"]

_CELL = cell_style(10)
_PICTURE = "display:block;width:100%;min-width:200px;max-width:none;height:16px;margin:0"
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
_MEASURED = (Activity.RUNNING, Activity.COLLECTIVE, Activity.WAITING)


def strip_bundle(histories: Sequence[RankHistory], *, title: str, end: float, lost: int) -> dict[str, str]:
    """Picture, table and words of a strip.

    Args:
        histories: One a rank.
        title: What ran, such as ``In [3]``.
        end: Length of the cell in seconds.
        lost: Samples that did not arrive.

    Returns:
        A MIME bundle: `text/html` without scripts or references, `text/plain`.
    """
    count = f"{len(histories)} rank{'' if len(histories) == 1 else 's'}"
    heading = f"{f'{title}: ' if title else ''}{count}, {format_seconds(end)}"
    notes = _notes(histories, lost)
    words = "\n".join([heading, *(f"  rank {h.rank}: {_summary(h, end)}" for h in histories), *notes])
    return {"text/html": _html(histories, heading, notes, end), "text/plain": words}


def end_words(history: RankHistory, end: float) -> str:
    """How a rank ended the cell, such as ``done after 12.1 s``; `end` is the cell's length in seconds."""
    if not history.segments:
        return "no sample"
    last = history.segments[-1]
    verb = {Activity.DONE: "done", Activity.FAILED: "failed", Activity.DEAD: "died"}.get(last.activity)
    if verb:
        return f"{verb} after {format_seconds(last.start)}"
    line = f", line {last.line}" if last.line else ""
    stop = history.at_end(end)
    silent = f", no sample for {format_seconds(end - stop)}" if stop < end else ""
    if last.activity is Activity.WAITING:
        return f"waiting in {last.call}{line}, {format_seconds(stop - last.since)}{silent}"
    if last.activity is Activity.COLLECTIVE:
        return f"in {last.call}{line}{silent}"
    return f"{last.activity.value}{line if last.activity is Activity.RUNNING else ''}{silent}"


def _summary(history: RankHistory, end: float) -> str:
    parts = [
        f"{label} {_spent(history, activity)}"
        for activity, label in zip(_MEASURED, ("running", "in collectives", "waiting"), strict=True)
        if history.totals.get(activity)
    ]
    if history.longest_wait:
        parts.append(f"longest wait {_longest(history)}")
    return "; ".join([end_words(history, end), *parts])


def _spent(history: RankHistory, activity: Activity) -> str:
    seconds = history.totals.get(activity, 0.0)
    return format_seconds(seconds) if seconds else "–"


def _longest(history: RankHistory) -> str:
    longest = history.longest_wait
    if longest is None:
        return "–"
    return f"{format_seconds(longest.seconds)} in {longest.call}" + (f", line {longest.line}" if longest.line else "")


def _notes(histories: Sequence[RankHistory], lost: int) -> list[str]:
    notes = []
    coarse = max((history.coarse_before for history in histories), default=0.0)
    if coarse:
        notes.append(f"Before {format_seconds(coarse)} short stretches are merged; the table counts them exactly.")
    if lost:
        notes.append(f"{lost} sample{'' if lost == 1 else 's'} lost.")
    return notes


def _html(histories: Sequence[RankHistory], heading: str, notes: Sequence[str], end: float) -> str:
    titles = ("", "", "at the end", "running", "in collectives", "waiting", "longest wait")
    rows = "".join(_row(history, end) for history in histories)
    rest = f'<td colspan="{len(titles) - 2}" style="{_CELL}"></td>'
    axis = f'<tr style="background:none"><td style="{_CELL}"></td><td style="{_CELL}">{_axis(end)}</td>{rest}</tr>'
    body = (
        f'<table style="{table_style(widths=(720, 1200))}"><thead><tr style="background:none">'
        f"{head_cells(titles, _CELL)}</tr></thead><tbody>{rows}{axis}</tbody></table>{note_lines(notes)}"
    )
    return figure(body, heading=heading, beside=_legend(histories))


def _legend(histories: Sequence[RankHistory]) -> str:
    seen = {segment.activity for history in histories for segment in history.segments}
    return legend((swatch_svg(paint), paint.label) for paint in PAINTS if paint.activity in seen)


def _row(history: RankHistory, end: float) -> str:
    cells = (end_words(history, end), *(_spent(history, activity) for activity in _MEASURED), _longest(history))
    said = f"rank {history.rank}: {_summary(history, end)}"
    return (
        f'<tr style="background:none"><th scope="row" style="{_CELL};font-weight:normal">rank {history.rank}</th>'
        f'<td style="{_CELL};width:45%"><img alt="{escape(said)}" src="{svg_uri(row_svg(history, end))}" '
        f'width="{WIDTH}" height="16" style="{_PICTURE}"></td>{data_cells(cells, _CELL)}</tr>'
    )


def _axis(end: float) -> str:
    """Ticks as the left borders of table cells: text that takes the page's colours and needs no script."""
    step = next((step for step in _TICKS if end / step <= 6), 86400.0)
    count = max(1, int(end / step + 1e-9))
    ticks = [(i * step, step) for i in range(count)]
    if (rest := end - count * step) > step / 1000:
        ticks.append((count * step, rest))
    style = f"padding:0 0 0 3px;text-align:left;border:none;border-left:1px solid;white-space:nowrap;{MUTED}"
    cells = "".join(
        f'<td style="{style};width:{100 * width / end if end else 100:.2f}%">'
        f"{_tick(at) if width > 0.4 * step or not at else ''}</td>"
        for at, width in ticks
    )
    table = (
        "border-collapse:collapse;border:none;table-layout:fixed;width:100%;margin:0;font-size:smaller;color:inherit"
    )
    return f'<table style="{table}"><tbody><tr style="background:none">{cells}</tr></tbody></table>'


def _tick(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
