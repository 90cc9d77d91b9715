"""How the ranks of a group get shared memory: the first rank creates it, the others find it through the store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from torch._C._distributed_c10d import Store

from axon_nb.comm.errors import CommError, InvalidArgumentError
from axon_nb.comm.shared_memory.segment import futex
from axon_nb.comm.shared_memory.segment.errors import SharedMemoryTimeoutError
from axon_nb.comm.shared_memory.segment.memory import Layout, SharedMemory
from axon_nb.comm.shared_memory.segment.progress import Progress, is_crowded, open_bytes
from axon_nb.records.units import exact_bytes

_PIECE_S = 0.005
_KIB = 1024
_USUAL_BYTES = 256 << 20
"""Maximum size of the memory of all groups of a rank, unless it is set; further groups get the smallest possible."""
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
        max_bytes: Maximum size of the memory of all groups of the first rank, each of which gets at most half of what
            is left; 0: the usual size.

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
    failure = _Failure(store, f"{key}/failed", f"Rank {members[rank]}")
    descriptor = -1
    try:
        if rank == 0:
            layout = _layout(len(members), max_bytes, failure)
            with failure.reported(f"cannot create {exact_bytes(layout.total)} of shared memory for the group"):
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
            layout = Layout.read(descriptor, len(members))
        with failure.reported(f"cannot map {exact_bytes(layout.total)} of shared memory for the group"):
            memory = SharedMemory(descriptor, layout)
        progress = Progress(memory, rank, members, give_up)
        progress.wait_until_ready(deadline, failure.check)
        return progress
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _layout(size: int, max_bytes: int, failure: _Failure) -> Layout:
    """Return the layout of a group of `size` ranks; see `form`."""
    used = open_bytes()
    room = (max_bytes or _USUAL_BYTES) - used
    layout = Layout.of(size, max(1, room // 2), is_crowded=is_crowded(size))
    if max_bytes and layout.total > room:
        others = f", of which other groups take {exact_bytes(used)}" if used else ""
        failure.raise_everywhere(
            InvalidArgumentError,
            f"A group of {size} ranks needs at least {exact_bytes(-(-layout.total // _KIB) * _KIB)} of shared memory, "
            f"but group_memory is {exact_bytes(max_bytes)}{others}: raise it, or set it to 0 for the usual size.",
        )
    return layout


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
            self.raise_everywhere(kind, f"{self._name} {what} ({error.strerror or error}){rule}.", error)

    def raise_everywhere(self, kind: type[CommError], reason: str, cause: Exception | None = None) -> NoReturn:
        """Raise a reason here, and as a `CommError` on the other ranks, unless another rank's came first."""
        self.check()  # the memory may be gone because another rank failed
        self._store.set(self._key, reason)
        raise kind(reason) from cause

    def check(self) -> None:
        """Raise if another rank cannot join."""
        if self._store.check([self._key]):
            raise CommError(bytes(self._store.get(self._key)).decode())
