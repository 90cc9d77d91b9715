"""What this rank tells of the job that it runs, to whoever watches; answered while the main thread is busy or stuck."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from axon_nb.engine.groups import activity
from axon_nb.engine.rounds import rounds
from axon_nb.engine.session import current
from axon_nb.engine.tqdm_bars import tqdm_bars
from axon_nb.records.coverage import covered_ns
from axon_nb.records.metrics import Logged, metrics
from axon_nb.records.progress import bars
from axon_nb.records.state import RankState
from axon_nb.records.trace import ring

__all__ = ["job_report"]

_ROWS = 2000
_SPANS = 16384
_MIN_WINDOW_NS = 50_000_000
_COMMUNICATION = ("collective", "p2p")


def job_report(state: RankState, *, pid: int, position: int, span_position: int, since_ns: int) -> dict[str, Any]:
    """The fields of `JobReport`, as JSON has them.

    Args:
        state: A sample of now.
        pid: The process that the other numbers are from; of another one, such as a rank that was replaced, reading
            begins at the start.
        position: Where to go on reading what was logged.
        span_position: Where to go on reading spans.
        since_ns: When this watcher asked last, on this rank's clock; 0: it has not.
    """
    if pid != os.getpid():
        position = span_position = since_ns = 0
    rows, position, lost = metrics.read(position, _ROWS)
    pace = metrics.pace if metrics.pace.steps else rounds
    running = state.cell is not None
    rates = pace.rates(state.time_ns, running=running)
    items = (
        rates.items_per_s if pace is metrics.pace else metrics.pace.rates(state.time_ns, running=running).items_per_s
    )
    share, span_position = _communication(state.time_ns, span_position, since_ns)
    return {
        "pid": os.getpid(),
        "state": dataclasses.asdict(state),
        "rows": [_row(row) for row in rows],
        "position": position,
        "lost": lost,
        "is_last": len(rows) < _ROWS,
        "steps": pace.steps,
        "steps_per_s": rates.steps_per_s,
        "items_per_s": items,
        "span_position": span_position,
        "communication": share,
        "bars": [dataclasses.asdict(bar) for bar in (*bars(), *tqdm_bars())],
    }


def _row(row: Logged) -> list[Any]:
    # JSON has no numbers that are not finite.
    values = {name: value if math.isfinite(value) else str(value) for name, value in row.values.items()}
    return [row.step, *row.run, row.is_first, values]


def _communication(now: int, span_position: int, since_ns: int) -> tuple[float | None, int]:
    spans, span_position, lost = ring.since(span_position, _SPANS)
    known = current().config.backend != "nccl"  # whose own groups record no spans
    if not known or not since_ns or now - since_ns < _MIN_WINDOW_NS or lost:
        return None, span_position
    stretches = [(span.start_ns, span.end_ns) for span in spans if span.kind in _COMMUNICATION]
    stretches += [(call.started_ns, now) for call in activity.pending()]
    return covered_ns(stretches, since_ns, now) / (now - since_ns), span_position
