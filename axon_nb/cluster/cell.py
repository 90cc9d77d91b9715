"""One cell on its way through the ranks. This is the one place that decides that a cell is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from axon_nb.cluster.client import RankClient
from axon_nb.cluster.output import CellOutput
from axon_nb.cluster.result import RankError

__all__ = ["CellRun", "LiveView"]

_IDLE_WAIT_S = 0.5
"""After a rank's reply its last output is waited for at most this long."""
_SETTLE_S = 0.05
"""Failures within this time of the first count as one event, so that the cause is not mistaken for its effect."""
_RELEASE_AFTER_S = 0.3
"""When a rank has failed, the others are interrupted after this long: they would wait for it."""
_GIVE_UP_S = 3.0
"""Ranks that do not react to interrupts for this long are told as stuck, and the cell ends."""
_REPEAT_S = 0.25


class LiveView(Protocol):
    """A view that is fed while the cell runs; flushed on the notebook's thread."""

    def flush(self) -> None:
        """Show what has come since."""

    def rank_over(self, rank: int, *, failed: bool) -> None:
        """From any thread: a rank has ended the cell."""


@dataclass(slots=True)
class _Part:
    """One rank's part in the cell."""

    replied_at: float = 0.0
    idle: bool = False
    error: RankError | None = None
    seconds: float = 0.0
    has_value: bool = False

    def over(self, now: float) -> bool:
        return bool(self.replied_at) and (self.idle or now - self.replied_at > _IDLE_WAIT_S)


