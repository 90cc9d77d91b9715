"""Cells that other programs run: started in the background, polled, cancelled."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.cells.driver import CellHandle
from axon_nb.cluster.endpoint.folding import folded
from axon_nb.errors import CellError, CellInterrupt, ClusterLostError
from axon_nb.records.endpoint import EndpointError, ErrorCode

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster

_MAX_KEPT = 32
"""Results of the last cells that are kept."""
_MAX_WAIT_S = 20.0
_MAX_TEXT = 32_000
"""Characters of one rank's output in one reply; the next one continues there."""


class SharedCells:
    """The cells that other programs have started on one cluster.

    Args:
        cluster: The cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._numbers = itertools.count(1)
        self._handles: OrderedDict[str, CellHandle] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, code: str, ranks: str | None = None, timeout: float | None = None) -> dict[str, Any]:
        """Start a cell; return its name. What it prints is not shown in the notebook.

        Args:
            code: Python as in a cell.
            ranks: Which ranks; None: all.
            timeout: Abort it after this many seconds; None: never.
        """
        handle = self._cluster.run_noblock(code, ranks=ranks, timeout=timeout, quiet=True, values=False)
        with self._lock:
            name = f"run-{next(self._numbers)}"
            self._handles[name] = handle
            for old in list(self._handles)[:-_MAX_KEPT]:
                if self._handles[old].done():
                    del self._handles[old]
        return {"run": name}

    def poll(self, run: str, since: Mapping[str, int] | None = None, wait_s: float = 0.0) -> dict[str, Any]:
        """Return what a cell has printed, and its result once it is done.

        Args:
            run: Its name.
            since: By rank, how many characters the program already has.
            wait_s: Wait at most this long for its end.
        """
        handle = self._handle(run)
        is_done = handle.wait(max(0.0, min(wait_s, _MAX_WAIT_S))) if wait_s else handle.done()
        known = {int(rank): int(count) for rank, count in (since or {}).items()}
        text, seen, is_cut = {}, {}, False
        for rank, printed in handle.text().items():
            start = known.get(rank, 0)
            text[rank] = printed[start : start + _MAX_TEXT]
            seen[str(rank)] = start + len(text[rank])
            is_cut = is_cut or seen[str(rank)] < len(printed)
        result = _result(handle) if is_done else None
        output = [group for group in folded(text, "text") if group["text"]]
        return {"run": run, "done": is_done, "output": output, "more": is_cut, "since": seen, "result": result}

    def cancel(self, run: str) -> dict[str, Any]:
        """Interrupt a cell."""
        handle = self._handle(run)
        was_running = not handle.done()
        handle.cancel()
        return {"run": run, "cancelled": was_running}

    def _handle(self, run: str) -> CellHandle:
        with self._lock:
            if run in self._handles:
                return self._handles[run]
            raise EndpointError(ErrorCode.BAD_REQUEST, f"There is no run {run!r}; known are {list(self._handles)}.")


def _result(handle: CellHandle) -> dict[str, Any]:
    try:
        return handle.result().to_dict()
    except (CellError, CellInterrupt) as error:
        return error.to_dict()
    except ClusterLostError as error:
        raise EndpointError(ErrorCode.NO_CLUSTER, str(error)) from None
