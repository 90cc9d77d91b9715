"""One cell on its way through the ranks. This is the one place that decides that a cell is over."""

from __future__ import annotations

import dataclasses
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from axon_nb.cluster.cells.abort import Ending
from axon_nb.cluster.cells.options import LiveView, Part, Stepped, was_ended, where_ended
from axon_nb.cluster.cells.source import mentions
from axon_nb.cluster.failures.report import RankError
from axon_nb.cluster.output import CellOutput
from axon_nb.cluster.output.wait_notice import WaitNotice
from axon_nb.cluster.rpc.client import RankClient
from axon_nb.records.protocol.cells import KEY, CellEnd, CellFacts, execute_request
from axon_nb.records.protocol.errors import ProtocolError
from axon_nb.records.protocol.wire import decode, encode

__all__ = ["CellRun"]

_BUSY_S = 0.005
"""How often to look while something is being decided."""
_VIEW_S = 0.2
"""How often what ranks do is shown."""
_GIVE_UP_S = 10.0
"""Ranks that do not come back for this long after an abort are told as stuck, and the cell ends."""
_INSIST_AFTER_S = 1.0
"""An interrupt counts as the second one when so much time has passed since the first."""
_INSIST_GRACE_S = 0.5
"""Ranks that are still in C code this long after the second interrupt are given up."""
_SURE_S, _SURE_LOOKS = 0.06, 10
"""Jupyter interrupts a kernel before it restarts it: ranks are let alone for so long, and so many turns of the loop."""


