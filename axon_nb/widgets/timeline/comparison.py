"""Two cells side by side: what took longer, and both on one scale, as a page and as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from axon_nb.cluster.inspection.span_table import SpanTable
from axon_nb.records.units import format_bytes
from axon_nb.widgets import html
from axon_nb.widgets.timeline.content import TimelineSummary, format_duration, summarize
from axon_nb.widgets.timeline.facts import RankFacts
from axon_nb.widgets.timeline.page import pictures

_PARTS: tuple[tuple[str, Callable[[RankFacts], float]], ...] = (
    ("cell", lambda rank: rank.cell),
    ("forward", lambda rank: rank.forward),
    ("backward", lambda rank: rank.backward),
    ("optimizer", lambda rank: rank.optimizer),
    ("own code", lambda rank: rank.own_code),
    ("waiting", lambda rank: rank.waiting),
    ("communicating", lambda rank: rank.communicating),
)
_HEAD = "mean of the ranks"


def comparison_bundle(cells: Sequence[tuple[str, SpanTable]], ranks: Sequence[int]) -> dict[str, str]:
    """Return two cells side by side as `text/html` and `text/plain`.

    Args:
        cells: Title, such as ``In [7]``, and the spans of each of the two cells.
        ranks: Rows, from the top.
    """
    titles = [title for title, _ in cells]
    summaries = [summarize(table) for _, table in cells]
    heading = f"{titles[0]} compared with {titles[1]}"
    rows = _rows(*summaries)
    head = (_HEAD, *titles, "change")
    body = html.table(
        head, (html.table_row(html.row_title(name), html.data_cells(texts, html.NUMBER)) for name, *texts in rows)
    )
    length = max(summary.facts.seconds for summary in summaries)
    for (title, table), summary in zip(cells, summaries, strict=True):
        start = int(table.columns["start"].min())
        notice = html.notice(summary.notice.claim, summary.notice.text) if summary.notice is not None else ""
        drawn = pictures(table, summary, ranks, (start, start + round(length * 1e9)))
        body += f'<div style="margin:8px 0 2px">{title}</div>{notice}{drawn}'
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    sentences = [f"{title}: {part.notice}" for title, part in zip(titles, summaries, strict=True) if part.notice]
    return {
        "text/html": html.figure(body, heading=heading),
        "text/plain": "\n".join([heading, *lines, *sentences]),
    }


def _rows(first: TimelineSummary, second: TimelineSummary) -> list[tuple[str, str, str, str]]:
    """Return name, both values and their difference, of each part that either cell has."""
    rows = []
    steps = (first.facts.step, second.facts.step)
    if steps[0] is not None and steps[1] is not None:
        rows.append(_row("step", steps[0][0], steps[1][0], format_duration))
    for name, part in _PARTS:
        before, after = (fmean(map(part, summary.facts.ranks)) for summary in (first, second))
        if before or after:
            rows.append(_row(name, before, after, format_duration))
    hidden = (first.facts.overlap, second.facts.overlap)
    if hidden[0] is not None and hidden[1] is not None:
        rows.append(("hidden", f"{hidden[0]:.0%}", f"{hidden[1]:.0%}", f"{hidden[1] - hidden[0]:+.0%}"))
    before, after = (fmean(rank.bytes for rank in summary.facts.ranks) for summary in (first, second))
    if before or after:
        rows.append(_row("moved", before, after, lambda size: format_bytes(round(size))))
    return rows


def _row(name: str, before: float, after: float, text: Callable[[float], str]) -> tuple[str, str, str, str]:
    sign = "−" if after < before else "+"
    share = f" ({sign}{abs(after - before) / before:.0%})" if before else ""
    return name, text(before), text(after), f"{sign}{text(abs(after - before))}{share}"
