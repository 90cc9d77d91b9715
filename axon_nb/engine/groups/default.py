"""The default process group: formed once, when the rank joins its world."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from axon_nb.engine.groups.fence import install_fence
from axon_nb.engine.groups.install import install_recoverable_groups
from axon_nb.engine.groups.nccl import install_native_groups

__all__ = ["form_default_group"]


def form_default_group(
    backend: str,
    *,
    store: Store,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout_s: float,
    epoch: int = 0,
    recoverable: bool,
) -> None:
    """Join the default group; collective over all ranks.

    Args:
        backend: ``gloo`` or ``nccl``.
        store: Rendezvous store that all ranks reach.
        rank: This rank.
        world_size: Number of ranks.
        device: Where this rank computes; bound to the group on NCCL, so that it connects at once.
        timeout_s: Limit of every collective, in seconds, also in groups made later without a `timeout=`.
        epoch: How often the groups have been rebuilt.
        recoverable: Whether groups are rebuilt after a failure; else they are torch's own, with their timeout.
    """
    timeout = timedelta(seconds=timeout_s)
    _limit_new_groups(timeout)
    late = False
    if recoverable:
        install_recoverable_groups(store, rank=rank, epoch=epoch)
        if backend == "nccl":
            install_native_groups(store, device=device, timeout=timeout)
            install_fence()
            # A newcomer connects as those do that were there before: in `NativeGroups.reform`, all groups in order.
            late = epoch > 0
    dist.init_process_group(
        backend,
        store=PrefixStore(f"join{epoch}/", store),  # who joins later finds no keys of those before
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" and not late else None,
    )


def _limit_new_groups(timeout: timedelta) -> None:
    """Replace torch's 30 minutes (10 on NCCL) for groups made without a `timeout=`."""
    vars(dist.distributed_c10d).update(default_pg_timeout=timeout, default_pg_nccl_timeout=timeout)
