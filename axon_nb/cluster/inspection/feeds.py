"""Feeds of open views: spans and telemetry, fetched from the ranks while a view is shown, and saved as a trace.

The clocks of ranks on other hosts are corrected: what to add to their times, and by how much that may be wrong.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from axon_nb.cluster.inspection.spans import SpanStore, SpanTable
from axon_nb.cluster.rpc import Answer, RankClient
from axon_nb.errors import ClusterLostError, StartError, UsageError
from axon_nb.host.client import outcome
from axon_nb.records.protocol.agent import GetInfo
from axon_nb.records.protocol.cells import AbortLocation
from axon_nb.records.protocol.inspection import SpansReply, SpansRequest, TelemetryEvent, WatchRequest
from axon_nb.records.spans import ClockEstimate, HostClock, Span, write_chrome_trace
from axon_nb.records.telemetry import TICK_S, Activity, RankState, seconds_to_tick

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

_TICK_S, _SLOW_TICK_S = 0.08, TICK_S / 2
"""Interval between updates of the views: 12 per second at high span rates (10 if one takes 20 ms), else at most two."""
_BUSY_INTERVAL_S = 0.16
"""Shortest interval between requests to a rank at high span rates; at low rates ranks are polled on each tick."""
_HIGH_SPANS_PER_S = 500
"""A high rate of spans on a rank: fetching it less often would make each message to a page large."""
_REQUESTS_PER_S, _MAX_REQUESTS_PER_S = 12, 40
"""Requests per second at high span rates, to the ranks in turn, so that each tick has new spans; and the maximum."""
_IDLE_INTERVAL_S = 1.0
"""Interval between requests to idle ranks, so that they are ready to record when a cell starts."""
_WATCH_S = 5.0
"""How long a rank records detailed spans after a request."""
_RETRY_S = 10.0
"""A rank that has not replied for this long gets a new request."""
_log = logging.getLogger(__name__)
_CLOCK_REFRESH_INTERVAL_S = 1.0
_FIRST_CLOCK_TIMEOUT_S = 0.5
_SAME_CLOCK = HostClock(0, 0)
_SAMPLES_PER_S = 4.0
_TELEMETRY_LEASE_S = 10.0
"""A rank stops sending samples this long after the last renewal."""
_TELEMETRY_RENEW_INTERVAL_S = 4.0


class SpanView(Protocol):
    """A view of spans."""

    @property
    def wanted(self) -> bool:
        """Whether the view needs new spans now."""

    def pump(self) -> None:
        """Show new spans; called on the feed's thread."""


