"""Live telemetry of ranks: requested while a view is shown, and passed to it as records."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from axon_nb.cluster.rpc.client import RankClient
from axon_nb.records.protocol.cells import AbortLocation
from axon_nb.records.protocol.inspection import TelemetryEvent, WatchRequest
from axon_nb.records.telemetry import Activity, RankState

_SAMPLES_PER_S = 4.0
_LEASE_S = 10.0
"""A rank stops sending samples this long after the last renewal."""
_RENEW_INTERVAL_S = 4.0
_log = logging.getLogger(__name__)


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
        self._renew(_LEASE_S)
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
        return dataclasses.replace(state, activity=final.activity, call=final.call, line=final.line)

    def flush(self) -> None:
        """Show new samples, and renew the lease if it is due; on the notebook's thread."""
        if time.monotonic() - self._renewed_at > _RENEW_INTERVAL_S:
            self._renew(_LEASE_S)
        self._call_view(self._view.flush)

    def rank_ended(self, rank: int, activity: Activity, at: AbortLocation | None) -> None:
        """Show the rank as done, failed, dead, or stopped at a location from now on; callable from any thread."""
        at = at or AbortLocation(None, "")
        now = time.monotonic_ns()
        final = RankState(rank, activity, now, line=at.line, call=at.call, since_ns=now)
        with self._lock:
            self._finished[rank] = final
        self._call_view(self._view.add, [final])
