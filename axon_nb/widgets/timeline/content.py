"""A timeline in numbers and words: figures, what costs most, ranks, pipelines, and what would shorten a step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from axon_nb.cluster.inspection.spans import SpanTable
from axon_nb.errors import UsageError
from axon_nb.records.performance import Advice, advise
from axon_nb.records.ranks import name_ranks
from axon_nb.records.spans import Span
from axon_nb.records.training.steps import PipelineStep, Recording, last_steps, record_steps
from axon_nb.records.units import format_bytes, format_seconds
from axon_nb.widgets import html
from axon_nb.widgets.html import OTHER, SPAN_CODES
from axon_nb.widgets.timeline.facts import RankFacts, TimelineFacts, timeline_facts

_LIMITS = (512, 8192)
"""Number of last spans per rank and pipeline that are read: few at first, more if they hold no complete step."""
COLUMNS = (
    ("forward", "kind-forward"),
    ("backward", "kind-backward"),
    ("optimizer", "kind-optimizer"),
    ("own code", "kind-other"),
    ("waiting", "kind-wait"),
    ("communicating", "kind-collective"),
    ("hidden", "kind-p2p"),
    ("waited for", "kind-wait"),
    ("moved", "quiet"),
)
"""Of the table: title, and the colour of its bars. The first five exclude each other and add up to the cell.

`hidden`: share of communication behind computation; `waited for`: time other ranks waited for it.
"""
NOTHING_YET = "Run a %%distributed cell: what its ranks do appears here."
MAX_ROWS = 64
MAX_PIPELINES = 4
_MAX_BOXES = 1000
"""Of all pipelines together, measured and ideal; they take 35 kB of a message."""
_SHOWN = {"straggler": "", "own code": "own code", "data loading": "own code", "garbage collection": "garbage"}
_SHOWN |= {"uneven stages": "waiting", "bubble": "waiting"}
"""By cause of an advice, the words of the filter that show it; of all others it is communication."""
_RANK = re.compile(r"Rank (\d+)")
_MIN_ABOVE_IDEAL = 1.05
"""Length of a pipeline's step, in ideal steps, from which the difference is reported."""
_MAX_SPANS = 20_000
"""The last ones are read."""
_MAX_CELLS = 8
"""Of the last ones, that with training steps is taken."""
_MAX_ADVICE = 5


def pipeline_steps(table: SpanTable) -> list[PipelineStep]:
    """Return the last step of each pipeline, the newest first; omit pipelines without a step finished on all ranks."""
    names = sorted({group for _, _, group in table.labels})
    index = {name: number for number, name in enumerate(names)}
    group_of = np.array([index[group] for _, _, group in table.labels], dtype=np.int64)
    rows = np.flatnonzero(table.of_kind("forward", "backward") & (table.columns["stage"] >= 0))
    steps: dict[str, PipelineStep] = {}
    for limit in _LIMITS:
        groups = group_of[table.columns["label"][rows]] if len(rows) else rows
        last = rows[_last_of_each(groups * (1 << 32) + table.columns["rank"][rows], limit)]
        selected = np.zeros(len(table), dtype=bool)
        selected[last] = True
        for step in last_steps(table.pick(selected).spans(), members=table.groups):
            steps[step.group] = step
        # Read more only of pipelines whose step was not found among the first spans.
        rest = np.isin(groups, [index[name] for name in names if name not in steps])
        if len(last) == len(rows) or not rest.any():
            break
        rows = rows[rest]
    return sorted(steps.values(), key=lambda step: max(span.end_ns for span in step.measured), reverse=True)


def _last_of_each(keys: npt.NDArray[np.int64], limit: int) -> npt.NDArray[np.bool_]:
    """Return which positions are among the last `limit` with their key."""
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.diff(keys[order])) + 1
    ends = np.append(edges, len(keys))
    sizes = np.diff(np.concatenate(([0], ends)))
    after = np.repeat(ends, sizes) - 1 - np.arange(len(keys))
    is_last = np.zeros(len(keys), dtype=bool)
    is_last[order] = after < limit
    return is_last


class Notice(Struct, frozen=True):
    """What costs most."""

    claim: str
    text: str
    filter: str
    """What shows it, as words of the page's filter."""

    def __str__(self) -> str:
        return f"{self.claim} {self.text}"