class SpanFeed:
    """Requests new spans from each rank over the control channel, which answers while cells run.

    Polling instead of streaming bounds the load: at most one open request per rank, and none while no view is open.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = weakref.ref(state)
        self.store = SpanStore()
        self._lock = threading.Lock()
        self._views: list[SpanView] = []
        self._thread: threading.Thread | None = None
        self._pending: dict[int, tuple[Answer[SpansReply], int]] = {}
        """By rank: the future of the reply, and when the request was sent, in nanoseconds."""
        self._next: dict[int, tuple[int, int]] = {}
        """By rank: its process, and the number of the next span."""
        self._clocks = RankClocks()
        self._due: dict[int, float] = {}
        self._rates: dict[int, tuple[int, bool]] = {}
        """By rank: when its last answered request was sent, in nanoseconds, and whether the span rate was high."""
        self.running_since: int | None = None
        """When the running cell started, in nanoseconds, accurate to a tick; None if none runs or no view is open."""

    def open(self, view: SpanView) -> None:
        """Start feeding a view."""
        with self._lock:
            self._views.append(view)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="axon_nb-spans", daemon=True)
                self._thread.start()

    def close(self, view: SpanView) -> None:
        """Stop feeding a view."""
        with self._lock:
            if view in self._views:
                self._views.remove(view)

    def collect(self, *, timeout_s: float = 2.0, watch_s: float = 0.0) -> None:
        """Fetch all new spans, on the notebook's thread; ranks that do not reply within `timeout_s` are left out.

        Args:
            timeout_s: The timeout in seconds.
            watch_s: How many seconds the ranks then record detailed spans.
        """
        with self._lock:
            self._wait_for_replies(time.monotonic() + timeout_s)
            self._request(watch_s)
            self._wait_for_replies(time.monotonic() + timeout_s)

    def recorded(self) -> SpanTable:
        """Fetch the spans that the ranks have recorded, and return all that are still stored.

        Cells, communication and pipelines are always recorded; forwards, backwards and optimizer steps only while a
        timeline is open.
        """
        self.collect()
        return self.store.table()

    def _wait_for_replies(self, deadline: float) -> None:
        for future, _ in list(self._pending.values()):
            future.wait(max(0.0, deadline - time.monotonic()))
        self._process_replies()

    def _run(self) -> None:
        while True:
            is_high = any(high for _, high in list(self._rates.values()))
            time.sleep(_TICK_S if is_high else seconds_to_tick(_SLOW_TICK_S))
            with self._lock:
                state = self._state()
                if not self._views or state is None or not state.running:
                    self._thread = self.running_since = None
                    return
                views = list(self._views)
                try:
                    self._tick(state, any(view.wanted for view in views))
                except Exception:  # such as closed sockets; a view must not disturb a cell
                    _log.debug("could not fetch spans", exc_info=True)
            del state  # views must not keep an unused cluster alive
            for view in views:
                self._pump(view)

    def _pump(self, view: SpanView) -> None:
        try:
            view.pump()
        except Exception:
            _log.warning("A view of spans failed; it is no longer updated.", exc_info=True)
            self.close(view)

    def _tick(self, state: ClusterState, wanted: bool) -> None:
        now = time.monotonic()
        if not state.busy:
            self.running_since = None
        elif self.running_since is None:
            self.running_since = time.monotonic_ns() - round(_SLOW_TICK_S * 1e9)
            self._due.clear()
        self._process_replies()
        if wanted:
            due = [rank for rank in state.ranks if now >= self._due.get(rank, 0.0)]
            self._request(_WATCH_S, due)
            self._due.update({rank: now + self._delay_s(rank, state.ranks, now) for rank in due})

    def _delay_s(self, rank: int, ranks: Sequence[int], now: float) -> float:
        """Return the seconds until the rank's next request."""
        if self.running_since is None:
            return _IDLE_INTERVAL_S
        longest_s = max(1, round(len(ranks) / _MAX_REQUESTS_PER_S / TICK_S)) * TICK_S
        if not self._rates.get(rank, (0, False))[1]:
            return seconds_to_tick(longest_s, now=now)
        interval_s = max(_BUSY_INTERVAL_S, min(len(ranks) / _REQUESTS_PER_S, longest_s))
        return seconds_to_tick(interval_s, now=now, late_s=interval_s * ranks.index(rank) / len(ranks))

    def _request(self, watch_s: float, ranks: Sequence[int] | None = None) -> None:
        state = self._state()
        if state is None or not state.running:
            return
        self._clocks.refresh(state)
        for rank in state.ranks if ranks is None else ranks:
            if rank in state.health.dead:
                self._pending.pop(rank, None)
            elif rank not in self._pending:
                with contextlib.suppress(KeyError, OSError):  # the rank is gone; the host agent reports it
                    since = self._next.get(rank, (0, 0))[1]
                    sent_ns = time.monotonic_ns()  # before: on a busy machine the rank may have answered afterwards
                    answer = state.connection.client.request(rank, SpansRequest(since, watch_s))
                    self._pending[rank] = (answer, sent_ns)

    def _process_replies(self) -> None:
        for rank, (future, sent_ns) in list(self._pending.items()):
            if future.done():
                del self._pending[rank]
                self._process_reply(rank, future.reply(), sent_ns, time.monotonic_ns())
            elif time.monotonic_ns() - sent_ns > _RETRY_S * 1e9:
                del self._pending[rank]

    def _process_reply(self, rank: int, reply: SpansReply | None, sent_ns: int, now_ns: int) -> None:
        if reply is None:
            return
        process, position = reply.process, reply.next
        known = self._next.get(rank, (process, 0))[0]
        self._next[rank] = (process, position)
        if known != process:  # the rank was replaced: the request had the position of its predecessor
            self._next[rank] = (process, 0)
            return
        before = self._rates.get(rank, (sent_ns, False))[0]
        self._rates[rank] = (sent_ns, len(reply.spans) * 1e9 > _HIGH_SPANS_PER_S * (sent_ns - before) > 0)
        self.store.set_groups(reply.groups)
        clock = self._clocks.of(rank, reply.now_ns, sent_ns, now_ns)
        self.store.clock_error_ns = self._clocks.error_ns
        self.store.add([Span(*row) for row in reply.spans], offset_ns=clock.offset_ns, lost=reply.lost)


