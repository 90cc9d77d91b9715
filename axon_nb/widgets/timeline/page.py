"""A timeline as text and as a saved page that needs neither a kernel nor scripts; and its facts for the live page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from axon_nb.cluster.inspection.span_table import SpanTable
from axon_nb.records.ranks import name_ranks
from axon_nb.records.spans import Span
from axon_nb.records.training.pipeline import PipelineStep
from axon_nb.records.units import format_bytes, format_seconds
from axon_nb.widgets import html
from axon_nb.widgets.palette import OTHER, SPAN_CODES, SPAN_PAINTS
from axon_nb.widgets.timeline.facts import RankFacts, TimelineFacts, pipeline_steps, timeline_facts
from axon_nb.widgets.timeline.svg import rank_svg, step_svg, swatch_svg

__all__ = ["COLUMN_TITLES", "TimelineSummary", "page_facts", "summarize", "timeline_bundle"]

COLUMN_TITLES = ("forward", "backward", "optimizer", "communicating", "hidden", "waiting", "waited for", "moved")
"""Of the table. `hidden`: share of communication behind computation; `waited for`: time other ranks waited for it."""

_MAX_ROWS = 64
_MAX_BOXES = 1000
"""Of all pipelines together, measured and ideal; they take 35 kB of a message."""
_MAX_PIPELINES = 4


@dataclass(frozen=True, slots=True)
class TimelineSummary:
    """Facts and pipeline steps computed from spans."""

    facts: TimelineFacts
    steps: tuple[PipelineStep, ...]
    """Last steps, the newest first."""


def summarize(table: SpanTable) -> TimelineSummary:
    """Return the facts of all ranks and the last step of each pipeline."""
    return TimelineSummary(timeline_facts(table), tuple(pipeline_steps(table)))


def page_facts(summary: TimelineSummary, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the summary as `static/timeline/page.js` reads it: text, and boxes of pipeline steps in seconds."""
    facts, steps = summary.facts, summary.steps[:_MAX_PIPELINES]
    return {
        "facts": {
            "titles": list(COLUMN_TITLES),
            "rows": [[rank.rank, *_cells(rank)] for rank in facts.ranks if rank.rank in ranks][:_MAX_ROWS],
            "sentences": _sentences(summary),
        },
        "pipelines": [_page_step(step, _MAX_BOXES // (2 * len(steps))) for step in steps],
    }


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
    summary = summarize(shown)
    start, end = _extent(shown, focus)
    count = f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'}"
    spans = f"{len(shown)} span{'' if len(shown) == 1 else 's'}"
    heading = f"{title or 'Timeline'}: {count}, {format_seconds((end - start) / 1e9)}, {spans}"
    notes = [*_sentences(summary), *_losses(table)]
    by_rank = {rank.rank: rank for rank in summary.facts.ranks}
    lines = [heading]
    lines += [f"  rank {rank}: {_describe(by_rank.get(rank))}" for rank in ranks]
    lines += [f"  {_describe_step(step)}" for step in summary.steps[:_MAX_PIPELINES]]
    rows = _table(shown, [rank for rank in ranks if rank in by_rank][:_MAX_ROWS], by_rank, (start, end))
    steps = "".join(map(_step_html, summary.steps[:_MAX_PIPELINES]))
    figure = html.figure(f"{rows}{steps}{html.note_lines(notes)}", heading=heading, beside=_legend(shown))
    return {"text/html": figure, "text/plain": "\n".join([*lines, *notes])}


def _extent(table: SpanTable, focus: tuple[int | None, int | None]) -> tuple[int, int]:
    starts, ends = table.columns["start"], table.columns["end"]
    start = focus[0] if focus[0] is not None else int(starts.min()) if len(table) else 0
    end = focus[1] if focus[1] is not None else int(ends.max()) if len(table) else start
    return start, max(start, end)


def _cells(rank: RankFacts) -> tuple[str, ...]:
    def seconds(value: float) -> str:
        return _format_duration(value) if value else "–"

    hidden = f"{rank.hidden / rank.communicating:.0%}" if rank.communicating else "–"
    times = (rank.forward, rank.backward, rank.optimizer, rank.communicating)
    return (
        *map(seconds, times), hidden, seconds(rank.waiting), seconds(rank.waited_for),
        format_bytes(rank.bytes) if rank.bytes else "–",
    )  # fmt: skip


def _format_duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else format_seconds(seconds)


def _describe(rank: RankFacts | None) -> str:
    if rank is None:
        return "no span"
    parts = [f"{name} {cell}" for name, cell in zip(COLUMN_TITLES, _cells(rank), strict=True) if cell != "–"]
    return ", ".join(parts) or "nothing but its cell"


def _sentences(summary: TimelineSummary) -> list[str]:
    overlap, num_omitted = summary.facts.overlap, len(summary.steps) - _MAX_PIPELINES
    hidden = f"Overlap: {overlap:.0%} of communication was hidden behind computation." if overlap is not None else ""
    pipelines = "1 older pipeline is" if num_omitted == 1 else f"{num_omitted} older pipelines are"
    omitted = f"{pipelines} left out." if num_omitted > 0 else ""
    return [sentence for sentence in (hidden, summary.facts.straggler, omitted) if sentence]


def _spans(count: int, noun: str) -> str:
    return f"{count:,} {noun}{' was' if count == 1 else 's were'}"


def _losses(table: SpanTable) -> list[str]:
    dropped = f"{_spans(table.dropped, 'older span')} dropped." if table.dropped else ""
    lost = f"{_spans(table.lost, 'span')} lost: too many came at once." if table.lost else ""
    return [note for note in (dropped, lost) if note]


def _describe_step(step: PipelineStep) -> str:
    spans = step.measured
    ranks, stages = {span.rank for span in spans}, {span.stage for span in spans}
    microbatches = {span.microbatch for span in spans}
    return (
        f"pipeline of {name_ranks(ranks)}, {len(stages)} stages, {len(microbatches)} microbatches: the last step took "
        f"{_format_duration(_seconds(spans))} with a bubble of {step.bubble:.0%}; ideal: "
        f"{_format_duration(_seconds(step.ideal))}, {step.ideal_bubble:.0%}"
    )


def _seconds(spans: Sequence[Span]) -> float:
    return (max(span.end_ns for span in spans) - min(span.start_ns for span in spans)) / 1e9


def _page_step(step: PipelineStep, max_boxes: int) -> dict[str, Any]:
    ranks = sorted({span.rank for span in step.measured})

    def boxes(spans: Sequence[Span]) -> list[list[float | str]]:
        origin = min(span.start_ns for span in spans)
        return [
            [
                ranks.index(span.rank), round((span.start_ns - origin) / 1e9, 6),
                round((span.end_ns - span.start_ns) / 1e9, 6), SPAN_CODES.get(span.kind, OTHER), span.stage,
                span.microbatch, span.name,
            ]
            for span in sorted(spans, key=lambda span: span.start_ns)[:max_boxes]
        ]  # fmt: skip

    return {
        "text": _describe_step(step),
        "ranks": ranks,
        "seconds": max(_seconds(step.measured), _seconds(step.ideal)),
        "omitted": max(0, len(step.measured) - max_boxes),
        "rows": [
            {"title": "measured", "bubble": f"{step.bubble:.0%}", "boxes": boxes(step.measured)},
            {"title": "ideal", "bubble": f"{step.ideal_bubble:.0%}", "boxes": boxes(step.ideal)},
        ],
    }


def _table(table: SpanTable, ranks: Sequence[int], by_rank: dict[int, RankFacts], extent: tuple[int, int]) -> str:
    rows = (_row(table, by_rank[rank], extent, num_rows=len(ranks)) for rank in ranks)
    return html.table(("", "", *COLUMN_TITLES), rows, style=html.table_style(widths=(760, 1400)))


def _row(table: SpanTable, rank: RankFacts, extent: tuple[int, int], *, num_rows: int) -> str:
    picture = html.svg_uri(rank_svg(table, rank.rank, *extent, num_rows=num_rows))
    text = escape(f"rank {rank.rank}: {_describe(rank)}")
    return html.table_row(
        html.row_title(f"rank {rank.rank}"),
        f'<td style="{html.CELL};width:45%"><img alt="{text}" title="{text}" src="{picture}" height="26" '
        'style="display:block;width:100%;min-width:320px;max-width:none;height:26px;margin:0"></td>',
        html.data_cells(_cells(rank)),
    )


def _legend(table: SpanTable) -> str:
    seen = {table.labels[label][0] for label in np.unique(table.columns["label"])}
    if (table.columns["late"] > 0).any():
        seen.add("wait")
    if (table.columns["stage"] >= 0).any():
        seen.add("bubble")
    paints = [paint for paint in SPAN_PAINTS if paint.kind in seen and paint.lane >= 0]
    return html.legend((swatch_svg(paint), paint.label) for paint in paints)


def _step_html(step: PipelineStep) -> str:
    ranks = sorted({span.rank for span in step.measured})
    seconds = max(_seconds(step.measured), _seconds(step.ideal), 1e-9)
    rows = []
    for title, spans, bubble in (
        ("measured", step.measured, step.bubble),
        ("ideal", step.ideal, step.ideal_bubble),
    ):
        text = f"{title}: {_format_duration(_seconds(spans))}, a bubble of {bubble:.0%}"
        rows.append(
            html.table_row(
                html.row_title(f"{title}<br>{name_ranks(ranks)}"),
                f'<td style="{html.CELL}"><img alt="{text}" title="{text}" '
                f'src="{html.svg_uri(step_svg(spans, ranks, seconds))}" width="600" height="{18 * len(ranks)}" '
                'style="display:block;margin:2px 0;max-width:none"></td>',
                html.data_cells([f"bubble {bubble:.0%}"]),
            )
        )
    return f'<div style="margin:6px 0 2px">{escape(_describe_step(step).capitalize())}</div>{html.table((), rows)}'
