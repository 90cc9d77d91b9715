"""Fetching spans from ranks while somebody looks, and handing them to the views that do.

What ranks have done, to keep: as a trace, a page, a table.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from axon_nb.cluster.inspection.span_store import SpanStore
from axon_nb.cluster.inspection.span_table import SpanTable
from axon_nb.cluster.rpc.answers import Answer
from axon_nb.errors import UsageError
from axon_nb.records.protocol.inspection import SpansReply, SpansRequest
from axon_nb.records.spans import Span, write_chrome_trace
from axon_nb.records.telemetry import TICK_S, seconds_to_tick

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

__all__ = ["SpanFeed", "SpanView", "cell_window", "recorded", "save_trace", "span_feed"]

_TICK_S, _SLOW_TICK_S = 0.08, TICK_S / 2
"""Views get what is new so often: where much comes 12 times a second (10 if each takes 20 ms), else at most twice."""
_BUSY_S = 0.16
"""How often a rank is asked while a cell runs and much comes, at most; else at each beat, if there are few ranks."""
_MUCH_PER_S = 500
"""Spans of a rank: if they were fetched seldom, each message to a page would be a large one."""
_PER_S, _MOST_PER_S = 12, 40
"""Questions a second where much comes, in turn, so that each tick has something new; and at most."""
_IDLE_S = 1.0
"""How often idle ranks are asked, so that they are ready to record when a cell begins."""
_WATCH_S = 5.0
"""For how long a rank records the finer spans after it was asked."""
_GIVE_UP_S = 10.0
"""A rank that has not answered for this long is asked again."""

_log = logging.getLogger(__name__)


class SpanView(Protocol):
    """What shows spans."""

    @property
    def wanted(self) -> bool:
        """Whether it has to be fed now."""

    def pump(self) -> None:
        """Show what is new; called from the feed's thread."""


