"""How the ranks of a group get shared memory: the first rank creates it, the others find it through the store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch._C._distributed_c10d import Store

from axon_nb.comm.errors import CommError, InvalidArgumentError
from axon_nb.comm.shared_memory.segment import futex
from axon_nb.comm.shared_memory.segment.errors import SharedMemoryTimeoutError
from axon_nb.comm.shared_memory.segment.memory import Layout, SharedMemory
from axon_nb.comm.shared_memory.segment.progress import Progress
from axon_nb.records.units import exact_bytes

__all__ = ["ForeignHostError", "form"]

_PIECE_S = 0.005
_KIB = 1024
_ONE_HOST = ": all ranks must run on one host, in one container and as one user. Use the backend gloo instead"


class ForeignHostError(CommError):
    """The ranks cannot share memory: host, container or user differ, or the system does not support it."""


def form(
    store: Store,
    *,
    rank: int,
    members: list[int],
    key: str,
    timeout_s: float,
    give_up: Callable[[], None] | None = None,
    max_bytes: int = 0,
) -> Progress:
    """Map the memory of a group; collective over its ranks.

    Args:
        store: The rendezvous store.
        rank: This process's rank in the group.
        members: Global ranks of the group.
        key: The store's key for the memory's address; use a new one each time.
        timeout_s: Seconds to wait for the other ranks.
        give_up: Called repeatedly; raises to abort the wait.
        max_bytes: Maximum size of the memory; 0: the usual size.

    Raises:
        InvalidArgumentError: the memory does not fit into `max_bytes`.
        ForeignHostError: the ranks cannot share memory.
        CommError: a rank cannot create or map the memory.
        GroupLeftError: a rank died meanwhile.
        SharedMemoryTimeoutError: a rank did not arrive.
    """
    if not futex.is_supported():
        raise ForeignHostError("Shared memory between ranks needs Linux on x86-64 or aarch64.")
    deadline = time.monotonic() + timeout_s
    layout = Layout.of(len(members), max_bytes)
    if 0 < max_bytes < layout.total:
        raise InvalidArgumentError(
            f"A group of {len(members)} ranks needs at least {exact_bytes(-(-layout.total // _KIB) * _KIB)} of shared "
            f"memory, but group_memory is {exact_bytes(max_bytes)}: raise it, or set it to 0 for the usual size."
        )
    failure = _Failure(store, f"{key}/failed", f"Rank {members[rank]}")
    size = exact_bytes(layout.total)
    descriptor = -1
    try:
        if rank == 0:
            with failure.reported(f"cannot create {size} of shared memory for the group"):
                descriptor = SharedMemory.create(layout)
            store.set(key, SharedMemory.address_of(descriptor))
        else:
            while not store.check([key]):
                failure.check()
                if give_up is not None:
                    give_up()
                if time.monotonic() > deadline:
                    raise SharedMemoryTimeoutError(f"rank {members[0]} did not create the group's memory in time")
                time.sleep(_PIECE_S)
            address = bytes(store.get(key)).decode()
            with failure.reported(f"cannot open the shared memory of rank {members[0]}", _ONE_HOST, ForeignHostError):
                descriptor = SharedMemory.open(address)
        with failure.reported(f"cannot map {size} of shared memory for the group"):
            memory = SharedMemory(descriptor, layout)
        progress = Progress(memory, rank, members, give_up)
        progress.wait_until_ready(deadline, failure.check)
        return progress
    finally:
        if descriptor >= 0:
            os.close(descriptor)


class _Failure:
    """Why a rank cannot join, for all ranks, which wait for it.

    Args:
        store: The rendezvous store.
        key: Where the reason stands.
        name: This rank.
    """

    def __init__(self, store: Store, key: str, name: str) -> None:
        self._store, self._key, self._name = store, key, name

    @contextmanager
    def reported(self, what: str, rule: str = "", kind: type[CommError] = CommError) -> Iterator[None]:
        """Raise an `OSError` of the block as a sentence, here and on the other ranks."""
        try:
            yield
        except OSError as error:
            reason = f"{self._name} {what} ({error.strerror or error}){rule}."
            self._store.set(self._key, reason)
            raise kind(reason) from error

    def check(self) -> None:
        """Raise if another rank cannot join."""
        if self._store.check([self._key]):
            raise CommError(bytes(self._store.get(self._key)).decode())
