"""A timeline, or two side by side, as text and as a saved page without scripts; and as one SVG for papers and slides.

Pictures look right on light and dark pages. In those of the page, text is left to the page around them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from html import escape
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from axon_nb.cluster.inspection.spans import SpanTable
from axon_nb.records.colors import INK
from axon_nb.records.spans import Span
from axon_nb.records.training.steps import PipelineStep
from axon_nb.records.units import aligned, format_bytes, format_seconds
from axon_nb.widgets import html
from axon_nb.widgets.timeline import content, facts

_WIDTHS = ((8, 600), (24, 360), (1 << 30, 200))
"""(largest number of rows, width of each in units); narrow for many rows, as pictures are saved with the notebook."""
_LANES = ((1.0, 17.0), (20.0, 9.0))
"""Top and height of each lane, in units."""
_HEIGHT = 30
_STEP_ROW = 18
_STEP_WIDTH = 600
_MIN_SHARE = 0.02
_Box = tuple[float, float, float, float]
"""Left, top, width, height."""
_NONE: facts.Intervals = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
_WIDE = html.table_style(widths=(480, 1400))
_FACT = html.NUMBER.replace("14px", "5px")
"""Style of the table's cells: ten columns fit a window of 800 px."""
_PICTURE_WIDTH, _PICTURE_LEFT, _PICTURE_ROW, _PICTURE_GAP = 960, 72, 30, 4
_PICTURE_TEXT = "#212529"
_MAX_TICKS = 10
_MAX_STEPS = 60
"""With a mark each."""
_COMPARED_PARTS: tuple[tuple[str, Callable[[facts.RankFacts], float]], ...] = (
    ("cell", lambda rank: rank.cell),
    ("forward", lambda rank: rank.forward),
    ("backward", lambda rank: rank.backward),
    ("optimizer", lambda rank: rank.optimizer),
    ("own code", lambda rank: rank.own_code),
    ("waiting", lambda rank: rank.waiting),
    ("communicating", lambda rank: rank.communicating),
)
_COMPARISON_HEAD = "mean of the ranks"


def rank_svg(
    table: SpanTable, rank: int, start_ns: int, end_ns: int, *, num_rows: int, running_since: int | None = None
) -> str:
    """Draw one rank between two times, its code above communication; 30 units high, and it may be stretched."""
    width = next(width for rows, width in _WIDTHS if num_rows <= rows)
    shapes: dict[int, list[_Box]] = {}
    scale = width / max(1, end_ns - start_ns)
    for lane, sets in enumerate(_lanes(table, rank, running_since)):
        top, height = _LANES[lane]
        shares = np.zeros((len(html.SPAN_PAINTS), width))
        for code, (starts, ends) in sets.items():
            _cover(shares[code], (starts - start_ns) * scale, (ends - start_ns) * scale)
        for left, right, code in _runs(shares):
            shapes.setdefault(code, []).append((left, top, right - left, height))
    return html.svg(width, _HEIGHT, _shapes(shapes))


def swatch_svg(paint: html.SpanPaint) -> str:
    """Draw a sample of one paint for a legend, 24 x 14 units."""
    return html.svg(24, 14, _shape(paint, [(0, 0, 24, 14)]))