class CellRun:
    """The state of one running cell: fed by the client's IO thread, stepped by the notebook's."""

    def __init__(
        self,
        client: RankClient,
        ranks: Sequence[int],
        output: CellOutput,
        ending: Ending,
        *,
        timeout_s: float | None = None,
        view: LiveView | None = None,
        show_value: bool = True,
        recover: Callable[[], Stepped] | None = None,
        notice: WaitNotice | None = None,
    ) -> None:
        self.ranks = list(ranks)
        self.token = uuid.uuid4().hex
        self.output = output
        self.failed_order: list[int] = []
        self.timed_out = False
        self.interrupted_at: float | None = None
        self._looks = 0
        self.to_replace: list[int] = []
        """Ranks that are in C code and that the user, by a second interrupt, wants to be replaced."""
        self.lost = ""
        """Why there is no cluster any more; empty while there is."""
        self.on_late_reply: Callable[[int], None] = lambda rank: None
        """Called from the IO thread when a rank ends the cell after it was given up."""
        self.wake: Callable[[], None] = lambda: None
        """Called from any thread when `step` has something to do."""
        self.told: dict[int, CellEnd] = {}
        """What each rank has told of the cell at its end, such as what was measured."""
        self.harmed = False
        """Whether the groups need forming anew at the end, whatever becomes of the cell."""
        self._fetch: Callable[[float], None] = lambda now: None
        self._client = client
        self._recover = recover
        self._ending = ending
        self._view = view
        self._notice = notice
        self._hidden = {"error"} if show_value else {"error", "execute_result"}
        self._parts = {rank: Part() for rank in ranks}
        self._lock = threading.Lock()
        self._messages: list[str] = []
        self._started = time.monotonic()
        self.timeout_s = timeout_s
        self._first_failure: float | None = None
        self._insisted_at: float | None = None
        self._recovery: Stepped | None = None
        self._communicated = False
        self._view_due = 0.0
        self._given_up = False
        self._finished = False

    def adopt(self, run: str, fetch: Callable[[float], None], *, seconds: float) -> None:
        """Instead of `send`: the cell `run` has been on its ranks for `seconds`; `fetch` hands on what they say."""
        self.token, self._fetch = run, fetch
        self._started = time.monotonic() - seconds

    def send(self, code: str, facts: CellFacts) -> None:
        """Send the cell; what this run knows itself is added to `facts`."""
        facts = dataclasses.replace(
            facts,
            run=self.token,
            ranks=tuple(self.ranks),
            timeout=self.timeout_s,
            show_value="execute_result" not in self._hidden,
            quiet=self.output.quiet,
            subgroup=mentions(code, "subgroup"),
        )
        self._ending.run = self.token
        self._messages = self._client.send_cells(self.ranks, execute_request(code), {KEY: encode(facts)}, self)

    def on_output(self, rank: int, msg_type: str, content: dict[str, Any], metadata: dict[str, Any]) -> None:
        """From the IO thread: a rank printed or displayed something."""
        if msg_type not in self._hidden and self.output.feed(rank, msg_type, content, metadata):
            self.wake()

    def on_idle(self, rank: int) -> None:
        """From the IO thread: a rank has sent all its output."""
        self._parts[rank].idle = True
        self.output.rank_done(rank)
        if self._parts[rank].replied_at:
            self.wake()

    def on_reply(self, rank: int, content: dict[str, Any]) -> None:
        """From the IO thread: a rank has ended the cell."""
        part = self._parts[rank]
        try:
            self._take_reply(rank, part, content)
        finally:
            part.replied_at = time.monotonic()
            self.wake()
        if self._given_up:
            self.on_late_reply(rank)
        if self._view is not None:
            self._view.rank_over(rank, failed=part.error is not None and part.error.kind != "ended")

    def _take_reply(self, rank: int, part: Part, content: dict[str, Any]) -> None:
        try:
            end = self.told[rank] = decode(CellEnd, content.get(KEY, {}))
        except ProtocolError as error:
            end = self.told[rank] = CellEnd()
            content = {"status": "error", "ename": type(error).__name__, "evalue": str(error)}
        part.seconds = end.seconds
        part.has_value = end.has_value
        self._communicated = self._communicated or bool(end.calls)
        if content["status"] != "ok":
            ename = content.get("ename", "")
            evalue = content.get("evalue", content["status"])
            ended = was_ended(ename, evalue, begun=self._ending.begun)
            evalue = where_ended(end.interruption) if ended else evalue
            traceback = () if ended else tuple(content.get("traceback", ()))
            self._fail(rank, RankError(rank, "ended" if ended else "raised", ename, evalue, traceback))

    def on_death(self, rank: int, reason: str) -> None:
        """From any thread: the rank's process is gone; `reason` reads after its name."""
        part = self._parts.get(rank)
        if part is None:
            return
        part.gone_at = part.gone_at or time.monotonic()
        if part.replied_at:
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
        """The user wants the cell to end; when it does not, a second time, that ranks in C code are replaced."""
        now = time.monotonic()
        if self.interrupted_at is None:
            self.interrupted_at = now
        elif self._insisted_at is None and now - self.interrupted_at >= _INSIST_AFTER_S:
            self._insisted_at = now
        self._ending.hurry()
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
            self._view_due = now + _VIEW_S
            self._view.flush()
        if self.lost:
            return True
        self._fetch(now)
        if self._recovery is not None:
            return self._recovery.step()
        if self._notice is not None:
            self._notice.show(self._ending.slow if self._first_failure is None else "", now)
        if self._over(now):
            gone = {rank for rank, part in self._parts.items() if part.is_gone}
            return self._ending.settled(now, gone) and not self._begin_recovery()
        if self.timeout_s is not None and now - self._started > self.timeout_s and not self._ending.begun:
            self.timed_out = True
        self._looks += self.interrupted_at is not None
        self._ending.step(
            now,
            self.unfinished,
            failed_at=self._first_failure,
            died=any(error.kind == "died" for error in self.errors.values()),
            interrupted=self._looks >= _SURE_LOOKS and now - (self.interrupted_at or now) >= _SURE_S,
            timed_out=self.timed_out,
        )
        return False

    def _over(self, now: float) -> bool:
        if self.output.drained and all(part.over(now) for part in self._parts.values()):
            return True
        begun = self._ending.aborted_at
        if begun is None:
            return False
        insisted = self._insisted_at is not None and now - self._insisted_at > _INSIST_GRACE_S
        if insisted and self._recover is not None and all(map(self._ending.deaf, self.unfinished)):
            self.to_replace = self.unfinished
        if self.to_replace or now - begun > _GIVE_UP_S:
            self._given_up = True
            for rank in self.unfinished:
                self._fail(rank, RankError(rank, "stuck", "", self._ending.why_stuck(rank)))
            return True
        return False

    def _begin_recovery(self) -> bool:
        harmed = self.harmed or self._ending.begun or (bool(self.errors) and self._communicated)
        if harmed and self._recover is not None:
            self.finish()
            self._recovery = self._recover()
            self.wake()
        return self._recovery is not None

    def patience(self) -> float:
        """Seconds until `step` should be called again, if nothing wakes it before."""
        now = time.monotonic()
        times = [now + 0.1]
        if (due := self.output.next_due()) is not None:
            times.append(due)
        if self._view is not None:
            times.append(self._view_due)
        if self.timeout_s is not None and not self.timed_out:
            times.append(self._started + self.timeout_s)
        if self._first_failure is not None or self.interrupted_at is not None or self._ending.begun:
            times.append(now + _BUSY_S)
        if any(part.replied_at and not part.idle for part in self._parts.values()):
            times.append(now + _BUSY_S)
        return max(0.0, min(times) - now)

    @property
    def explanation(self) -> str:
        """Why the cell could not end by itself; empty when it could."""
        return self._ending.explanation

    def finish(self) -> None:
        """The cell is over: show the rest, and take no more messages; a second call does nothing."""
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
        return {rank: part.error for rank, part in self._parts.items() if part.error is not None}

    @property
    def seconds(self) -> dict[int, float]:
        """How long the cell ran on each rank, in seconds."""
        return {rank: part.seconds for rank, part in self._parts.items()}

    @property
    def ranks_with_value(self) -> list[int]:
        """The ranks whose last expression has a value."""
        return [rank for rank, part in self._parts.items() if part.has_value]