class CellRun:
    """The state of one running cell: fed by the client's IO thread, stepped by the notebook's."""

    def __init__(
        self,
        client: RankClient,
        ranks: Sequence[int],
        output: CellOutput,
        *,
        timeout_s: float | None = None,
        view: LiveView | None = None,
    ) -> None:
        self.ranks = list(ranks)
        self.output = output
        self.failed_order: list[int] = []
        self.timed_out = False
        self.interrupted_at: float | None = None
        self.lost = ""
        """Why there is no cluster any more; empty while there is."""
        self.on_late_reply: Callable[[int], None] = lambda rank: None
        """Called from the IO thread when a rank ends the cell after it was given up."""
        self.wake: Callable[[], None] = lambda: None
        """Called from any thread when `step` has something to do."""
        self._client = client
        self._view = view
        self._parts = {rank: _Part() for rank in ranks}
        self._lock = threading.Lock()
        self._messages: list[str] = []
        self._started = time.monotonic()
        self.timeout_s = timeout_s
        self._first_failure: float | None = None
        self._release_since: float | None = None
        self._last_interrupt = 0.0
        self._view_due = 0.0
        self._given_up = False

    def send(self, code: str, cell: int | None) -> None:
        """Send the cell to its ranks."""
        content = {
            "code": code,
            "silent": False,
            "store_history": False,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": False,
        }
        self._messages = self._client.send_cells(self.ranks, content, {"axon_nb": {"cell": cell}}, self)

    def on_output(self, rank: int, msg_type: str, content: dict[str, Any], metadata: dict[str, Any]) -> None:
        """From the IO thread: a rank printed or displayed something."""
        if msg_type != "error" and self.output.feed(rank, msg_type, content, metadata):
            self.wake()

    def on_idle(self, rank: int) -> None:
        """From the IO thread: a rank has sent all its output."""
        self._parts[rank].idle = True
        self.output.rank_done(rank)
        if self._parts[rank].replied_at:
            self.wake()

    def on_reply(self, rank: int, content: dict[str, Any]) -> None:
        """From the IO thread: a rank has ended the cell."""
        ours = content.get("axon_nb", {})
        part = self._parts[rank]
        part.seconds = float(ours.get("seconds", 0.0))
        part.has_value = bool(ours.get("has_value"))
        if content["status"] != "ok":
            ename = content.get("ename", "")
            released = self.interrupted_at is not None or self._release_since is not None
            kind = "interrupted" if released and ename in ("KeyboardInterrupt", "CancelledError") else "raised"
            evalue = "was interrupted" if kind == "interrupted" else content.get("evalue", content["status"])
            self._fail(rank, RankError(rank, kind, ename, evalue, tuple(content.get("traceback", ()))))
        part.replied_at = time.monotonic()
        if self._given_up:
            self.on_late_reply(rank)
        if self._view is not None:
            self._view.rank_over(rank, failed=part.error is not None)
        self.wake()

    def on_death(self, rank: int, reason: str) -> None:
        """From any thread: the rank's process is gone; `reason` reads after its name."""
        part = self._parts.get(rank)
        if part is None or part.replied_at:
            return
        self._fail(rank, RankError(rank, "died", "", reason))
        part.idle = True
        part.replied_at = time.monotonic()
        self.output.rank_done(rank)
        self.wake()

    def on_lost(self, reason: str) -> None:
        """From any thread: the whole cluster is gone."""
        self.lost = reason
        self.wake()

    def _fail(self, rank: int, error: RankError) -> None:
        with self._lock:
            self._parts[rank].error = error
            self.failed_order.append(rank)
            if self._first_failure is None:
                self._first_failure = time.monotonic()

    def interrupt(self) -> None:
        """The user wants the cell to end."""
        if self.interrupted_at is None:
            self.interrupted_at = time.monotonic()
        self._last_interrupt = 0.0
        self.wake()

    @property
    def unfinished(self) -> list[int]:
        """The ranks that have not ended the cell."""
        return [rank for rank, part in self._parts.items() if not part.replied_at]

    def step(self) -> bool:
        """Do what is due on the notebook's thread; True when the cell is over."""
        now = time.monotonic()
        due = self.output.next_due()
        if due is not None and now >= due:
            self.output.flush()
        if self._view is not None and now >= self._view_due:
            self._view_due = now + 0.1
            self._view.flush()
        if self.lost or self._over(now):
            return True
        if self.timeout_s is not None and now - self._started > self.timeout_s and not self.timed_out:
            self.timed_out = True
            self._release_since = now
        self._release(now)
        return False

    def _over(self, now: float) -> bool:
        if self.output.drained and all(part.over(now) for part in self._parts.values()):
            return True
        begun = self._release_since if self.interrupted_at is None else self.interrupted_at
        if begun is not None and now - begun > _GIVE_UP_S:
            self._given_up = True
            for rank in self.unfinished:
                self._fail(rank, RankError(rank, "stuck", "", "is still busy and does not react to interrupts"))
            return True
        return False

    def _release(self, now: float) -> None:
        if (
            self._first_failure is not None
            and self._release_since is None
            and now - self._first_failure > _RELEASE_AFTER_S
        ):
            self._release_since = now
        if self.interrupted_at is None and self._release_since is None:
            return
        if now - self._last_interrupt >= _REPEAT_S:
            self._last_interrupt = now
            for rank in self.unfinished:
                self._client.request(rank, "axon_interrupt")

    def patience(self) -> float:
        """Seconds until `step` should be called again, if nothing wakes it before."""
        now = time.monotonic()
        times = [now + 1.0]
        if (due := self.output.next_due()) is not None:
            times.append(due)
        if self._view is not None:
            times.append(self._view_due)
        if self.timeout_s is not None and not self.timed_out:
            times.append(self._started + self.timeout_s)
        if self._first_failure is not None or self.interrupted_at is not None or self._release_since is not None:
            times.append(now + _SETTLE_S)
        if any(part.replied_at and not part.idle for part in self._parts.values()):
            times.append(now + _SETTLE_S)
        return max(0.0, min(times) - now)

    def finish(self) -> None:
        """The cell is over: show the rest, and take no more messages."""
        if not self.unfinished:
            self._client.forget(self._messages)
        self.output.flush(final=True)

    @property
    def errors(self) -> dict[int, RankError]:
        """Failures by rank."""
        return {rank: part.error for rank, part in self._parts.items() if part.error is not None}

    @property
    def seconds(self) -> dict[int, float]:
        """How long the cell ran on each rank, in seconds."""
        return {rank: part.seconds for rank, part in self._parts.items()}

    @property
    def ranks_with_value(self) -> list[int]:
        """The ranks whose last expression has a value."""
        return [rank for rank, part in self._parts.items() if part.has_value]