def step_svg(spans: Sequence[Span], ranks: Sequence[int], seconds: float) -> str:
    """Draw a pipeline step: a row per rank, microbatches in boxes, bubbles between them; `seconds` is its width."""
    scale = _STEP_WIDTH / (seconds * 1e9)
    origin = min(span.start_ns for span in spans)
    shapes: dict[int, list[_Box]] = {}
    labels = []
    for row, rank in enumerate(ranks):
        rank_spans = sorted((span for span in spans if span.rank == rank), key=lambda span: span.start_ns)
        top, free = row * _STEP_ROW + 1.0, 0.0
        for span in rank_spans:
            left, width = (span.start_ns - origin) * scale, max(1.0, (span.end_ns - span.start_ns) * scale - 1)
            if left - free > 1:
                shapes.setdefault(html.BUBBLE, []).append((free, top, left - free, _STEP_ROW - 2.0))
            shapes.setdefault(html.SPAN_CODES.get(span.kind, html.OTHER), []).append(
                (left, top, width, _STEP_ROW - 2.0)
            )
            free = left + width + 1
            if width >= 6 * len(str(span.microbatch)) + 3:
                color = html.SPAN_PAINTS[html.SPAN_CODES.get(span.kind, html.OTHER)].color.both
                labels.append(
                    f'<text x="{left + width / 2:.1f}" y="{top + 12:g}" font-size="10" text-anchor="middle" '
                    f'fill="{html.text_color(color)}" font-family="sans-serif">{span.microbatch}</text>'
                )
    return html.svg(_STEP_WIDTH, len(ranks) * _STEP_ROW, _shapes(shapes) + "".join(labels))


def _lanes(
    table: SpanTable, rank: int, running_since: int | None
) -> tuple[dict[int, facts.Intervals], dict[int, facts.Intervals]]:
    """Return what is drawn in each lane, by kind; in one lane no kind covers another."""
    columns, is_own = table.columns, table.columns["rank"] == rank

    def times(*kinds: str) -> facts.Intervals:
        selected = is_own & table.of_kind(*kinds)
        return columns["start"][selected], columns["end"][selected]

    moving = is_own & table.of_kind("collective", "p2p")
    ready = np.minimum(columns["start"] + columns["late"], columns["end"])
    waits = facts.union(facts.join(times("wait"), facts.tails(times("backward"), times("collective", "p2p"))))
    code, taken = {html.SPAN_CODES["wait"]: waits}, waits
    for kind in ("optimizer", "backward", "forward", "other"):
        code[html.SPAN_CODES[kind]] = facts.subtract(times(kind), taken)
        taken = facts.join(taken, code[html.SPAN_CODES[kind]])
    own_code = facts.subtract(
        facts.join(times("cell"), facts.running_cell(columns["end"][is_own], running_since)), taken
    )
    code[html.OTHER] = facts.join(code[html.OTHER], own_code)
    communication = {
        html.SPAN_CODES[kind]: (ready[mask], columns["end"][mask])
        for kind in ("collective", "p2p")
        if (mask := is_own & table.of_kind(kind)).any()
    }
    communication[html.SPAN_CODES["wait"]] = facts.subtract(
        (columns["start"][moving], ready[moving]), facts.join(*communication.values()) if communication else _NONE
    )
    return code, communication


def _cover(shares: npt.NDArray[np.float64], left: npt.NDArray[Any], right: npt.NDArray[Any]) -> None:
    """Add the share of each unit that the intervals from `left` to `right` cover."""
    width = len(shares)
    left, right = left.clip(0, width), right.clip(0, width)
    steps = np.zeros(width + 2)
    # The area below a point grows by one per unit: its difference from unit to unit is the share.
    for edges, sign in ((left, 1.0), (right, -1.0)):
        unit = edges.astype(np.int64)
        fraction = edges - unit
        np.add.at(steps, unit, sign * (1 - fraction))
        np.add.at(steps, unit + 1, sign * fraction)
    shares += np.cumsum(steps)[:width].clip(0, 1)


def _runs(shares: npt.NDArray[np.float64]) -> Iterable[tuple[int, int, int]]:
    """Yield (left, right, code) of the intervals in which one kind has the largest share."""
    best = np.where(shares.max(axis=0) > _MIN_SHARE, shares.argmax(axis=0), -1)
    edges = [0, *(np.flatnonzero(np.diff(best)) + 1).tolist(), len(best)]
    for left, right in itertools.pairwise(edges):
        if right > left and best[left] >= 0:
            yield left, right, int(best[left])


def _shapes(shapes: dict[int, list[_Box]]) -> str:
    return "".join(_shape(html.SPAN_PAINTS[code], shapes[code]) for code in sorted(shapes))


