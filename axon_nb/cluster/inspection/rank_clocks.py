"""The clocks of ranks on other hosts: what to add to their times, and by how much that may be wrong."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from axon_nb.errors import ClusterLostError, StartError
from axon_nb.host.client import outcome
from axon_nb.records.clocks import ClockEstimate, HostClock
from axon_nb.records.protocol.agent import GetInfo

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

_REFRESH_INTERVAL_S = 1.0
_FIRST_REPLY_TIMEOUT_S = 0.5
_SAME = HostClock(0, 0)


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
        self._due = time.monotonic() + _REFRESH_INTERVAL_S
        with contextlib.suppress(ClusterLostError):
            self._reply = state.connection.agent.send(GetInfo())
            if not self._joined:
                self._read_reply(_FIRST_REPLY_TIMEOUT_S)

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
            return _SAME
        if clock is None:
            estimate = self._estimates.setdefault(rank, ClockEstimate())
            estimate.add(sent_ns, rank_ns, rank_ns, now_ns)
            clock = estimate.at(now_ns) or _SAME
        self._errors_ns[self._hosts.get(rank, rank)] = clock.error_ns
        return clock
