"""How the ranks of a group get shared memory: the first rank creates it, the others find it through the store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

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
    descriptor = -1
    try:
        if rank == 0:
            descriptor = SharedMemory.create(layout)
            store.set(key, SharedMemory.address_of(descriptor))
        else:
            descriptor = _open(store, key, members[0], deadline, give_up)
        progress = Progress(SharedMemory(descriptor, layout), rank, members, give_up)
        progress.wait_until_ready(deadline)
        return progress
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _open(store: Store, key: str, first: int, deadline: float, give_up: Callable[[], None] | None) -> int:
    while not store.check([key]):
        if give_up is not None:
            give_up()
        if time.monotonic() > deadline:
            raise SharedMemoryTimeoutError(f"rank {first} did not create the group's memory in time")
        time.sleep(_PIECE_S)
    try:
        return SharedMemory.open(bytes(store.get(key)).decode())
    except OSError as error:
        raise ForeignHostError(
            f"This rank cannot open the shared memory of rank {first} ({error.strerror or error}): all ranks must run "
            "on one host, in one container and as one user. Use the backend gloo instead."
        ) from None