def _shape(paint: html.SpanPaint, boxes: Sequence[_Box]) -> str:
    color = paint.color.both
    path = "".join(f"M{x:.4g} {y:g}h{width:.4g}v{height:g}h-{width:.4g}z" for x, y, width, height in boxes)
    if paint.form == "bubble":
        lines = "".join(f"M{x:.4g} {y + height / 2:g}h{width:.4g}" for x, y, width, height in boxes)
        return f'<path d="{lines}" stroke="{color}" stroke-opacity=".5"/>'
    if paint.form == "wait":
        feet = "".join(f"M{x:.4g} {y + height - 1:g}h{width:.4g}" for x, y, width, height in boxes)
        return (
            f'<path d="{path}" fill="{color}" fill-opacity=".25"/><path d="{feet}" stroke="{color}" stroke-width="2"/>'
        )
    return f'<path d="{path}" fill="{color}"/>'


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
    summary = content.summarize(shown, running_since)
    start, end = _extent(shown, focus)
    count = f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'}"
    slowed = "".join(f", {text}" for text in summary.facts.slowed)
    name = f"Timeline, {title}" if title else _name(shown)
    time = f", {format_seconds((end - start) / 1e9)}" if summary.facts.ranks else ""
    heading = f"{name}{slowed}, {count}{time}"
    by_rank = {rank.rank: rank for rank in summary.facts.ranks}
    lines = [heading]
    lines += [f"  rank {rank}: {_describe(by_rank.get(rank))}" for rank in ranks]
    lines += [f"  {content.describe_step(step)}" for step in summary.steps[: content.MAX_PIPELINES]]
    known = [rank for rank in ranks if rank in by_rank][: content.MAX_ROWS]
    drawn = pictures(shown, summary, ranks, (start, end), running_since=running_since)
    steps = "".join(map(_step_html, summary.steps[: content.MAX_PIPELINES]))
    nothing = [] if summary.facts.ranks else [content.NOTHING_YET]
    remarks = [*nothing, *content.omitted_pipelines(summary), *summary.facts.clock_notes, *_losses(table)]
    notice = html.notice(summary.notice.claim, summary.notice.text) if summary.notice is not None else ""
    numbers = html.figures((figure["name"], figure["value"], figure["remark"]) for figure in content.figures(summary))
    table_html = _table([by_rank[rank] for rank in known])
    body = f"{numbers}{notice}{_legend(shown)}{drawn}{steps}{table_html}{html.note_lines(remarks)}"
    return {
        "text/html": html.figure(body, heading=heading),
        "text/plain": "\n".join([*lines, *_sentences(summary), *remarks]),
    }


def _name(table: SpanTable) -> str:
    """Return what a timeline without a title is called: after its cell, if it shows only one."""
    cells = {table.labels[label][1] for label in np.unique(table.columns["label"][table.of_kind("cell")])}
    return f"Timeline, {cells.pop()}" if len(cells) == 1 else "Timeline"


