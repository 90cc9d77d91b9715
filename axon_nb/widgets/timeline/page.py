"""A timeline as text, and as a saved page that needs neither a kernel nor scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from axon_nb.cluster.inspection.span_table import SpanTable
from axon_nb.records.ranks import name_ranks
from axon_nb.records.training.pipeline import PipelineStep
from axon_nb.records.units import format_seconds
from axon_nb.widgets import html
from axon_nb.widgets.palette import SPAN_PAINTS
from axon_nb.widgets.timeline.content import (
    COLUMNS,
    MAX_PIPELINES,
    MAX_ROWS,
    TimelineSummary,
    describe_step,
    figures,
    format_duration,
    omitted_pipelines,
    rank_cells,
    step_seconds,
    summarize,
)
from axon_nb.widgets.timeline.facts import RankFacts
from axon_nb.widgets.timeline.svg import rank_svg, step_svg, swatch_svg

_WIDE = html.table_style(widths=(480, 1400))


def timeline_bundle(
    table: SpanTable, ranks: Sequence[int], *, title: str, focus: tuple[int | None, int | None] = (None, None)
) -> dict[str, str]:
    """Return the timeline as `text/html` and `text/plain`.

    Args:
        table: The spans.
        ranks: Rows, from the top.
        title: What is shown, such as ``In [3]``.
        focus: Start and end of what is drawn and counted, in nanoseconds; None: the first span, or the last.
    """
    shown = table if focus[0] is None else table.between(focus[0], focus[1])
    running_since = focus[0] if focus[1] is None else None
    summary = summarize(shown, running_since)
    start, end = _extent(shown, focus)
    count = f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'}"
    spans = f"{len(shown)} span{'' if len(shown) == 1 else 's'}"
    slowed = "".join(f", {text}" for text in summary.facts.slowed)
    heading = f"{title or 'Timeline'}{slowed}: {count}, {format_seconds((end - start) / 1e9)}, {spans}"
    by_rank = {rank.rank: rank for rank in summary.facts.ranks}
    lines = [heading]
    lines += [f"  rank {rank}: {_describe(by_rank.get(rank))}" for rank in ranks]
    lines += [f"  {describe_step(step)}" for step in summary.steps[:MAX_PIPELINES]]
    known = [rank for rank in ranks if rank in by_rank][:MAX_ROWS]
    drawn = pictures(shown, summary, ranks, (start, end), running_since=running_since)
    steps = "".join(map(_step_html, summary.steps[:MAX_PIPELINES]))
    remarks = [*omitted_pipelines(summary), *summary.facts.clock_notes, *_losses(table)]
    notice = html.notice(summary.notice.claim, summary.notice.text) if summary.notice is not None else ""
    numbers = html.figures((figure["name"], figure["value"], figure["remark"]) for figure in figures(summary))
    table_html = _table([by_rank[rank] for rank in known])
    body = f"{numbers}{notice}{_legend(shown)}{drawn}{steps}{table_html}{html.note_lines(remarks)}"
    return {
        "text/html": html.figure(body, heading=heading),
        "text/plain": "\n".join([*lines, *_sentences(summary), *remarks]),
    }


def pictures(
    table: SpanTable,
    summary: TimelineSummary,
    ranks: Sequence[int],
    extent: tuple[int, int],
    *,
    running_since: int | None = None,
) -> str:
    """Return a picture of each rank, as HTML.

    Args:
        table: The spans.
        summary: Summary of the same spans.
        ranks: Rows, from the top.
        extent: Start and end of what is drawn, in nanoseconds.
        running_since: When the running cell started, in nanoseconds; None if none runs.
    """
    by_rank = {rank.rank: rank for rank in summary.facts.ranks}
    known = [rank for rank in ranks if rank in by_rank][:MAX_ROWS]
    rows = (_picture(table, by_rank[rank], extent, num_rows=len(known), running_since=running_since) for rank in known)
    return html.table((), ["".join(rows)], style=_WIDE)


def _extent(table: SpanTable, focus: tuple[int | None, int | None]) -> tuple[int, int]:
    starts, ends = table.columns["start"], table.columns["end"]
    start = focus[0] if focus[0] is not None else int(starts.min()) if len(table) else 0
    end = focus[1] if focus[1] is not None else int(ends.max()) if len(table) else start
    return start, max(start, end)


def _describe(rank: RankFacts | None) -> str:
    if rank is None:
        return "no span"
    parts = [f"{name} {cell}" for (name, _), cell in zip(COLUMNS, rank_cells(rank), strict=True) if cell != "–"]
    return ", ".join(parts) or "only its cell"


def _sentences(summary: TimelineSummary) -> list[str]:
    overlap = summary.facts.overlap
    hidden = f"Overlap: {overlap:.0%} of communication was hidden behind computation." if overlap is not None else ""
    return [sentence for sentence in (hidden, str(summary.notice or "")) if sentence]


def _spans(count: int, noun: str) -> str:
    return f"{count:,} {noun}{' was' if count == 1 else 's were'}"


def _losses(table: SpanTable) -> list[str]:
    dropped = f"{_spans(table.dropped, 'older span')} dropped." if table.dropped else ""
    lost = f"{_spans(table.lost, 'span')} lost: too many arrived at once." if table.lost else ""
    return [note for note in (dropped, lost) if note]


def _table(ranks: Sequence[RankFacts]) -> str:
    rows = (
        html.table_row(html.row_title(f"rank {rank.rank}"), html.data_cells(rank_cells(rank), html.NUMBER))
        for rank in ranks
    )
    return html.table(("", *(title for title, _ in COLUMNS)), rows, cell=html.NUMBER, style=_WIDE)


def _picture(
    table: SpanTable, rank: RankFacts, extent: tuple[int, int], *, num_rows: int, running_since: int | None
) -> str:
    svg = rank_svg(table, rank.rank, *extent, num_rows=num_rows, running_since=running_since)
    text = escape(f"rank {rank.rank}: {_describe(rank)}")
    return html.table_row(
        html.row_title(f"rank {rank.rank}"),
        f'<td style="{html.CELL};width:94%"><img alt="{text}" title="{text}" src="{html.svg_uri(svg)}" height="30" '
        'style="display:block;width:100%;min-width:320px;max-width:none;height:30px;margin:0"></td>',
    )


def _legend(table: SpanTable) -> str:
    seen = {table.labels[label][0] for label in np.unique(table.columns["label"])}
    if (table.columns["late"] > 0).any():
        seen.add("wait")
    if (table.columns["stage"] >= 0).any():
        seen.add("bubble")
    if "cell" in seen:
        seen.add("other")
    paints = [paint for paint in SPAN_PAINTS if paint.kind in seen and paint.lane >= 0]
    samples = html.legend(((swatch_svg(paint), paint.label) for paint in paints), margin="right")
    return f'<div style="margin:2px 0 4px">{samples}</div>'


def _step_html(step: PipelineStep) -> str:
    ranks = sorted({span.rank for span in step.measured})
    seconds = max(step_seconds(step.measured), step_seconds(step.ideal), 1e-9)
    rows = []
    for title, spans, bubble in (
        ("measured", step.measured, step.bubble),
        ("ideal", step.ideal, step.ideal_bubble),
    ):
        text = f"{title}: {format_duration(step_seconds(spans))}, a bubble of {bubble:.0%}"
        rows.append(
            html.table_row(
                html.row_title(f"{title}<br>{name_ranks(ranks)}"),
                f'<td style="{html.CELL}"><img alt="{text}" title="{text}" '
                f'src="{html.svg_uri(step_svg(spans, ranks, seconds))}" width="600" height="{18 * len(ranks)}" '
                'style="display:block;margin:2px 0;max-width:none"></td>',
                html.data_cells([f"bubble {bubble:.0%}"]),
            )
        )
    return f'<div style="margin:6px 0 2px">{escape(describe_step(step).capitalize())}</div>{html.table((), rows)}'
