"""A strip after its cell: a picture and a table that survive saving, and a summary as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from axon_nb.records.telemetry import Activity
from axon_nb.records.units import format_seconds
from axon_nb.widgets.cell.segments import RankHistory
from axon_nb.widgets.cell.svg import WIDTH, row_svg, swatch_svg
from axon_nb.widgets.html import (
    CELL,
    MUTED,
    data_cells,
    figure,
    legend,
    note_lines,
    row_title,
    svg_uri,
    table,
    table_row,
    table_style,
)
from axon_nb.widgets.palette import ACTIVITIES

_TITLES = ("", "", "at the end", "running", "in collectives", "waiting", "longest wait")
_PICTURE = "display:block;width:100%;min-width:200px;max-width:none;height:16px;margin:0"
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
_MAX_ROWS = 64
_MEASURED = (Activity.RUNNING, Activity.COLLECTIVE, Activity.WAITING)


def strip_bundle(histories: Sequence[RankHistory], *, title: str, end: float, lost: int) -> dict[str, str]:
    """Return a strip as a picture with a table, and as text.

    Args:
        histories: One per rank.
        title: What ran, such as ``In [3]``.
        end: Length of the cell in seconds.
        lost: Samples that did not arrive.

    Returns:
        A MIME bundle: `text/html` without scripts or references, `text/plain`.
    """
    count = f"{len(histories)} rank{'' if len(histories) == 1 else 's'}"
    heading = f"{f'{title}: ' if title else ''}{count}, {format_seconds(end)}"
    shown = _standing_out(histories)
    notes = [*_omitted(histories, shown), *_notes(histories, lost)]
    summaries = (f"  rank {history.rank}: {_summary(history, end)}" for history in shown)
    return {
        "text/html": _html(shown, heading, notes, end),
        "text/plain": "\n".join([heading, *summaries, *notes]),
    }


def _standing_out(histories: Sequence[RankHistory]) -> list[RankHistory]:
    """Return at most 64 ranks: those that ended otherwise than most, then those that waited least.

    The latter are the ones for which others wait.
    """
    if len(histories) <= _MAX_ROWS:
        return list(histories)
    ends = Counter(map(_last_activity, histories))
    most = max(ends, key=lambda activity: ends[activity])

    def is_ordinary(history: RankHistory) -> tuple[bool, float]:
        waited = history.totals.get(Activity.WAITING, 0.0) + history.totals.get(Activity.COLLECTIVE, 0.0)
        return _last_activity(history) is most, waited

    return sorted(sorted(histories, key=is_ordinary)[:_MAX_ROWS], key=lambda history: history.rank)


def _last_activity(history: RankHistory) -> Activity | None:
    return history.segments[-1].activity if history.segments else None


def _omitted(histories: Sequence[RankHistory], shown: Sequence[RankHistory]) -> list[str]:
    count = len(histories) - len(shown)
    if not count:
        return []
    what = "those that ended otherwise than most, and then those that waited least"
    return [f"{count} of {len(histories)} ranks are left out; shown are {what}."]


def end_text(history: RankHistory, end: float) -> str:
    """Describe a rank at the end of its cell, such as ``done after 12.1 s``; `end` is the cell's length in seconds."""
    if not history.segments:
        return "no sample"
    last = history.segments[-1]
    verb = {Activity.DONE: "done", Activity.FAILED: "failed", Activity.DEAD: "died"}.get(last.activity)
    if verb:
        return f"{verb} after {format_seconds(last.start)}"
    line = f", line {last.line}" if last.line else ""
    if last.activity is Activity.STOPPED:
        return f"stopped{f' in {last.call}' if last.call else ''}{line}"
    last_end = history.last_end(end)
    silent = f", no sample for {format_seconds(end - last_end)}" if last_end < end else ""
    if last.activity is Activity.WAITING:
        return f"waiting in {last.call}{line}, {format_seconds(last_end - last.since)}{silent}"
    if last.activity is Activity.COLLECTIVE:
        return f"in {last.call}{line}{silent}"
    return f"{last.activity.value}{line if last.activity in (Activity.RUNNING, Activity.PAUSED) else ''}{silent}"


def _summary(history: RankHistory, end: float) -> str:
    parts = [
        f"{label} {_total(history, activity)}"
        for activity, label in zip(_MEASURED, ("running", "in collectives", "waiting"), strict=True)
        if history.totals.get(activity)
    ]
    if history.longest_wait:
        parts.append(f"longest wait {_longest_wait(history)}")
    return "; ".join([end_text(history, end), *parts])


def _total(history: RankHistory, activity: Activity) -> str:
    seconds = history.totals.get(activity, 0.0)
    return format_seconds(seconds) if seconds else "–"


def _longest_wait(history: RankHistory) -> str:
    longest = history.longest_wait
    if longest is None:
        return "–"
    return f"{format_seconds(longest.seconds)} in {longest.call}" + (f", line {longest.line}" if longest.line else "")


def _notes(histories: Sequence[RankHistory], lost: int) -> list[str]:
    notes = []
    coarse = max((history.coarse_before for history in histories), default=0.0)
    if coarse:
        notes.append(f"Before {format_seconds(coarse)}, short segments are merged; the table counts them exactly.")
    if lost:
        notes.append(f"{lost} sample{'' if lost == 1 else 's'} lost.")
    return notes


def _html(histories: Sequence[RankHistory], heading: str, notes: Sequence[str], end: float) -> str:
    rest = f'<td colspan="{len(_TITLES) - 2}" style="{CELL}"></td>'
    axis = table_row(f'<td style="{CELL}"></td><td style="{CELL}">{_axis(end)}</td>{rest}')
    rows = [*(_row(history, end) for history in histories), axis]
    ranks = table(_TITLES, rows, style=table_style(widths=(720, 1200)))
    return figure(f"{ranks}{note_lines(notes)}", heading=heading, beside=_legend(histories))


def _legend(histories: Sequence[RankHistory]) -> str:
    seen = {segment.activity for history in histories for segment in history.segments}
    return legend((swatch_svg(paint), paint.label) for paint in ACTIVITIES if paint.activity in seen)


def _row(history: RankHistory, end: float) -> str:
    cells = (end_text(history, end), *(_total(history, activity) for activity in _MEASURED), _longest_wait(history))
    text = f"rank {history.rank}: {_summary(history, end)}"
    return table_row(
        row_title(f"rank {history.rank}"),
        f'<td style="{CELL};width:45%"><img alt="{escape(text)}" src="{svg_uri(row_svg(history, end))}" '
        f'width="{WIDTH}" height="16" style="{_PICTURE}"></td>',
        data_cells(cells),
    )


def _axis(end: float) -> str:
    """Return ticks as left borders of table cells, whose text takes the page's colours and needs no script."""
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
    axis_style = (
        "border-collapse:collapse;border:none;table-layout:fixed;width:100%;margin:0;font-size:smaller;color:inherit"
    )
    return table((), [table_row(cells)], style=axis_style)


def _tick(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