def pictures(
    table: SpanTable,
    summary: content.TimelineSummary,
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
    known = [rank for rank in ranks if rank in by_rank][: content.MAX_ROWS]
    rows = [_picture(table, by_rank[rank], extent, num_rows=len(known), running_since=running_since) for rank in known]
    seconds = (extent[1] - extent[0]) / 1e9
    if known and seconds > 0:
        axes = (("steps", _step_axis(table, known[0], extent)), ("", html.time_axis(seconds)))
        rows += [_axis_row(title, drawn) for title, drawn in axes if drawn]
    return html.table((), rows, style=_WIDE)


def _step_axis(table: SpanTable, rank: int, extent: tuple[int, int]) -> str:
    """Return where the steps of a rank are, each of which ends with the optimizer; empty: it has none, or many."""
    ends = next(facts.optimizer_steps(table.pick(table.columns["rank"] == rank), "end"), np.zeros(0, dtype=np.int64))
    ends = ends[(ends > extent[0]) & (ends <= extent[1])]
    if not 0 < len(ends) <= _MAX_STEPS:
        return ""
    edges = [extent[0], *ends.tolist(), extent[1]]
    shares = [(after - before) / (extent[1] - extent[0]) for before, after in itertools.pairwise(edges)]
    return html.segments((share, f"step {i}" if i < len(ends) else "") for i, share in enumerate(shares))


def _axis_row(title: str, drawn: str) -> str:
    muted = f'<td style="{html.CELL};{html.MUTED}">{title}</td>'
    return html.table_row(muted, f'<td style="{html.CELL};width:94%">{drawn}</td>')


def _extent(table: SpanTable, focus: tuple[int | None, int | None]) -> tuple[int, int]:
    starts, ends = table.columns["start"], table.columns["end"]
    start = focus[0] if focus[0] is not None else int(starts.min()) if len(table) else 0
    end = focus[1] if focus[1] is not None else int(ends.max()) if len(table) else start
    return start, max(start, end)


def _describe(rank: facts.RankFacts | None) -> str:
    if rank is None:
        return "no span"
    parts = [
        f"{name} {cell}"
        for (name, _), cell in zip(content.COLUMNS, content.rank_cells([rank])[0], strict=True)
        if cell != "–"
    ]
    return ", ".join(parts) or "only its cell"


def _sentences(summary: content.TimelineSummary) -> list[str]:
    overlap = summary.facts.overlap
    hidden = f"Overlap: {overlap:.0%} of communication was hidden behind computation." if overlap is not None else ""
    return [sentence for sentence in (hidden, str(summary.notice or "")) if sentence]


def _spans(count: int, noun: str) -> str:
    return f"{count:,} {noun}{' was' if count == 1 else 's were'}"


def _losses(table: SpanTable) -> list[str]:
    dropped = f"{_spans(table.dropped, 'older span')} dropped." if table.dropped else ""
    lost = f"{_spans(table.lost, 'span')} lost: too many arrived at once." if table.lost else ""
    return [note for note in (dropped, lost) if note]


def _table(ranks: Sequence[facts.RankFacts]) -> str:
    rows = (
        html.table_row(html.row_title(f"rank {rank.rank}"), html.data_cells(cells, _FACT))
        for rank, cells in zip(ranks, content.rank_cells(ranks), strict=True)
    )
    return html.table(("", *(title for title, _ in content.COLUMNS)), rows, cell=_FACT, style=_WIDE)


def _picture(
    table: SpanTable, rank: facts.RankFacts, extent: tuple[int, int], *, num_rows: int, running_since: int | None
) -> str:
    svg = rank_svg(table, rank.rank, *extent, num_rows=num_rows, running_since=running_since)
    text = escape(f"rank {rank.rank}: {_describe(rank)}")
    return html.table_row(
        html.row_title(f"rank {rank.rank}"),
        f'<td style="{html.CELL};width:94%"><img alt="{text}" title="{text}" src="{html.svg_uri(svg)}" height="30" '
        'style="display:block;width:100%;min-width:320px;max-width:none;height:30px;margin:0"></td>',
    )


def _legend(table: SpanTable) -> str:
    bubbles = {"bubble"} if (table.columns["stage"] >= 0).any() else set()
    paints = [(swatch_svg(paint), paint.label) for paint in _seen_paints(table, bubbles)]
    samples = html.legend(paints, margin="right")
    return f'<div style="margin:2px 0 4px">{samples}</div>'


def _seen_paints(table: SpanTable, more: Collection[str] = ()) -> list[html.SpanPaint]:
    seen = {table.labels[label][0] for label in np.unique(table.columns["label"])} | set(more)
    seen |= {"other"} if "cell" in seen else set()
    seen |= {"wait"} if (table.columns["late"] > 0).any() else set()
    return [paint for paint in html.SPAN_PAINTS if paint.kind in seen and paint.lane >= 0]


def _step_html(step: PipelineStep) -> str:
    ranks = sorted({span.rank for span in step.measured})
    seconds = max(content.step_seconds(step.measured), content.step_seconds(step.ideal), 1e-9)
    rows = []
    for title, spans, bubble in (
        ("measured", step.measured, step.bubble),
        ("ideal", step.ideal, step.ideal_bubble),
    ):
        text = f"{title}: {content.format_duration(content.step_seconds(spans))}, a bubble of {bubble:.0%}"
        rows.append(
            html.table_row(
                html.row_title(f"{title}<br>bubble {bubble:.0%}"),
                f'<td style="{html.CELL};width:94%"><img alt="{text}" title="{text}" '
                f'src="{html.svg_uri(step_svg(spans, ranks, seconds))}" width="600" height="{18 * len(ranks)}" '
                f'style="display:block;width:100%;height:{18 * len(ranks)}px;margin:2px 0;max-width:none"></td>',
            )
        )
    words = f'<div style="margin:6px 0 2px">{escape(content.describe_step(step).capitalize())}</div>'
    return words + html.table((), rows, style=_WIDE)


def timeline_svg(table: SpanTable, ranks: Sequence[int], *, title: str) -> str:
    """Return the picture, on white; of more than 64 ranks, the first ones.

    Args:
        table: The spans.
        ranks: Rows, from the top.
        title: What is shown, such as ``In [3]``.
    """
    start = int(table.columns["start"].min()) if len(table) else 0
    seconds = (int(table.columns["end"].max()) - start) / 1e9 if len(table) else 0.0
    shown = list(ranks)[: content.MAX_ROWS]
    notice = content.summarize(table).notice
    parts = [_picture_text(f"{title}: {len(ranks)} ranks, {content.format_duration(seconds)}", 0, 16, weight=600)]
    top = 28
    if notice is not None:
        parts.append(_picture_text(str(notice), 0, 34))
        top = 50
    scale = (_PICTURE_WIDTH - _PICTURE_LEFT) / (seconds or 1.0)
    bottom = top + 14 + len(shown) * (_PICTURE_ROW + _PICTURE_GAP)
    for at in _ticks(seconds):
        x = _PICTURE_LEFT + at * scale
        parts.append(f'<path d="M{x:.1f} {top + 4}V{bottom}" stroke="{INK}" stroke-opacity=".3"/>')
        anchor = "start" if at == 0 else "middle"
        parts.append(
            _picture_text(content.format_duration(at) if at else "0", x, top, anchor=anchor, size=10, color=INK)
        )
    for row, rank in enumerate(shown):
        y = top + 14 + row * (_PICTURE_ROW + _PICTURE_GAP)
        drawing = rank_svg(table, rank, start, start + max(1, round(seconds * 1e9)), num_rows=1)
        place = f'<svg x="{_PICTURE_LEFT}" y="{y}" width="{_PICTURE_WIDTH - _PICTURE_LEFT}" height="{_PICTURE_ROW}"'
        parts += [_picture_text(f"rank {rank}", 0, y + 15), _nested(drawing, place)]
    parts += _picture_legend(table, bottom + 8)
    height = bottom + 28
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -4 {_PICTURE_WIDTH + 16} {height + 8}" '
        f'width="{_PICTURE_WIDTH + 16}" '
        f'height="{height + 8}" font-family="Inter, system-ui, sans-serif">'
        f'<rect x="-8" y="-4" width="{_PICTURE_WIDTH + 16}" height="{height + 8}" fill="#FFFFFF"/>'
        f"{''.join(parts)}</svg>\n"
    )


