"""The driver of one running cell: it passes events to `transition` and performs the effects that this returns."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from axon_nb.cluster.cells import transitions
from axon_nb.cluster.cells.abort import AbortController
from axon_nb.cluster.cells.options import CellDebugger, LiveView, RankProgress, Steppable
from axon_nb.cluster.cells.source import mentions
from axon_nb.cluster.cells.transitions import Cell, State, transition
from axon_nb.cluster.failures import RankError
from axon_nb.cluster.output import CellOutput
from axon_nb.cluster.output.sinks import WaitNotice
from axon_nb.cluster.rpc import RankClient
from axon_nb.records.protocol.cells import KEY, CellFacts, CellOutcome, execute_content, read_outcome
from axon_nb.records.protocol.inspection import DebuggerLine, PausedEvent
from axon_nb.records.protocol.wire import ProtocolError, Request, decode, encode, is_call_source, message_type

_IDLE_POLL_S = 0.1
_BUSY_POLL_S = 0.005
"""The poll interval while something is being decided."""
_LONG_S = 0.3
"""A cell is long once it has run for this time."""
_VIEW_INTERVAL_S = 0.2
"""How often the live view is updated."""
_PAUSED = message_type(PausedEvent)


class CellRun:
    """One running cell: events come from the client's IO thread, ticks from the notebook's thread."""

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
        debugger: CellDebugger | None = None,
        token: str = "",
    ) -> None:
        self.ranks = list(ranks)
        self.token = token or uuid.uuid4().hex
        self.number: int | None = None  # it names the cell in tracebacks
        self.is_call = False  # of axon_nb itself, such as a push
        self.output = output
        self.timeout_s = timeout_s
        self.on_late_reply: Callable[[int], object] = lambda rank: None
        self.on_late_output: Callable[[int, str, dict[str, Any]], None] = lambda rank, msg_type, content: None
        """Both are called from the IO thread if a rank that was reported as stuck finishes the cell, or prints."""
        self.stepper: threading.Thread | None = None
        """The thread that steps it; None: it has not started."""
        self.on_long: Callable[[], None] | None = None
        """Called once, on the notebook's thread, if the cell is long."""
        self.wake: Callable[[], None] = lambda: None
        """Called from any thread when `step` has something to do."""
        self.cell = Cell({rank: RankProgress() for rank in ranks}, can_recover=recover is not None)
        self._lock = threading.Lock()
        self._interrupts: deque[float] = deque()
        self._fetch: Callable[[float], None] = lambda now: None
        self._client, self._recover = client, recover
        self._recovery: Steppable | None = None
        self.abort = abort
        self._view, self._view_due = view, 0.0
        self._notice = notice
        self._debugger = debugger
        self._hidden = {"error"} if show_value else {"error", "execute_result"}
        self._messages: list[str] = []
        self._received: Counter[int] = Counter()
        """By rank, how many messages of the output channel have arrived."""
        self._expected: dict[int, int] = {}
        """By rank that has replied, how many it has sent, until they are here."""
        self._started_at, self._finished = time.monotonic(), False

    def reattach(self, run: str, fetch: Callable[[float], None], *, seconds: float, must_recover: bool) -> None:
        """Take over a cell that was sent `seconds` ago.

        Args:
            run: Id of its run.
            fetch: Called with the time at each step, to get new messages.
            seconds: How long ago it was sent.
            must_recover: Whether the groups must be rebuilt at the end, however the cell ends.
        """
        self.token, self._fetch = run, fetch
        self._started_at = time.monotonic() - seconds
        with self._lock:
            self.cell = msgspec.structs.replace(self.cell, must_recover=must_recover)

    def send(self, code: str, facts: CellFacts) -> None:
        """Send the cell; fields of `facts` that the run knows itself are filled in here."""
        facts = msgspec.structs.replace(
            facts,
            run=self.token,
            ranks=tuple(self.ranks),
            timeout=self.timeout_s,
            show_value="execute_result" not in self._hidden,
            quiet=self.output.quiet,
            subgroup=mentions(code, "subgroup"),
        )
        self.abort.run, self.number, self.is_call = self.token, facts.cell, is_call_source(code)
        self._messages = self._client.send_cells(self.ranks, execute_content(code), {KEY: encode(facts)}, self)

    def on_output(self, rank: int, msg_type: str, content: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Process something that a rank printed or displayed, or that it has paused; called from the IO thread."""
        if msg_type == _PAUSED:
            self._on_paused(rank, decode(PausedEvent, content))
        else:
            self._process(transitions.Output(rank, msg_type, content, metadata))
            self._process(transitions.Processed(time.monotonic(), rank))
        self._received[rank] += 1
        if self._received[rank] >= self._expected.get(rank, math.inf):
            del self._expected[rank]
            self.on_idle(rank)

    def _on_paused(self, rank: int, event: PausedEvent) -> None:
        if self._debugger is None:  # a notebook that reattached cannot ask
            self.request(rank, DebuggerLine(self.token, event.number, "continue"))
        else:
            self._debugger.on_paused(rank, event)
            self.wake()

    def on_idle(self, rank: int) -> None:
        """Record that a rank has sent all its output; called from the IO thread."""
        self._process(transitions.Idle(rank))

    def on_reply(self, rank: int, content: dict[str, Any]) -> None:
        """Process a rank's reply, which says that it has finished the cell; called from the IO thread."""
        try:
            outcome = read_outcome(content)
        except ProtocolError as error:
            outcome = CellOutcome("error", type(error).__name__, str(error))
        self.on_outcome(rank, outcome)

    def on_outcome(self, rank: int, outcome: CellOutcome) -> None:
        """Process how the cell ended on a rank; called from the IO thread, or while reattaching."""
        outputs = outcome.end.outputs
        is_idle = outputs is not None and self._received[rank] >= outputs
        if outputs is not None and not is_idle:
            self._expected[rank] = outputs
        self._process(transitions.Reply(time.monotonic(), rank, outcome, self.abort.aborting, idle=is_idle))

    def on_death(self, rank: int, reason: str) -> None:
        """Record that a rank's process is gone; `reason` reads after its name. Called from any thread."""
        self._process(transitions.Death(time.monotonic(), rank, reason))

    def on_lost(self, reason: str) -> None:
        """Record that the whole cluster is gone; called from any thread."""
        self._process(transitions.Lost(reason))

    def request(self, rank: int, request: Request[Any]) -> None:
        """Send a request to a rank that runs the cell."""
        with contextlib.suppress(KeyError):  # it has just died
            self._client.request(rank, request)

    def interrupt(self) -> None:
        """Interrupt the cell on the user's behalf; a second interrupt also replaces ranks that are in C code."""
        self._interrupts.append(time.monotonic())  # called by signal handlers too, which must not wait for the lock
        self.wake()

    def step(self) -> bool:
        """Do what is due, on the notebook's thread; return True once the cell is done."""
        now = time.monotonic()
        if (due := self.output.next_due()) is not None and now >= due:
            self.output.flush()
        if self._view is not None and now >= self._view_due:
            self._view_due = now + _VIEW_INTERVAL_S
            self._view.flush()
        while self._interrupts:
            self._process(transitions.Interrupt(self._interrupts.popleft()))
        if self._is_done:
            return True
        if self.on_long is not None and now - self._started_at > _LONG_S:
            report, self.on_long = self.on_long, None
            report()
        if self._debugger is not None:
            self._started_at += self._debugger.step(self)  # the user's time does not count
        self._fetch(now)
        if self._recovery is None and self.cell.state is State.RECOVERING:
            self._begin_recovery()  # a signal handler raised before it had begun
        if self._recovery is not None:
            if self._recovery.step():
                self._process(transitions.Recovered())
            return self._is_done
        if self._notice is not None:
            self._notice.show(self.abort.slow if self.cell.failed_at is None else "", now)
        if self.timeout_s is not None and now - self._started_at > self.timeout_s and not self.abort.aborting:
            self._process(transitions.Timeout())
        self._process(self._tick(now))
        return self._is_done

    @property
    def _is_done(self) -> bool:
        return self.cell.state is State.DONE

    def _tick(self, now: float) -> transitions.Tick:
        abort, progress, unfinished = self.abort, self.cell.ranks, self.unfinished
        acknowledged = abort.acknowledged(now, {rank for rank in progress if progress[rank].is_gone})
        drained = self.output.drained
        if abort.aborted_at is None:
            return transitions.Tick(now, drained, acknowledged)
        return transitions.Tick(
            now,
            drained,
            acknowledged,
            abort.aborted_at,
            stuck={rank: abort.stuck(rank) for rank in unfinished},
            unresponsive=frozenset(filter(abort.is_unresponsive, unfinished)),
            stopped=frozenset(filter(abort.is_stopped, unfinished)),
        )

    def _process(self, event: transitions.Event) -> None:
        with self._lock:
            self.cell, effects = transition(self.cell, event)
            if (view := self._view) is not None:
                for effect in effects:
                    if isinstance(effect, transitions.RankEnded):  # once unlocked, a tick may end the cell
                        view.rank_ended(effect.rank, effect.activity, effect.at)
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: transitions.Effect) -> None:
        match effect:
            case transitions.Wake():
                self.wake()
            case transitions.ShowOutput(output, is_late):
                self._show(output, is_late=is_late)
            case transitions.RankDone(rank):
                self.output.rank_done(rank)
            case transitions.LateReply(rank):
                self.on_late_reply(rank)
            case transitions.ResendAbort():
                self.abort.resend()
            case transitions.Abort():
                self._step_abort(effect)
            case transitions.Recover():
                self.finish()
                self._begin_recovery()

    def _show(self, output: transitions.Output, *, is_late: bool) -> None:
        if is_late:
            self.on_late_output(output.rank, output.kind, output.content)
            return
        if output.kind not in self._hidden and self.output.feed(
            output.rank, output.kind, output.content, output.metadata
        ):
            self.wake()

    def _begin_recovery(self) -> None:
        assert self._recover is not None
        self._recovery = self._recover()

    def _step_abort(self, effect: transitions.Abort) -> None:
        self.abort.step(time.monotonic(), self.unfinished, effect)
        if self.abort.aborting and not self.cell.aborting:
            self._process(transitions.Aborted())

    def poll_interval(self) -> float:
        """Seconds until `step` should be called again unless something wakes the caller before."""
        now, cell = time.monotonic(), self.cell
        times = [now + _IDLE_POLL_S]
        if (due := self.output.next_due()) is not None:
            times.append(due)
        if self._view is not None:
            times.append(self._view_due)
        if self.timeout_s is not None and cell.state in {State.SENT, State.RUNNING} and not cell.timed_out:
            times.append(self._started_at + self.timeout_s)
        if self.is_ending or any(progress.replied_at and not progress.idle for progress in cell.ranks.values()):
            times.append(now + _BUSY_POLL_S)
        return max(0.0, min(times) - now)

    @property
    def is_ending(self) -> bool:
        """Whether it has failed, was interrupted or is aborted, or the groups are rebuilt after it."""
        cell = self.cell
        failed = cell.failed_at is not None or self.interrupted_at is not None or self.abort.aborting
        return failed or cell.state is State.RECOVERING

    @property
    def explanation(self) -> str:
        """Why the cell could not finish by itself; empty if it could."""
        return self.abort.explanation

    def finish(self) -> None:
        """Show the rest of the output; a second call does nothing."""
        if self._finished:
            return
        self._finished = True
        if not self.unfinished:
            self._client.forget(self._messages)
        if self._notice is not None:
            self._notice.hide()
        self.output.flush(final=True)

    @property
    def unfinished(self) -> list[int]:
        """The ranks that have not finished the cell."""
        return self.cell.unfinished

    @property
    def interrupted_at(self) -> float | None:
        """When the user interrupted it; None: not at all."""
        pending = list(self._interrupts)  # one that came after the last step counts as well
        return pending[0] if self.cell.interrupted_at is None and pending else self.cell.interrupted_at

    @property
    def errors(self) -> dict[int, RankError]:
        """Failures by rank."""
        return self.cell.errors
