"""What would shorten a training step, as text and as HTML: the advice that a timeline's spans give."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from axon_nb.cluster.inspection.span_table import SpanTable
from axon_nb.errors import UsageError
from axon_nb.records.performance.advice import Advice, advise
from axon_nb.records.performance.replay import Recording
from axon_nb.records.performance.steps import record_steps
from axon_nb.widgets import html
from axon_nb.widgets.timeline.content import format_duration
from axon_nb.widgets.timeline.pipelines import pipeline_steps

_MAX_SPANS = 20_000
"""The last ones are read."""
_MAX_CELLS = 8
"""Of the last ones, that with training steps is taken."""
_MAX_ADVICE = 5


@dataclass(frozen=True, slots=True)
class StepAdvice:
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


def add_advice(facts: dict[str, Any], table: SpanTable) -> dict[str, Any]:
    """Return what `content.page_facts` returned, with the advice that the spans give, for a page."""
    found = step_advice(table)
    lines = [] if found is None else [str(one) for one in found.advice]
    return {**facts, "facts": {**facts["facts"], "advice": lines}}


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