def round_step(length: float, count: int) -> float:
    """Return a step of 1, 2 or 5 times a power of ten of which at most `count` make up a length above 0."""
    power = 10.0 ** np.floor(np.log10(length / count))
    return float(next(digit * power for digit in (1, 2, 5, 10) if length / (digit * power) <= count))


def _ticks(seconds: float) -> Iterator[float]:
    if seconds > 0:
        step = round_step(seconds, _MAX_TICKS)
        yield from (number * step for number in range(int(seconds / step) + 1))


def _picture_legend(table: SpanTable, top: float) -> Iterator[str]:
    left = float(_PICTURE_LEFT)
    for paint in _seen_paints(table):
        yield _nested(swatch_svg(paint), f'<svg x="{left:g}" y="{top:g}" width="18" height="10"')
        yield _picture_text(paint.label, left + 23, top + 9)
        left += 40 + 6.4 * len(paint.label)


def _nested(svg: str, place: str) -> str:
    """Place a picture within another one."""
    head, _, rest = svg.partition(">")
    box = head[head.index("viewBox") : head.index(" width")]
    return f'{place} {box} preserveAspectRatio="none">{rest}'


def _picture_text(
    text: str,
    x: float,
    y: float,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: int = 400,
    color: str = _PICTURE_TEXT,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{color}">{escape(text)}</text>'
    )


