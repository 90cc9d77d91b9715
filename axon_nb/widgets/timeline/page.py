"""A timeline as a picture, a table and text, without a kernel and scripts; and its facts for the live page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from axon_nb.cluster.inspection.span_table import SpanTable
from axon_nb.records.ranks import format_ranks, name_ranks
from axon_nb.records.spans import Span
from axon_nb.records.training.pipeline import PipelineStep
from axon_nb.records.units import format_bytes, format_seconds
from axon_nb.widgets.html import cell_style, data_cells, figure, head_cells, legend, note_lines, svg_uri, table_style
from axon_nb.widgets.palette import OTHER, SPAN_CODES, SPAN_PAINTS
from axon_nb.widgets.timeline.facts import RankFacts, TimelineFacts, pipeline_steps, timeline_facts
from axon_nb.widgets.timeline.svg import rank_svg, step_svg, swatch_svg

__all__ = ["COLUMN_TITLES", "TimelineNumbers", "facts_of", "page_facts", "timeline_bundle"]

COLUMN_TITLES = ("forward", "backward", "optimizer", "communicating", "hidden", "waiting", "waited for", "moved")
"""Of the table; `hidden`: share of communication behind computing, `waited for`: what other ranks waited for it."""

_CELL = cell_style(12)
_MAX_ROWS = 64
_MAX_BOXES = 1000
"""Of all pipelines together, measured and ideal: 35 kB of a message."""
_MAX_PIPELINES = 4


@dataclass(frozen=True, slots=True)
class TimelineNumbers:
    """What is worked out of spans."""

    facts: TimelineFacts
    steps: tuple[PipelineStep, ...]
    """The newest first."""


def facts_of(table: SpanTable) -> TimelineNumbers:
    """Facts of all ranks, and the last step of each pipeline."""
    return TimelineNumbers(timeline_facts(table), tuple(pipeline_steps(table)))


def page_facts(numbers: TimelineNumbers, ranks: Sequence[int]) -> dict[str, Any]:
    """The facts as `static/timeline/page.js` reads them: words, and boxes of pipeline steps in seconds."""
    facts, steps = numbers.facts, numbers.steps[:_MAX_PIPELINES]
    return {
        "facts": {
            "titles": list(COLUMN_TITLES),
            "rows": [[own.rank, *_cells(own)] for own in facts.ranks if own.rank in ranks][:_MAX_ROWS],
            "sentences": _sentences(numbers),
        },
        "pipelines": [_page_step(step, _MAX_BOXES // (2 * len(steps))) for step in steps],
    }


def timeline_bundle(
    table: SpanTable, ranks: Sequence[int], *, title: str, focus: tuple[int | None, int | None] = (None, None)
) -> dict[str, str]:
    """A MIME bundle.

    Args:
        table: The spans.
        ranks: Rows, from the top.
        title: What is shown, such as ``In [3]``.
        focus: What part of time is drawn and counted, in nanoseconds; None: from the first span, or to the last.
    """
    shown = table if focus[0] is None else table.between(focus[0], focus[1])
    numbers = facts_of(shown)
    start, end = _extent(shown, focus)
    count = f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'}"
    spans = f"{len(shown)} span{'' if len(shown) == 1 else 's'}"
    heading = f"{title or 'Timeline'}: {count}, {format_seconds((end - start) / 1e9)}, {spans}"
    notes = [*_sentences(numbers), *_losses(table)]
    by_rank = {own.rank: own for own in numbers.facts.ranks}
    lines = [heading]
    lines += [f"  rank {rank}: {_in_words(by_rank.get(rank))}" for rank in ranks]
    lines += [f"  {_step_words(step)}" for step in numbers.steps[:_MAX_PIPELINES]]
    rows = _table(shown, [rank for rank in ranks if rank in by_rank][:_MAX_ROWS], by_rank, (start, end))
    steps = "".join(map(_step_html, numbers.steps[:_MAX_PIPELINES]))
    html = figure(f"{rows}{steps}{note_lines(notes)}", heading=heading, beside=_legend(shown))
    return {"text/html": html, "text/plain": "\n".join([*lines, *notes])}


def _extent(table: SpanTable, focus: tuple[int | None, int | None]) -> tuple[int, int]:
    starts, ends = table.columns["start"], table.columns["end"]
    start = focus[0] if focus[0] is not None else int(starts.min()) if len(table) else 0
    end = focus[1] if focus[1] is not None else int(ends.max()) if len(table) else start
    return start, max(start, end)


def _cells(own: RankFacts) -> tuple[str, ...]:
    def seconds(value: float) -> str:
        return _short(value) if value else "–"

    hidden = f"{own.hidden / own.communicating:.0%}" if own.communicating else "–"
    times = (own.forward, own.backward, own.optimizer, own.communicating)
    return (
        *map(seconds, times), hidden, seconds(own.waiting), seconds(own.waited_for),
        format_bytes(own.bytes) if own.bytes else "–",
    )  # fmt: skip


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else format_seconds(seconds)


def _in_words(own: RankFacts | None) -> str:
    if own is None:
        return "no span"
    told = [f"{name} {cell}" for name, cell in zip(COLUMN_TITLES, _cells(own), strict=True) if cell != "–"]
    return ", ".join(told) or "nothing but its cell"


def _sentences(numbers: TimelineNumbers) -> list[str]:
    overlap, more = numbers.facts.overlap, len(numbers.steps) - _MAX_PIPELINES
    hidden = f"Overlap: {overlap:.0%} of communication was hidden behind computing." if overlap is not None else ""
    older = f"The last steps of {more} older pipeline{'s' if more > 1 else ''} are left out." if more > 0 else ""
    return [sentence for sentence in (hidden, numbers.facts.straggler, older) if sentence]


def _losses(table: SpanTable) -> list[str]:
    dropped = f"{table.dropped:,} older spans were dropped." if table.dropped else ""
    lost = f"{table.lost:,} spans came too fast to be taken." if table.lost else ""
    return [note for note in (dropped, lost) if note]


def _step_words(step: PipelineStep) -> str:
    spans = step.measured
    ranks, stages = {span.rank for span in spans}, {span.stage for span in spans}
    microbatches = {span.microbatch for span in spans}
    return (
        f"pipeline of {name_ranks(ranks)}, {len(stages)} stages, {len(microbatches)} microbatches: the last step took "
        f"{_short(_seconds(spans))} with a bubble of {step.bubble:.0%}; ideal: {_short(_seconds(step.ideal))}, "
        f"{step.ideal_bubble:.0%}"
    )


def _seconds(spans: Sequence[Span]) -> float:
    return (max(span.end_ns for span in spans) - min(span.start_ns for span in spans)) / 1e9


def _page_step(step: PipelineStep, most: int) -> dict[str, Any]:
    ranks = sorted({span.rank for span in step.measured})

    def boxes(spans: Sequence[Span]) -> list[list[float | str]]:
        origin = min(span.start_ns for span in spans)
        return [
            [
                ranks.index(span.rank), round((span.start_ns - origin) / 1e9, 6),
                round((span.end_ns - span.start_ns) / 1e9, 6), SPAN_CODES.get(span.kind, OTHER), span.stage,
                span.microbatch, span.name,
            ]
            for span in sorted(spans, key=lambda span: span.start_ns)[:most]
        ]  # fmt: skip

    return {
        "words": _step_words(step),
        "ranks": ranks,
        "seconds": max(_seconds(step.measured), _seconds(step.ideal)),
        "cut": max(0, len(step.measured) - most),
        "rows": [
            {"title": "measured", "bubble": f"{step.bubble:.0%}", "boxes": boxes(step.measured)},
            {"title": "ideal", "bubble": f"{step.ideal_bubble:.0%}", "boxes": boxes(step.ideal)},
        ],
    }


def _table(table: SpanTable, ranks: Sequence[int], by_rank: dict[int, RankFacts], extent: tuple[int, int]) -> str:
    head = head_cells(("", "", *COLUMN_TITLES), _CELL)
    rows = "".join(_row(table, by_rank[rank], extent, num_rows=len(ranks)) for rank in ranks)
    return (
        f'<table style="{table_style(widths=(760, 1400))}"><thead><tr style="background:none">{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _row(table: SpanTable, own: RankFacts, extent: tuple[int, int], *, num_rows: int) -> str:
    picture = svg_uri(rank_svg(table, own.rank, *extent, num_rows=num_rows))
    said = escape(f"rank {own.rank}: {_in_words(own)}")
    return (
        f'<tr style="background:none"><th scope="row" style="{_CELL};font-weight:normal">rank {own.rank}</th>'
        f'<td style="{_CELL};width:45%"><img alt="{said}" title="{said}" src="{picture}" height="26" '
        'style="display:block;width:100%;min-width:320px;max-width:none;height:26px;margin:0"></td>'
        f"{data_cells(_cells(own), _CELL)}</tr>"
    )


def _legend(table: SpanTable) -> str:
    seen = {table.labels[label][0] for label in np.unique(table.columns["label"])}
    if (table.columns["late"] > 0).any():
        seen.add("wait")
    if (table.columns["stage"] >= 0).any():
        seen.add("bubble")
    return legend((swatch_svg(paint), paint.label) for paint in SPAN_PAINTS if paint.kind in seen and paint.lane >= 0)


def _step_html(step: PipelineStep) -> str:
    ranks = sorted({span.rank for span in step.measured})
    seconds = max(_seconds(step.measured), _seconds(step.ideal), 1e-9)
    rows = []
    for title, spans, bubble in (
        ("measured", step.measured, step.bubble),
        ("ideal", step.ideal, step.ideal_bubble),
    ):
        said = f"{title}: {_short(_seconds(spans))}, a bubble of {bubble:.0%}"
        rows.append(
            f'<tr style="background:none"><th scope="row" style="{_CELL};font-weight:normal">{title}<br>ranks '
            f'{format_ranks(ranks)}</th><td style="{_CELL}"><img alt="{said}" title="{said}" '
            f'src="{svg_uri(step_svg(spans, ranks, seconds))}" width="600" height="{18 * len(ranks)}" '
            f'style="display:block;margin:2px 0;max-width:none"></td><td style="{_CELL}">bubble {bubble:.0%}</td></tr>'
        )
    return (
        f'<div style="margin:6px 0 2px">{escape(_step_words(step).capitalize())}</div>'
        f'<table style="{table_style()}"><tbody>{"".join(rows)}</tbody></table>'
    )