def cell_window(table: SpanTable, cell: int) -> tuple[int, int]:
    """Return the start and end of a notebook cell's last run, in nanoseconds.

    Raises:
        UsageError: the cell has no spans.
    """
    window: tuple[int, int] | None = None
    names = set()
    for span in table.pick(table.of_kind("cell")).spans():
        names.add(span.name)
        if span.name == f"In [{cell}]":
            if window is None or span.start_ns > window[1]:  # a new run; one run's spans overlap
                window = (span.start_ns, span.end_ns)
            else:
                window = (min(window[0], span.start_ns), max(window[1], span.end_ns))
    if window is None:
        known = ", ".join(sorted(names, key=lambda name: (len(name), name))[-8:]) or "none"
        raise UsageError(f"cell {cell}: ranks have no spans of In [{cell}]; the last cells that they ran: {known}.")
    return window


def save_trace(table: SpanTable, path: Path | str) -> None:
    """Write spans as a trace for Perfetto or chrome://tracing; times start at 0."""
    origin = int(table.columns["start"].min()) if len(table) else 0
    spans = (span._replace(start_ns=span.start_ns - origin, end_ns=span.end_ns - origin) for span in table.spans())
    write_chrome_trace(spans, path)


class RankClocks:
    """The clock of each rank.

    The host agent follows the clocks of hosts that joined it. Other launchers place ranks without it; their clocks are
    estimated from the messages with spans, which are slower.
    """

    def __init__(self) -> None:
        self._hosts: dict[int, str] = {}
        """Of ranks on hosts that joined."""
        self._joined: dict[str, HostClock] = {}
        self._estimates: dict[int, ClockEstimate] = {}
        self._errors_ns: dict[str | int, int] = {}
        """By host, or by rank if the host is unknown."""
        self._reply: Future[dict[str, Any]] | None = None
        self._due = 0.0

    @property
    def error_ns(self) -> int:
        """By how much times of ranks on different hosts may differ, in nanoseconds; 0: all ranks are on one host."""
        *_, second, first = [0, 0, *sorted(self._errors_ns.values())]
        return first + second

    def refresh(self, state: ClusterState) -> None:
        """Ask the host agent about the clocks of other hosts, at most once per second; does not wait but once."""
        hosts = {rank: host for rank in state.ranks if (host := state.layout.host_of(rank))}
        if hosts != self._hosts:
            self._hosts, self._joined, self._errors_ns = hosts, {}, {}
        if self._reply is not None and self._reply.done():
            self._read_reply(0.0)
        if not hosts or self._reply is not None or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _CLOCK_REFRESH_INTERVAL_S
        with contextlib.suppress(ClusterLostError):
            self._reply = state.connection.agent.send(GetInfo())
            if not self._joined:
                self._read_reply(_FIRST_CLOCK_TIMEOUT_S)

    def _read_reply(self, timeout_s: float) -> None:
        reply = self._reply
        if reply is None:
            return
        with contextlib.suppress(ClusterLostError, StartError, TimeoutError):
            self._joined.update(outcome(GetInfo, reply.result(timeout_s)).clocks)
        if reply.done():
            self._reply = None

    def of(self, rank: int, rank_ns: int, sent_ns: int, now_ns: int) -> HostClock:
        """Return the clock of a rank that answered a request.

        Args:
            rank: The rank.
            rank_ns: Its time when it answered, as all times in nanoseconds.
            sent_ns: When the request was sent, on the notebook's clock.
            now_ns: When the answer was read, on the notebook's clock.
        """
        clock = self._joined.get(self._hosts.get(rank, ""))
        if clock is None and rank not in self._hosts and sent_ns <= rank_ns <= now_ns:
            return _SAME_CLOCK
        if clock is None:
            estimate = self._estimates.setdefault(rank, ClockEstimate())
            estimate.add(sent_ns, rank_ns, rank_ns, now_ns)
            clock = estimate.at(now_ns) or _SAME_CLOCK
        self._errors_ns[self._hosts.get(rank, rank)] = clock.error_ns
        return clock