class SpanFeed:
    """Asks each rank for what is new, over the control channel, which answers while cells run.

    Asking, rather than being sent, means one unanswered question a rank at most, and nothing at all while nobody looks.

    Args:
        state: Whose ranks are asked.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = weakref.ref(state)
        self.store = SpanStore()
        self._lock = threading.Lock()
        self._views: list[SpanView] = []
        self._thread: threading.Thread | None = None
        self._asked: dict[int, tuple[Answer[SpansReply], int]] = {}
        """By rank: the future of the answer, and when it was asked, in nanoseconds."""
        self._next: dict[int, tuple[int, int]] = {}
        """By rank: its process, and the number of the next span."""
        self._offsets: dict[int, tuple[int, int]] = {}
        """By rank of another host: nanoseconds of the round trip, and what to add to its times."""
        self._due: dict[int, float] = {}
        self._flows: dict[int, tuple[int, bool]] = {}
        """By rank: when its last answer was asked for, in nanoseconds, and whether much had come since."""
        self.running_since: int | None = None
        """Since when ranks run a cell, in nanoseconds, give or take a tick; None: they do not, or nobody looks."""

    def open(self, view: SpanView) -> None:
        """Feed a view from now on."""
        with self._lock:
            self._views.append(view)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="axon_nb-spans", daemon=True)
                self._thread.start()

    def close(self, view: SpanView) -> None:
        """Feed it no more."""
        with self._lock:
            if view in self._views:
                self._views.remove(view)

    def collect(self, *, limit_s: float = 2.0, watch_s: float = 0.0) -> None:
        """Fetch what there is now, from the notebook's thread; ranks that do not answer in `limit_s` are left out."""
        with self._lock:
            self._wait_answers(time.monotonic() + limit_s)
            self._ask(watch_s)
            self._wait_answers(time.monotonic() + limit_s)

    def _wait_answers(self, end: float) -> None:
        for future, _ in list(self._asked.values()):
            future.wait(max(0.0, end - time.monotonic()))
        self._take_answers()

    def _run(self) -> None:
        while True:
            much = any(fast for _, fast in list(self._flows.values()))
            time.sleep(_TICK_S if much else seconds_to_tick(_SLOW_TICK_S))
            with self._lock:
                state = self._state()
                if not self._views or state is None or not state.running:
                    self._thread = None
                    return
                views = list(self._views)
                try:
                    self._tick(state, any(view.wanted for view in views))
                except Exception:  # such as one that closed the sockets; a view is never worth a cell
                    _log.debug("spans could not be fetched", exc_info=True)
            del state  # one that nobody uses any more is not kept by its views
            for view in views:
                self._pump(view)

    def _pump(self, view: SpanView) -> None:
        try:
            view.pump()
        except Exception:
            _log.warning("A view of spans has failed, and is no longer fed.", exc_info=True)
            self.close(view)

    def _tick(self, state: ClusterState, wanted: bool) -> None:
        now = time.monotonic()
        if not state.busy:
            self.running_since = None
        elif self.running_since is None:
            self.running_since = time.monotonic_ns() - round(_SLOW_TICK_S * 1e9)
            self._due.clear()
        self._take_answers()
        if wanted:
            due = [rank for rank in state.ranks if now >= self._due.get(rank, 0.0)]
            self._ask(_WATCH_S, due)
            self._due.update({rank: now + self._pause_s(rank, state.ranks, now) for rank in due})

    def _pause_s(self, rank: int, ranks: Sequence[int], now: float) -> float:
        """Seconds until it is asked again."""
        if self.running_since is None:
            return _IDLE_S
        seldom = max(1, round(len(ranks) / _MOST_PER_S / TICK_S)) * TICK_S
        if not self._flows.get(rank, (0, False))[1]:
            return seconds_to_tick(seldom, now=now)
        every = max(_BUSY_S, min(len(ranks) / _PER_S, seldom))
        return seconds_to_tick(every, now=now, late_s=every * ranks.index(rank) / len(ranks))

    def _ask(self, watch_s: float, ranks: Sequence[int] | None = None) -> None:
        state = self._state()
        if state is None or not state.running:
            return
        for rank in state.ranks if ranks is None else ranks:
            if rank in state.health.dead:
                self._asked.pop(rank, None)
            elif rank not in self._asked:
                with contextlib.suppress(KeyError, OSError):  # it is gone; the host agent tells
                    since = self._next.get(rank, (0, 0))[1]
                    answer = state.connection.client.request(rank, SpansRequest(since, watch_s))
                    self._asked[rank] = (answer, time.monotonic_ns())

    def _take_answers(self) -> None:
        now = time.monotonic_ns()
        for rank, (future, asked_ns) in list(self._asked.items()):
            if future.done():
                del self._asked[rank]
                self._take(rank, future.reply(), asked_ns, now)
            elif now - asked_ns > _GIVE_UP_S * 1e9:
                del self._asked[rank]

    def _take(self, rank: int, reply: SpansReply | None, asked_ns: int, now_ns: int) -> None:
        if reply is None:
            return
        process, position = reply.process, reply.next
        known = self._next.get(rank, (process, 0))[0]
        self._next[rank] = (process, position)
        if known != process:  # a fresh rank: what it was asked for had another's numbers
            self._next[rank] = (process, 0)
            return
        before = self._flows.get(rank, (asked_ns, False))[0]
        self._flows[rank] = (asked_ns, len(reply.spans) * 1e9 > _MUCH_PER_S * (asked_ns - before) > 0)
        self.store.know_groups(reply.groups)
        offset = self._offset(rank, reply.now_ns, asked_ns, now_ns)
        self.store.add([Span(*row) for row in reply.spans], offset_ns=offset, lost=reply.lost)

    def _offset(self, rank: int, theirs_ns: int, asked_ns: int, now_ns: int) -> int:
        """What to add to a rank's times: another host's monotonic clock has nothing to do with ours."""
        if asked_ns <= theirs_ns <= now_ns:
            return 0
        trip = now_ns - asked_ns
        best = self._offsets.get(rank)
        if best is None or trip < best[0]:
            best = self._offsets[rank] = (trip, (asked_ns + now_ns) // 2 - theirs_ns)
        return best[1]


_feeds: weakref.WeakKeyDictionary[ClusterState, SpanFeed] = weakref.WeakKeyDictionary()


def span_feed(state: ClusterState) -> SpanFeed:
    """The one of a cluster."""
    if (feed := _feeds.get(state)) is None:
        feed = _feeds.setdefault(state, SpanFeed(state))
    return feed


def recorded(state: ClusterState) -> SpanTable:
    """The spans that ranks have recorded so far, as far as they are kept.

    While nobody looks these are cells, communication and pipelines; forwards, backwards and optimizer steps are
    recorded from the moment that a timeline is open.
    """
    feed = span_feed(state)
    feed.collect()
    return feed.store.table()


def cell_window(table: SpanTable, cell: int) -> tuple[int, int]:
    """Start and end of a notebook cell's last run, in nanoseconds.

    Raises:
        UsageError: there is no such cell among the spans.
    """
    found: tuple[int, int] | None = None
    names = set()
    for span in table.pick(table.of_kind("cell")).spans():
        names.add(span.name)
        if span.name == f"In [{cell}]":
            again = found is None or span.start_ns > found[1]
            found = (
                (span.start_ns, span.end_ns)
                if again or found is None
                else (
                    min(found[0], span.start_ns),
                    max(found[1], span.end_ns),
                )
            )
    if found is None:
        known = ", ".join(sorted(names, key=lambda name: (len(name), name))[-8:]) or "none"
        raise UsageError(f"cell {cell}: ranks have no spans of In [{cell}]; the last cells that they ran: {known}.")
    return found


def save_trace(table: SpanTable, path: Path | str) -> None:
    """Write spans as a trace that Perfetto and chrome://tracing open, from 0 on."""
    origin = int(table.columns["start"].min()) if len(table) else 0
    spans = (span._replace(start_ns=span.start_ns - origin, end_ns=span.end_ns - origin) for span in table.spans())
    write_chrome_trace(spans, path)
