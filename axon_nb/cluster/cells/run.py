"""State machine of one running cell; the only place that decides when it is done."""

from __future__ import annotations

import dataclasses
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from axon_nb.cluster.cells.abort import AbortController
from axon_nb.cluster.cells.options import LiveView, RankProgress, Steppable, describe_abort, was_aborted
from axon_nb.cluster.cells.source import mentions
from axon_nb.cluster.failures.report import RankError
from axon_nb.cluster.output import CellOutput
from axon_nb.cluster.output.wait_notice import WaitNotice
from axon_nb.cluster.rpc.client import RankClient
from axon_nb.records.protocol.cells import KEY, CellEnd, CellFacts, CellOutcome, execute_content, read_outcome
from axon_nb.records.protocol.errors import ProtocolError
from axon_nb.records.protocol.wire import encode

__all__ = ["CellRun"]

_IDLE_POLL_S = 0.1
_BUSY_POLL_S = 0.005
"""The poll interval while something is being decided."""
_VIEW_INTERVAL_S = 0.2
"""How often the live view is updated."""
_GIVE_UP_S = 10.0
"""Ranks that do not reply for this long after an abort are reported as stuck, and the cell is done."""
_STOPPED_GIVE_UP_S = 1.0
"""Ranks that are stopped (SIGSTOP) are reported as stuck this long after an abort."""
_SECOND_INTERRUPT_AFTER_S = 1.0
"""An interrupt counts as the second one if this much time has passed since the first."""
_SECOND_INTERRUPT_GRACE_S = 0.5
"""Ranks that are still in C code this long after the second interrupt are replaced."""
_INTERRUPT_DELAY_S, _INTERRUPT_DELAY_STEPS = 0.06, 10
"""Jupyter interrupts a kernel before it restarts it: an interrupt takes effect after this time and number of steps."""