class TimelineSummary(Struct, frozen=True):
    """Facts and pipeline steps computed from spans."""

    facts: TimelineFacts
    steps: tuple[PipelineStep, ...]
    """Last steps, the newest first."""
    advice: StepAdvice | None
    """What would shorten a step; None: no training step is complete."""

    @property
    def notice(self) -> Notice | None:
        """What costs most; None: nothing stands out, or it is not known yet."""
        return _notice(self.advice)


def summarize(table: SpanTable, running_since: int | None = None) -> TimelineSummary:
    """Return the facts of all ranks and the last step of each pipeline.

    Args:
        table: The spans.
        running_since: When the running cell began, in nanoseconds; None: no cell runs.
    """
    facts, steps = timeline_facts(table, running_since), tuple(pipeline_steps(table))
    return TimelineSummary(facts, steps, step_advice(table))


def _notice(found: StepAdvice | None) -> Notice | None:
    """Return the first advice; None: no step is complete, or nothing would shorten it by 5 %."""
    if found is None or not found.advice:
        return None
    first = found.advice[0]
    cause = first.cause.partition(":")[0]
    late = _RANK.match(first.claim) if cause == "straggler" else None
    words = f"rank:{late[1]}" if late else _SHOWN.get(cause, "collective")
    return Notice(first.claim, f"{first.change} A step takes {first.gain:.0%} less then.", words)


def figures(summary: TimelineSummary) -> list[dict[str, str]]:
    """Return the numbers above a timeline: each with its name, value and a remark."""
    ranks, entries = summary.facts.ranks, []
    if summary.facts.step is not None:
        mean, spread = summary.facts.step
        entries.append(("step", format_duration(mean), f"± {format_duration(spread)}"))
    total = sum(rank.known for rank in ranks)
    if total:
        computing, waiting = sum(rank.computing for rank in ranks), sum(rank.waiting for rank in ranks)
        entries.append(("computing", f"{computing / total:.0%}", "of the time"))
        entries.append(("waiting", f"{waiting / total:.0%}", f"{format_duration(waiting / len(ranks))} per rank"))
    if summary.facts.overlap is not None:
        communicating = sum(rank.communicating for rank in ranks) / len(ranks)
        remark = f"of {format_duration(communicating)} per rank"
        entries.append(("communication hidden", f"{summary.facts.overlap:.0%}", remark))
    if summary.steps:
        step = summary.steps[0]
        entries.append(("bubble", f"{step.bubble:.0%}", f"ideal {step.ideal_bubble:.0%}"))
    return [{"name": name, "value": value, "remark": remark} for name, value, remark in entries]