def comparison_bundle(cells: Sequence[tuple[str, SpanTable]], ranks: Sequence[int]) -> dict[str, str]:
    """Return two cells side by side as `text/html` and `text/plain`.

    Args:
        cells: Title, such as ``In [7]``, and the spans of each of the two cells.
        ranks: Rows, from the top.
    """
    titles = [title for title, _ in cells]
    summaries = [content.summarize(table) for _, table in cells]
    heading = f"{titles[0]} compared with {titles[1]}"
    rows = _compared_rows(*summaries)
    head = (_COMPARISON_HEAD, *titles, "change")
    body = html.table(
        head, (html.table_row(html.row_title(name), html.data_cells(texts, html.NUMBER)) for name, *texts in rows)
    )
    length = max(summary.facts.seconds for summary in summaries)
    for (title, table), summary in zip(cells, summaries, strict=True):
        start = int(table.columns["start"].min())
        notice = html.notice(summary.notice.claim, summary.notice.text) if summary.notice is not None else ""
        drawn = pictures(table, summary, ranks, (start, start + round(length * 1e9)))
        body += f'<div style="margin:8px 0 2px">{title}</div>{notice}{drawn}'
    lines = aligned([head, *rows], [True] * len(head))
    sentences = [f"{title}: {part.notice}" for title, part in zip(titles, summaries, strict=True) if part.notice]
    return {
        "text/html": html.figure(body, heading=heading),
        "text/plain": "\n".join([heading, *lines, *sentences]),
    }


def _compared_rows(first: content.TimelineSummary, second: content.TimelineSummary) -> list[tuple[str, str, str, str]]:
    """Return name, both values and their difference, of each part that either cell has."""
    rows = []
    steps = (first.facts.step, second.facts.step)
    if steps[0] is not None and steps[1] is not None:
        rows.append(_compared_row("step", steps[0][0], steps[1][0], content.format_duration))
    for name, part in _COMPARED_PARTS:
        before, after = (fmean(map(part, summary.facts.ranks)) for summary in (first, second))
        if before or after:
            rows.append(_compared_row(name, before, after, content.format_duration))
    hidden = (first.facts.overlap, second.facts.overlap)
    if hidden[0] is not None and hidden[1] is not None:
        rows.append(("hidden", f"{hidden[0]:.0%}", f"{hidden[1]:.0%}", f"{hidden[1] - hidden[0]:+.0%}"))
    before, after = (fmean(rank.bytes for rank in summary.facts.ranks) for summary in (first, second))
    if before or after:
        rows.append(_compared_row("moved", before, after, lambda size: format_bytes(round(size))))
    return rows


def _compared_row(name: str, before: float, after: float, text: Callable[[float], str]) -> tuple[str, str, str, str]:
    sign = "−" if after < before else "+"
    share = f" ({sign}{abs(after - before) / before:.0%})" if before else ""
    return name, text(before), text(after), f"{sign}{text(abs(after - before))}{share}"