class CellRun:
    """The state of one running cell: fed by the client's IO thread, stepped by the notebook's thread."""

    def __init__(
        self,
        client: RankClient,
        ranks: Sequence[int],
        output: CellOutput,
        abort: AbortController,
        *,
        timeout_s: float | None = None,
        view: LiveView | None = None,
        show_value: bool = True,
        recover: Callable[[], Steppable] | None = None,
        notice: WaitNotice | None = None,
    ) -> None:
        self.ranks = list(ranks)
        self.token = uuid.uuid4().hex
        self.output = output
        self.failed_order: list[int] = []
        self.timed_out = False
        self.interrupted_at: float | None = None
        self._steps_since_interrupt = 0
        self.to_replace: list[int] = []
        """Ranks in C code that the user, by a second interrupt, wants to be replaced."""
        self.lost = ""
        """Why the cluster is gone; empty while it is there."""
        self.on_late_reply: Callable[[int], None] = lambda rank: None
        self.on_late_output: Callable[[int, str, dict[str, Any]], None] = lambda rank, msg_type, content: None
        """Both are called from the IO thread if a rank that was reported as stuck finishes the cell, or prints."""
        self.wake: Callable[[], None] = lambda: None
        """Called from any thread when `step` has something to do."""
        self.replies: dict[int, CellEnd] = {}
        """By rank, what its reply says about the cell, such as what was measured."""
        self.needs_recovery = False
        """Whether the groups must be rebuilt at the end, however the cell ends."""
        self._fetch: Callable[[float], None] = lambda now: None
        self._client = client
        self._recover = recover
        self._abort = abort
        self._view = view
        self._notice = notice
        self._hidden = {"error"} if show_value else {"error", "execute_result"}
        self._progress = {rank: RankProgress() for rank in ranks}
        self._lock = threading.Lock()
        self._messages: list[str] = []
        self._started_at = time.monotonic()
        self.timeout_s = timeout_s
        self._first_failure: float | None = None
        self._second_interrupt_at: float | None = None
        self._recovery: Steppable | None = None
        self._communicated = False
        self._view_due = 0.0
        self._gave_up = self._finished = False

    def reattach(self, run: str, fetch: Callable[[float], None], *, seconds: float) -> None:
        """Take over a cell that was sent `seconds` ago; each step calls `fetch` with the time, to get new messages."""
        self.token, self._fetch = run, fetch
        self._started_at = time.monotonic() - seconds

    def send(self, code: str, facts: CellFacts) -> None:
        """Send the cell; fields of `facts` that the run knows itself are filled in here."""
        facts = dataclasses.replace(
            facts,
            run=self.token,
            ranks=tuple(self.ranks),
            timeout=self.timeout_s,
            show_value="execute_result" not in self._hidden,
            quiet=self.output.quiet,
            subgroup=mentions(code, "subgroup"),
        )
        self._abort.run = self.token
        self._messages = self._client.send_cells(self.ranks, execute_content(code), {KEY: encode(facts)}, self)

    def on_output(self, rank: int, msg_type: str, content: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Process something that a rank printed or displayed; called from the IO thread."""
        if self._finished:
            self.on_late_output(rank, msg_type, content)
        elif msg_type not in self._hidden and self.output.feed(rank, msg_type, content, metadata):
            self.wake()

    def on_idle(self, rank: int) -> None:
        """Record that a rank has sent all its output; called from the IO thread."""
        self._progress[rank].idle = True
        self.output.rank_done(rank)
        if self._progress[rank].replied_at:
            self.wake()

    def on_reply(self, rank: int, content: dict[str, Any]) -> None:
        """Process a rank's reply, which says that it has finished the cell; called from the IO thread."""
        try:
            outcome = read_outcome(content)
        except ProtocolError as error:
            outcome = CellOutcome("error", type(error).__name__, str(error))
        self.on_outcome(rank, outcome)

    def on_outcome(self, rank: int, outcome: CellOutcome) -> None:
        """Process how the cell ended on a rank; called from the IO thread, or while reattaching."""
        progress, end = self._progress[rank], outcome.end
        self.replies[rank] = end
        progress.seconds, progress.has_value = end.seconds, end.has_value
        self._communicated = self._communicated or bool(end.calls)
        self.needs_recovery = self.needs_recovery or bool(end.left)
        if outcome.status == "ok":
            pass
        elif was_aborted(outcome.ename, outcome.evalue, aborting=self._abort.aborting):
            self._fail(rank, RankError(rank, "aborted", outcome.ename, describe_abort(end.aborted_at)))
        else:
            self._fail(rank, RankError(rank, "raised", outcome.ename, outcome.evalue, outcome.traceback))
        progress.replied_at = time.monotonic()
        self.wake()
        if self._gave_up:
            self.on_late_reply(rank)
        if self._view is not None:
            self._view.rank_finished(rank, failed=progress.error is not None and progress.error.kind != "aborted")

    def on_death(self, rank: int, reason: str) -> None:
        """Record that a rank's process is gone; `reason` reads after its name. Called from any thread."""
        if (progress := self._progress.get(rank)) is None:
            return
        progress.gone_at = progress.gone_at or time.monotonic()
        if progress.replied_at:
            return
        self._fail(rank, RankError(rank, "died", "", reason))
        progress.idle = True
        progress.replied_at = time.monotonic()
        self.output.rank_done(rank)
        self.wake()

    def on_lost(self, reason: str) -> None:
        """Record that the whole cluster is gone; called from any thread."""
        self.lost = reason
        self.wake()

    def _fail(self, rank: int, error: RankError) -> None:
        with self._lock:
            self._progress[rank].error = error
            self.failed_order.append(rank)
            self._first_failure = self._first_failure or time.monotonic()

    def interrupt(self) -> None:
        """Interrupt the cell on the user's behalf; a second interrupt also replaces ranks that are in C code."""
        now = time.monotonic()
        if self.interrupted_at is None:
            self.interrupted_at = now
        elif self._second_interrupt_at is None and now - self.interrupted_at >= _SECOND_INTERRUPT_AFTER_S:
            self._second_interrupt_at = now
        self._abort.resend()
        self.wake()

    @property
    def unfinished(self) -> list[int]:
        """The ranks that have not finished the cell."""
        return [rank for rank, progress in self._progress.items() if not progress.replied_at]

    def step(self) -> bool:
        """Do what is due, on the notebook's thread; return True once the cell is done."""
        now = time.monotonic()
        due = self.output.next_due()
        if due is not None and now >= due:
            self.output.flush()
        if self._view is not None and now >= self._view_due:
            self._view_due = now + _VIEW_INTERVAL_S
            self._view.flush()
        if self.lost:
            return True
        self._fetch(now)
        if self._recovery is not None:
            return self._recovery.step()
        if self._notice is not None:
            self._notice.show(self._abort.slow if self._first_failure is None else "", now)
        if self._is_done(now):
            gone = {rank for rank, progress in self._progress.items() if progress.is_gone}
            return self._abort.acknowledged(now, gone) and not self._start_recovery()
        if self.timeout_s is not None and now - self._started_at > self.timeout_s and not self._abort.aborting:
            self.timed_out = True
        self._steps_since_interrupt += self.interrupted_at is not None
        self._abort.step(
            now,
            self.unfinished,
            failed_at=self._first_failure,
            died=any(error.kind == "died" for error in self.errors.values()),
            interrupted=self._steps_since_interrupt >= _INTERRUPT_DELAY_STEPS
            and now - (self.interrupted_at or now) >= _INTERRUPT_DELAY_S,
            timed_out=self.timed_out,
        )
        return False

    def _is_done(self, now: float) -> bool:
        if self.output.drained and all(progress.is_done(now) for progress in self._progress.values()):
            return True
        aborted_at, second_at = self._abort.aborted_at, self._second_interrupt_at
        if aborted_at is None:
            return False
        replace = second_at is not None and now - second_at > _SECOND_INTERRUPT_GRACE_S
        if replace and self._recover is not None and all(map(self._abort.is_unresponsive, self.unfinished)):
            self.to_replace = self.unfinished
        # If all have replied, their output is still on its way.
        stopped = bool(self.unfinished) and all(map(self._abort.is_stopped, self.unfinished))
        if self.to_replace or now - aborted_at > (_STOPPED_GIVE_UP_S if stopped else _GIVE_UP_S):
            self._gave_up = True
            for rank in self.unfinished:
                self._fail(rank, self._abort.stuck(rank))
            return True
        return False

    def _start_recovery(self) -> bool:
        needed = self.needs_recovery or self._abort.aborting or (bool(self.errors) and self._communicated)
        if needed and self._recover is not None:
            self.finish()
            self._recovery = self._recover()
            self.wake()
        return self._recovery is not None

    def poll_interval(self) -> float:
        """Seconds until `step` should be called again unless something wakes the caller before."""
        now = time.monotonic()
        times = [now + _IDLE_POLL_S]
        if (due := self.output.next_due()) is not None:
            times.append(due)
        if self._view is not None:
            times.append(self._view_due)
        if self.timeout_s is not None and not self.timed_out:
            times.append(self._started_at + self.timeout_s)
        deciding = self._first_failure is not None or self.interrupted_at is not None or self._abort.aborting
        if deciding or any(progress.replied_at and not progress.idle for progress in self._progress.values()):
            times.append(now + _BUSY_POLL_S)
        return max(0.0, min(times) - now)

    @property
    def explanation(self) -> str:
        """Why the cell could not finish by itself; empty if it could."""
        return self._abort.explanation

    def finish(self) -> None:
        """Show the rest of the output and accept no more messages; a second call does nothing."""
        if self._finished:
            return
        self._finished = True
        if not self.unfinished:
            self._client.forget(self._messages)
        if self._notice is not None:
            self._notice.hide()
        self.output.flush(final=True)

    @property
    def errors(self) -> dict[int, RankError]:
        """Failures by rank."""
        return {rank: progress.error for rank, progress in self._progress.items() if progress.error is not None}

    @property
    def seconds(self) -> dict[int, float]:
        """How long the cell ran on each rank, in seconds."""
        return {rank: progress.seconds for rank, progress in self._progress.items()}

    @property
    def ranks_with_value(self) -> list[int]:
        """The ranks whose last expression has a value."""
        return [rank for rank, progress in self._progress.items() if progress.has_value]
