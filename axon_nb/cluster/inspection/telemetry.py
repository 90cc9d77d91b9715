"""Following ranks live: telemetry is asked for while somebody looks, and handed on as records."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from axon_nb.cluster.rpc.client import RankClient
from axon_nb.records.protocol.inspection import TelemetryEvent, WatchRequest
from axon_nb.records.telemetry import Activity, RankState

__all__ = ["StateView", "Watch"]

_HZ = 4.0
_LEASE_S = 10.0
_RENEW_S = 4.0
_log = logging.getLogger(__name__)


class StateView(Protocol):
    """What shows rank states, such as the strip of `--watch`."""

    def add(self, states: Iterable[RankState]) -> None:
        """From any thread: new samples."""

    def flush(self) -> None:
        """On the notebook's thread: show them."""

    def finish(self) -> None:
        """On the notebook's thread: the cell is over."""


class Watch:
    """Feeds a view with the states of some ranks during one cell."""

    def __init__(self, client: RankClient, ranks: Sequence[int], view: StateView) -> None:
        self._client = client
        self._ranks = list(ranks)
        self._view = view
        self._over: dict[int, Activity] = {}
        self._lock = threading.Lock()
        self._renewed = 0.0
        self._failed = False

    def __enter__(self) -> Watch:
        self._client.on_telemetry(self._on_telemetry)
        self._lease(_LEASE_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.on_telemetry(None)
        self._lease(0.0)
        self._tell(self._view.finish)

    def _lease(self, seconds: float) -> None:
        self._renewed = time.monotonic()
        for rank in self._ranks:
            with contextlib.suppress(KeyError, OSError):  # a rank or the whole cluster is gone
                self._client.request(rank, WatchRequest(_HZ, seconds))

    def _on_telemetry(self, event: TelemetryEvent) -> None:
        if event.rank in self._ranks:
            self._tell(self._view.add, [self._as_part_of_cell(state) for state in event.states])

    def _tell(self, call: Callable[..., None], *arguments: Any) -> None:
        """A view is never worth a cell: one that fails is left as it is."""
        if self._failed:
            return
        try:
            call(*arguments)
        except Exception:
            self._failed = True
            _log.warning("A view of the cell has failed, and is no longer fed.", exc_info=True)

    def _as_part_of_cell(self, state: RankState) -> RankState:
        with self._lock:
            over = self._over.get(state.rank)
        # A sample that was taken before the rank's reply may come after it.
        return state if over is None else dataclasses.replace(state, activity=over, call="", line=None)

    def flush(self) -> None:
        """On the notebook's thread: show what has come, and renew the watch when it is due."""
        if time.monotonic() - self._renewed > _RENEW_S:
            self._lease(_LEASE_S)
        self._tell(self._view.flush)

    def rank_over(self, rank: int, *, failed: bool) -> None:
        """From any thread: the rank has ended the cell; it shows as done or failed from now on."""
        activity = Activity.FAILED if failed else Activity.DONE
        with self._lock:
            self._over[rank] = activity
        now = time.monotonic_ns()
        self._tell(self._view.add, [RankState(rank, activity, now, since_ns=now)])
