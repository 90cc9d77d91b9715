"""A recoverable group whose inner Gloo group is rebuilt by torch instead of being replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import PrefixStore, Store

from axon_nb.engine.groups.abort import raise_if_aborted
from axon_nb.engine.groups.gloo import abandon, close_connections, shared_device
from axon_nb.engine.groups.native import connect_in_helper
from axon_nb.engine.groups.recoverable import RecoverableGroup
from axon_nb.engine.groups.size_check import open_size_table
from axon_nb.engine.groups.store import allow_waits, cancel_waits

__all__ = ["LIMIT", "ReconfiguredGroup", "reconfigure"]

LIMIT = timedelta(seconds=30)
"""Time limit of one rebuild."""
_IDLE_S = 0.1
_CPU = torch.device("cpu")

c10d: Any = _distributed_c10d  # the stubs of older versions lack what is used here


def reconfigure(backend: Any, meeting: Store, ranks: list[int], rank: int, *, uuid: int, timeout: timedelta) -> None:
    """Build a group torch's way: exchange handles in `meeting`, then connect `ranks` of the world in this order.

    Args:
        backend: A Gloo backend, or torch's own group.
        meeting: A fresh prefix of the store.
        ranks: Ranks of the new group.
        rank: This process's rank, one of them.
        uuid: Number of this rebuild; must never be reused.
        timeout: How long to wait for the others.
    """
    meeting.set(f"handle{rank}", backend.get_reconfigure_handle())
    options = c10d.ReconfigureOptions()
    options.uuid = uuid
    options.timeout = timeout
    options.handles = [meeting.get(f"handle{peer}").decode() for peer in ranks]
    backend.reconfigure(options).wait()


class ReconfiguredGroup(RecoverableGroup):
    """Our wrapper, with its inner group rebuilt by torch instead of replaced."""

    _generation = 0
    _done: threading.Event | None = None
    helper = 0
    """Thread of an abandoned rebuild."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = threading.Lock()
        super().__init__(*args, **kwargs)

    def rebuild(self, epoch: int) -> None:
        """Rebuild, as `RecoverableGroup.rebuild`."""
        if self._table is not None:
            self._table.close()
        self._table = open_size_table(self._root, name=self._name, epoch=epoch, rank=self._own_rank, size=self._size)
        if self._inner is not None:
            self.close_connections()
        with self._lock:  # from here on, an abort prepared before no longer affects the group
            self._generation += 1
        if self._inner is None or not self.is_idle(_IDLE_S):
            self._inner = self._fresh()
        backend = self._inner._get_backend(_CPU)
        meeting = PrefixStore(f"epoch{epoch}/{self._name}/", self._root)
        self._done = done = threading.Event()

        def build() -> None:
            self.helper = threading.get_ident()
            allow_waits()
            try:
                reconfigure(backend, meeting, list(range(self._size)), self._own_rank, uuid=epoch, timeout=LIMIT)
                backend._set_default_timeout(self._timeout)
            finally:
                done.set()

        try:
            connect_in_helper(build, raise_if_cancelled=raise_if_aborted, timeout_s=60, dispose=lambda _: None)
        except BaseException:
            cancel_waits(self.helper)
            raise
        self.sequence = 0

    def connection_closer(self) -> Callable[[], None]:
        """Return a function that aborts the group, unless it is being rebuilt or was rebuilt meanwhile."""
        generation, backend = self._generation, self._inner._get_backend(_CPU)

        def close_this() -> None:
            with self._lock:
                if generation == self._generation and self.is_idle(0):
                    close_connections(backend)

        return close_this

    def is_idle(self, timeout_s: float) -> bool:
        """Whether no abandoned rebuild is still running in the inner group."""
        return self._done is None or self._done.wait(timeout_s)

    def _fresh(self) -> Any:
        """Create an unconnected inner group."""
        if self._inner is not None:
            abandon(self._inner)
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [shared_device()]
        options._timeout = LIMIT
        options._threads = 2
        options.enable_reconfigure = True
        store = PrefixStore(f"{self._name}/", self._root)
        backend = c10d.ProcessGroupGloo(store, self._own_rank, self._size, options)
        inner = dist.ProcessGroup(store, self._own_rank, self._size)
        inner._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, backend)
        inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        inner._set_group_name(self._name)
        return inner
