"""Waiting for the other ranks of a group that is being made: they may come at very different times.

Connecting in Gloo has a limit of a few seconds, which a slow rank would break; here the limit is the group's own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from axon_nb.engine.groups.abort import raise_if_aborted

__all__ = ["nobody_to_wait_for", "wait_for_all"]

_PIECE = timedelta(milliseconds=20)

_off: list[bool] = []


@contextlib.contextmanager
def nobody_to_wait_for() -> Iterator[None]:
    """On a replaced rank: the others have its groups already, and only form them anew."""
    _off.append(True)
    try:
        yield
    finally:
        _off.pop()


def wait_for_all(store: Store, place: str, *, rank: int, size: int, limit: timedelta) -> None:
    """Say that this rank has come to `place`, and wait for the others.

    Args:
        store: The store that all ranks reach.
        place: Prefix of the keys; another one for each occasion.
        rank: This process's rank in the group.
        size: Number of ranks in the group.
        limit: How long to wait.

    Raises:
        Aborted: the cell was ended meanwhile.
        DistStoreError: a rank did not come.
    """
    if _off:
        return
    keys = [f"{place}/{other}" for other in range(size)]
    store.set(keys[rank], "1")
    end = time.monotonic() + limit.total_seconds()
    while True:
        try:
            store.wait(keys, _PIECE)
            return
        except dist.DistStoreError:
            raise_if_aborted("new_group")
            if time.monotonic() > end:
                raise
