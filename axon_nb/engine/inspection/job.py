"""Training progress of this rank: logged metrics, progress bars, step rates and time spent communicating.

Replies even while the main thread is busy or stuck. A training step steps each optimizer once, however many there are.

Private hooks: tqdm's set of open bars and its `close`, to read bars of plain tqdm when a view asks. If they are
missing, `%watch` does not show these bars; the cell's output still does.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from axon_nb.engine.session import RankSession
from axon_nb.records.hooks import missing_hooks
from axon_nb.records.protocol.contents import LayoutsReply, MemoryReply
from axon_nb.records.protocol.inspection import JobReply, JobRequest
from axon_nb.records.spans import covered_ns, ring
from axon_nb.records.telemetry import RankState, running_cell
from axon_nb.records.training.job import JobReport, MetricRow, RateMeter
from axon_nb.records.training.metrics import metrics
from axon_nb.records.training.progress import Bar, bars

_MAX_CLOSED = 16
_MAX_ROWS = 2000
_MAX_SPANS = 16384
_MIN_WINDOW_NS = 50_000_000
_COMMUNICATION = ("collective", "p2p")


RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT", JobReply, LayoutsReply, MemoryReply)


def with_cost(handler: Callable[[RequestT], ReplyT]) -> Callable[[RequestT], ReplyT]:
    """Add `spent_s` to a handler's reply: CPU seconds of the thread that answers."""

    def answer(request: RequestT) -> ReplyT:
        start = time.thread_time()
        reply = handler(request)
        return dataclasses.replace(reply, spent_s=time.thread_time() - start)

    return answer


class TqdmBars:
    """Reads the bars of plain tqdm, from the first request on."""

    def __init__(self) -> None:
        self._closed: deque[tuple[int, Bar]] = deque(maxlen=_MAX_CLOSED)
        self._hooked: type | None = None

    def read(self) -> list[Bar]:
        """Return the open bars, and those closed during this cell since the first call."""
        tqdm_class: Any = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
        if tqdm_class is None or missing_hooks("job.tqdm_bars"):
            return []
        if tqdm_class is not self._hooked:
            self._hooked = tqdm_class
            self._install_close_hook(tqdm_class)
        cell = running_cell()
        closed = list(self._closed)
        last = cell or (closed[-1][0] if closed else 0)
        bars = {(bar.depth, bar.desc): bar for number, bar in closed if number == last}
        for bar in sorted(_open_bars(tqdm_class), key=lambda bar: getattr(bar, "start_t", 0.0)):
            state = _bar_state(bar, is_over=False)
            bars[state.depth, state.desc] = state
        return [bars[key] for key in sorted(bars)]

    def _install_close_hook(self, tqdm_class: Any) -> None:
        """Record the final state of bars when they are closed."""
        close, closed = tqdm_class.close, self._closed

        def close_and_record(self: Any) -> Any:
            if not self.disable and hasattr(self, "start_t"):
                closed.append((running_cell(), _bar_state(self, is_over=True)))
            return close(self)

        close_and_record.__doc__ = close.__doc__
        tqdm_class.close = close_and_record


def _open_bars(tqdm_class: Any) -> list[Any]:
    for _ in range(3):
        try:
            return [bar for bar in tqdm_class._instances if not bar.disable and hasattr(bar, "start_t")]
        except RuntimeError:  # the main thread opened or closed a bar meanwhile
            continue
    return []


def _bar_state(bar: Any, *, is_over: bool) -> Bar:
    total = None if bar.total is None else int(bar.total)
    seconds = max(0.0, time.time() - bar.start_t)
    depth = abs(int(getattr(bar, "pos", 0) or 0))
    return Bar((bar.desc or "").rstrip(": "), depth, int(bar.n), total, seconds, is_over, str(bar.unit))


class TrainingJob:
    """The training progress of a rank.

    Args:
        session: This rank.
    """

    def __init__(self, session: RankSession) -> None:
        self._session = session
        self.steps = RateMeter()
        """Rate of training steps, counted from the steps of all optimizers."""
        self._stepped: set[int] = set()
        """Optimizers that have stepped in the current training step, by `id`."""
        self._tqdm_bars = TqdmBars()

    def count_steps(self) -> RemovableHandle:
        """Count training steps until the handle is removed."""
        return register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        # A training step steps each optimizer once: ZeroRedundancyOptimizer steps another within its own step.
        if not self._stepped or id(optimizer) in self._stepped:
            self._stepped.clear()
            self.steps.mark(time.monotonic_ns())
        self._stepped.add(id(optimizer))

    def report(self, state: RankState, request: JobRequest) -> JobReport:
        """Report the job's progress.

        Args:
            state: A current sample.
            request: Where to continue reading. If it refers to another process (the rank was replaced), reading
                restarts at the beginning.
        """
        if request.pid != os.getpid():
            request = JobRequest()
        rows, position, lost = metrics.read(request.position, _MAX_ROWS)
        meter = metrics.pace if metrics.pace.steps else self.steps
        running = state.cell is not None
        rates = meter.rates(state.time_ns, running=running)
        logged = rates if meter is metrics.pace else metrics.pace.rates(state.time_ns, running=running)
        share, span_position = self._communication_share(state.time_ns, request.span_position, request.since_ns)
        return JobReport(
            rank=state.rank,
            pid=os.getpid(),
            state=state,
            rows=tuple(MetricRow(row.step, row.run, row.is_first, row.values) for row in rows),
            position=position,
            lost=lost,
            is_last=len(rows) < _MAX_ROWS,
            steps=meter.steps,
            steps_per_s=rates.steps_per_s,
            items_per_s=logged.items_per_s,
            span_position=span_position,
            communication=share,
            bars=(*bars(), *self._tqdm_bars.read()),
        )

    def _communication_share(self, now: int, span_position: int, since_ns: int) -> tuple[float | None, int]:
        spans, span_position, lost = ring.since(span_position, _MAX_SPANS)
        known = self._session.config.backend != "nccl"  # NCCL's spans are read only for a timeline
        if not known or not since_ns or now - since_ns < _MIN_WINDOW_NS or lost:
            return None, span_position
        intervals = [(span.start_ns, span.end_ns) for span in spans if span.kind in _COMMUNICATION]
        intervals += [(call.started_ns, now) for call in self._session.groups.calls.pending()]
        return covered_ns(intervals, since_ns, now) / (now - since_ns), span_position
