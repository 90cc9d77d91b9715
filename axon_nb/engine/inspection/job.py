"""What this rank tells of the job that it runs, to whoever watches; answered while the main thread is busy or stuck.

Bars of plain tqdm on this rank, read when somebody looks. Private hooks: tqdm's set of open bars and its `close`.

Where they are missing such bars are drawn in the cell's output as ever, and not in `%watch`.

Rounds of optimizer steps on this rank: a training step, however many optimizers it has.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from axon_nb.engine.groups import activity
from axon_nb.engine.session import current
from axon_nb.records.protocol.inspection import JobRequest
from axon_nb.records.spans import covered_ns, ring
from axon_nb.records.telemetry import RankState, running_cell
from axon_nb.records.training.job import JobReport, MetricRow, RateMeter
from axon_nb.records.training.metrics import metrics
from axon_nb.records.training.progress import Bar, bars

__all__ = ["install_rounds", "job_report", "missing_tqdm_hooks", "rounds", "tqdm_bars"]

_KEPT = 16
_closed: deque[tuple[int, Bar]] = deque(maxlen=_KEPT)
_hooked: list[type] = []


def missing_tqdm_hooks() -> list[str]:
    """Names of the hooks that this tqdm does not have; empty when it is not loaded."""
    kind = _kind()
    return [name for name in ("_instances", "close") if kind is not None and not hasattr(kind, name)]


def _kind() -> Any:
    return getattr(sys.modules.get("tqdm.std"), "tqdm", None)


def tqdm_bars() -> list[Bar]:
    """The open bars, and those that were closed in this cell since somebody looked first."""
    kind = _kind()
    if kind is None or missing_tqdm_hooks():
        return []
    if kind not in _hooked:
        _hook(kind)
    cell = running_cell()
    closed = list(_closed)
    last = cell or (closed[-1][0] if closed else 0)
    found = {(bar.depth, bar.desc): bar for number, bar in closed if number == last}
    for bar in sorted(_living(kind), key=lambda bar: getattr(bar, "start_t", 0.0)):
        look = _look(bar, is_over=False)
        found[look.depth, look.desc] = look
    return [found[key] for key in sorted(found)]


def _living(kind: Any) -> list[Any]:
    for _ in range(3):
        try:
            return [bar for bar in kind._instances if not bar.disable and hasattr(bar, "start_t")]
        except RuntimeError:  # the main thread has begun or ended a bar meanwhile
            continue
    return []


def _look(bar: Any, *, is_over: bool) -> Bar:
    total = None if bar.total is None else int(bar.total)
    seconds = max(0.0, time.time() - bar.start_t)
    depth = abs(int(getattr(bar, "pos", 0) or 0))
    return Bar((bar.desc or "").rstrip(": "), depth, int(bar.n), total, seconds, is_over, str(bar.unit))


def _hook(kind: Any) -> None:
    """Have bars tell how far they came when they are closed."""
    _hooked.append(kind)
    close = kind.close

    def close_and_tell(self: Any) -> Any:
        if not self.disable and hasattr(self, "start_t"):
            _closed.append((running_cell(), _look(self, is_over=True)))
        return close(self)

    close_and_tell.__doc__ = close.__doc__
    kind.close = close_and_tell


rounds = RateMeter()
"""How fast they come."""
_seen: set[int] = set()


def install_rounds() -> None:
    """Count from now on."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Any, *_: Any) -> None:
    # One round has each optimizer once: ZeroRedundancyOptimizer steps another within its own step.
    if not _seen or id(optimizer) in _seen:
        _seen.clear()
        rounds.mark(time.monotonic_ns())
    _seen.add(id(optimizer))


_ROWS = 2000
_SPANS = 16384
_MIN_WINDOW_NS = 50_000_000
_COMMUNICATION = ("collective", "p2p")


def job_report(state: RankState, asked: JobRequest) -> JobReport:
    """What to tell of the job.

    Args:
        state: A sample of now.
        asked: Where to go on reading; at the start for one who has read another process, such as a rank that was
            replaced.
    """
    if asked.pid != os.getpid():
        asked = JobRequest()
    rows, position, lost = metrics.read(asked.position, _ROWS)
    pace = metrics.pace if metrics.pace.steps else rounds
    running = state.cell is not None
    rates = pace.rates(state.time_ns, running=running)
    items = (
        rates.items_per_s if pace is metrics.pace else metrics.pace.rates(state.time_ns, running=running).items_per_s
    )
    share, span_position = _communication(state.time_ns, asked.span_position, asked.since_ns)
    return JobReport(
        rank=state.rank,
        pid=os.getpid(),
        state=state,
        rows=tuple(MetricRow(row.step, row.run, row.is_first, row.values) for row in rows),
        position=position,
        lost=lost,
        is_last=len(rows) < _ROWS,
        steps=pace.steps,
        steps_per_s=rates.steps_per_s,
        items_per_s=items,
        span_position=span_position,
        communication=share,
        bars=(*bars(), *tqdm_bars()),
    )


def _communication(now: int, span_position: int, since_ns: int) -> tuple[float | None, int]:
    spans, span_position, lost = ring.since(span_position, _SPANS)
    known = current().config.backend != "nccl"  # whose own groups record no spans
    if not known or not since_ns or now - since_ns < _MIN_WINDOW_NS or lost:
        return None, span_position
    stretches = [(span.start_ns, span.end_ns) for span in spans if span.kind in _COMMUNICATION]
    stretches += [(call.started_ns, now) for call in activity.pending()]
    return covered_ns(stretches, since_ns, now) / (now - since_ns), span_position