class StateView(Protocol):
    """A view of rank states, such as the strip of `--watch`."""

    def add(self, states: Iterable[RankState]) -> None:
        """Add samples; called from any thread."""

    def flush(self) -> None:
        """Show the new samples; called on the notebook's thread."""

    def finish(self) -> None:
        """Show the final state of the finished cell; called on the notebook's thread."""


class StateFeed:
    """Feeds a view with the states of some ranks while one cell runs; a context manager."""

    def __init__(self, client: RankClient, ranks: Sequence[int], view: StateView) -> None:
        self._client = client
        self._ranks = frozenset(ranks)
        self._view = view
        self._finished: dict[int, RankState] = {}
        self._lock = threading.Lock()
        self._renewed_at = 0.0
        self._has_failed = False

    def __enter__(self) -> StateFeed:
        self._client.on_telemetry(self._on_telemetry)
        self._renew(_TELEMETRY_LEASE_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.on_telemetry(None)
        self._renew(0.0)
        self._call_view(self._view.finish)

    def _renew(self, lease_s: float) -> None:
        self._renewed_at = time.monotonic()
        for rank in self._ranks:
            with contextlib.suppress(KeyError, OSError):  # a rank or the whole cluster is gone
                self._client.request(rank, WatchRequest(_SAMPLES_PER_S, lease_s))

    def _on_telemetry(self, event: TelemetryEvent) -> None:
        if event.rank in self._ranks:
            self._call_view(self._view.add, [self._with_final_activity(state) for state in event.states])

    def _call_view(self, method: Callable[..., None], *arguments: Any) -> None:
        """Call the view; one that fails is no longer updated, because a view must not disturb a cell."""
        if self._has_failed:
            return
        try:
            method(*arguments)
        except Exception:
            self._has_failed = True
            _log.warning("A view of the cell failed; it is no longer updated.", exc_info=True)

    def _with_final_activity(self, state: RankState) -> RankState:
        with self._lock:
            final = self._finished.get(state.rank)
        # A sample that was taken before the rank's reply may arrive after it.
        if final is None:
            return state
        return msgspec.structs.replace(state, activity=final.activity, call=final.call, line=final.line)

    def flush(self) -> None:
        """Show new samples, and renew the lease if it is due; on the notebook's thread."""
        if time.monotonic() - self._renewed_at > _TELEMETRY_RENEW_INTERVAL_S:
            self._renew(_TELEMETRY_LEASE_S)
        self._call_view(self._view.flush)

    def rank_ended(self, rank: int, activity: Activity, at: AbortLocation | None) -> None:
        """Show the rank as done, failed, dead, or stopped at a location from now on; callable from any thread."""
        at = at or AbortLocation(None, "")
        now = time.monotonic_ns()
        final = RankState(rank, activity, now, line=at.line, call=at.call, since_ns=now)
        with self._lock:
            self._finished[rank] = final
        self._call_view(self._view.add, [final])