def page_facts(summary: TimelineSummary, ranks: Sequence[int], *, running: bool = False) -> dict[str, Any]:
    """Return the summary as `static/timeline/facts.js` reads it: text, and boxes of pipeline steps in seconds.

    Args:
        summary: What is shown.
        ranks: Rows, from the top.
        running: Whether a cell runs, whose first spans may not have come yet.
    """
    facts, steps, shown = summary.facts, summary.steps[:MAX_PIPELINES], set(ranks)
    notice = summary.notice
    more = summary.advice.advice[1:] if summary.advice is not None else ()
    return {
        "facts": {
            "figures": figures(summary),
            "notice": None if notice is None else {"claim": notice.claim, "text": notice.text, "filter": notice.filter},
            "advice": [str(one) for one in more],
            "shares": _shares(facts.ranks),
            "columns": [{"title": title, "token": token} for title, token in COLUMNS],
            "rows": _rows([rank for rank in facts.ranks if rank.rank in shown][:MAX_ROWS], facts.ranks),
            "notes": [
                *([] if facts.ranks or running else [NOTHING_YET]),
                *omitted_pipelines(summary),
                *facts.clock_notes,
            ],
        },
        "pipelines": [_page_step(step, _MAX_BOXES // (2 * len(steps))) for step in steps],
    }


def _shares(ranks: Sequence[RankFacts]) -> dict[str, float]:
    """Return the share of the ranks' time by kind, 0 to 1."""
    total = sum(rank.known for rank in ranks)
    if not total:
        return {}
    sums = {
        "forward": sum(rank.forward for rank in ranks),
        "backward": sum(rank.backward for rank in ranks),
        "optimizer": sum(rank.optimizer for rank in ranks),
        "other": sum(rank.own_code for rank in ranks),
        "wait": sum(rank.waiting for rank in ranks),
    }
    return {kind: round(seconds / total, 4) for kind, seconds in sums.items()}


def _rows(shown: Sequence[RankFacts], ranks: Sequence[RankFacts]) -> list[dict[str, Any]]:
    """Return the rows of some ranks; the longest bars are those of all ranks."""
    texts = dict(zip([rank.rank for rank in ranks], rank_cells(ranks), strict=True))
    scale = max((other.known for other in ranks), default=0.0) or 1.0
    most_waited = scale * max(1, len(ranks) - 1)
    return [{"rank": rank.rank, "cells": _bars(rank, texts[rank.rank], scale, most_waited)} for rank in shown]


def _bars(rank: RankFacts, texts: Sequence[str], scale: float, most_waited: float) -> list[dict[str, Any]]:
    """Return a rank's cells with the lengths of their bars: times on one scale; what is moved has none."""
    shares: list[float | None] = [seconds / scale for seconds in _times(rank)]
    shares.append(rank.hidden / rank.communicating if rank.communicating else None)
    shares += [rank.waited_for / most_waited, None]
    return [
        {"text": text, "share": None if share is None else round(share, 4)}
        for text, share in zip(texts, shares, strict=True)
    ]


def _times(rank: RankFacts) -> tuple[float, ...]:
    return rank.forward, rank.backward, rank.optimizer, rank.own_code, rank.waiting, rank.communicating


def rank_cells(ranks: Sequence[RankFacts]) -> list[tuple[str, ...]]:
    """Return the texts of each rank in the order of `COLUMNS`; the durations of a column have one unit."""
    columns = zip(*((*_times(rank), rank.waited_for) for rank in ranks), strict=True)
    *times, waited_for = map(format_durations, columns) if ranks else [()]
    hidden = [f"{rank.hidden / rank.communicating:.0%}" if rank.communicating else "–" for rank in ranks]
    moved = [format_bytes(rank.bytes) if rank.bytes else "–" for rank in ranks]
    return list(zip(*times, hidden, waited_for, moved, strict=True))


def format_durations(seconds: Sequence[float]) -> list[str]:
    """Format durations that stand below each other, in the unit and with the digits of the longest; 0 is a dash."""
    longest = max(seconds, default=0.0)
    if longest >= 99.95:
        return [format_seconds(value) if value else "–" for value in seconds]
    unit, name = (1.0, "s") if longest >= 0.9995 else (1e-3, "ms") if longest >= 0.9995e-3 else (1e-6, "µs")
    digits = 2 if longest / unit < 9.995 else 1 if longest / unit < 99.95 else 0
    digits = 2 if name == "s" else digits if name == "ms" else 0
    return [f"{value / unit:.{digits}f} {name}" if value else "–" for value in seconds]


def format_duration(seconds: float) -> str:
    """Format a duration: ``464 µs``, ``12.3 ms``, ``2.1 s``."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else format_seconds(seconds)


def omitted_pipelines(summary: TimelineSummary) -> list[str]:
    """Return a sentence if not all pipelines are shown."""
    count = len(summary.steps) - MAX_PIPELINES
    pipelines = "1 older pipeline is" if count == 1 else f"{count} older pipelines are"
    return [f"{pipelines} left out."] if count > 0 else []


# ---- pipelines -------------------------------------------------------------------------------------------------------


def describe_step(step: PipelineStep) -> str:
    """Describe the last step of a pipeline."""
    spans = step.measured
    return (
        f"{_shape(step)}: the last step took {format_duration(step_seconds(spans))} with a bubble of "
        f"{step.bubble:.0%}; ideal: {format_duration(step_seconds(step.ideal))}, {step.ideal_bubble:.0%}"
    )


def _shape(step: PipelineStep) -> str:
    ranks, stages = {span.rank for span in step.measured}, {span.stage for span in step.measured}
    microbatches = {span.microbatch for span in step.measured}
    return f"pipeline of {name_ranks(ranks)}, {len(stages)} stages, {len(microbatches)} microbatches"


def step_seconds(spans: Sequence[Span]) -> float:
    """Return the length of a step in seconds."""
    return (max(span.end_ns for span in spans) - min(span.start_ns for span in spans)) / 1e9


def _above_ideal(step: PipelineStep) -> str:
    """Return how much longer a step took than the ideal one; empty: hardly longer."""
    measured, ideal = step_seconds(step.measured), step_seconds(step.ideal)
    return format_duration(measured - ideal) if measured > _MIN_ABOVE_IDEAL * ideal else ""


def _page_step(step: PipelineStep, max_boxes: int) -> dict[str, Any]:
    ranks = sorted({span.rank for span in step.measured})
    measured, ideal = step_seconds(step.measured), step_seconds(step.ideal)

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
        "text": _shape(step).removeprefix("pipeline of "),
        "above": f"{above} per step above ideal" if (above := _above_ideal(step)) else "",
        "ranks": ranks,
        "seconds": max(measured, ideal),
        "omitted": max(0, len(step.measured) - max_boxes),
        "rows": [
            {
                "title": "measured", "bubble": f"{step.bubble:.0%}", "seconds": measured,
                "boxes": boxes(step.measured),
            },
            {"title": "ideal", "bubble": f"{step.ideal_bubble:.0%}", "seconds": ideal, "boxes": boxes(step.ideal)},
        ],
    }  # fmt: skip


class StepAdvice(Struct, frozen=True):
    """The advice on some steps."""

    recording: Recording
    advice: tuple[Advice, ...]
    cell: str
    """Such as ``In [3]``; empty: the running one."""

    @property
    def heading(self) -> str:
        """What was looked at."""
        steps = "the last step" if self.recording.num_steps == 1 else f"the last {self.recording.num_steps} steps"
        length = format_duration(self.recording.measured_s)
        return f"Advice on {steps} of {self.cell or 'the running cell'}, {length} each"

    @property
    def lines(self) -> list[str]:
        """One sentence or more for each advice, or that there is none."""
        return [str(one) for one in self.advice] or ["No change that this knows would shorten a step by 5 % or more."]


def step_advice(table: SpanTable) -> StepAdvice | None:
    """Return the advice on the last cell with at least two optimizer steps on all ranks; None: there is none."""
    table = table.pick(np.arange(len(table)) >= len(table) - _MAX_SPANS)
    cells: dict[tuple[str, int], tuple[int, int]] = {}
    for span in table.pick(table.of_kind("cell")).spans():
        run = next((key for key, own in cells.items() if key[0] == span.name and span.start_ns < own[1]), None)
        own = cells.get(run or ("", 0), (span.start_ns, span.end_ns))
        cells[run or (span.name, span.start_ns)] = (min(own[0], span.start_ns), max(own[1], span.end_ns))
    last = sorted(((*times, name) for (name, _), times in cells.items()), reverse=True)[:_MAX_CELLS]
    windows = [(last[0][1] if last else 0, None, ""), *last]
    for start, end, name in windows:
        part = table.between(start, end)
        recording = record_steps(part.spans(), part.groups)
        if recording is not None:
            return StepAdvice(recording, tuple(advise(recording, pipeline_steps(part)))[:_MAX_ADVICE], name)
    return None


def require_advice(table: SpanTable) -> StepAdvice:
    """Return what `step_advice` does.

    Raises:
        UsageError: no training step is recorded.
    """
    found = step_advice(table)
    if found is None:
        raise UsageError(
            "%timeline --advise: no training step is recorded. Open `%timeline`, run a cell with at least two "
            "optimizer steps on all ranks, then ask again."
        )
    return found


def advice_bundle(found: StepAdvice) -> dict[str, str]:
    """Return the advice as `text/html` and `text/plain`."""
    items = "".join(f'<li style="margin:2px 0">{escape(line)}</li>' for line in found.lines)
    body = f'<ol style="margin:4px 0;padding-left:2em">{items}</ol>'
    numbered = [f"{number}. {line}" for number, line in enumerate(found.lines, start=1)]
    lines = numbered if found.advice else found.lines
    return {
        "text/html": html.figure(body if found.advice else escape(found.lines[0]), heading=found.heading),
        "text/plain": "\n".join([f"{found.heading}:", *(f"  {line}" for line in lines)]),
    }
