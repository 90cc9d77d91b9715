"""Makes torch create recoverable groups, and creates the default group when the rank joins its world.

Holds all private hooks into torch.distributed that this needs. Scripts still say "gloo". The self-test tries the hooks;
if they do not work, torch's own groups are used, with their timeouts, and the start says so.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from axon_nb.engine.groups import nccl
from axon_nb.engine.groups.native import BackendKind
from axon_nb.engine.groups.recoverable import RecoverableGroup
from axon_nb.engine.groups.state import GroupsState, current_groups, set_current_groups
from axon_nb.torch_api import torch_api

_NAME = "axon_nb"
_REPLACED = {"gloo", _NAME, "cpu:gloo", "undefined", "none"}
_MIXED = "cpu:gloo,cuda:nccl"

c10d = dist.distributed_c10d


def install_recoverable_groups(
    state: GroupsState,
    root: Store,
    *,
    rank: int,
    epoch: int = 0,
    shares_memory: bool = False,
    device: torch.device | None = None,
    max_bytes: int = 0,
) -> None:
    """Make every Gloo group that is created from now on a recoverable one.

    Args:
        state: What the groups share.
        root: Rendezvous store of the cluster.
        rank: This rank.
        epoch: How often the groups have been rebuilt.
        shares_memory: Whether groups communicate through shared memory instead of Gloo; all ranks are on one host then.
        device: Where this rank computes; None: on the CPU.
        max_bytes: Maximum size of the memory of one group; 0: the usual size.
    """
    set_current_groups(state)
    state.epoch = epoch
    if state.installed:
        return
    state.installed = True

    def create(options: Any, _: Any) -> RecoverableGroup:
        return RecoverableGroup(
            state,
            root,
            epoch=state.epoch,
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout or timedelta(minutes=30),
            name=options.group_id,
            global_rank=rank,
            # The default group has those from 0 on, however many they become.
            members=[] if options.group_id == "0" else list(options.global_ranks_in_group),
            shares_memory=shares_memory,
            rank_device=device or torch.device("cpu"),
            max_bytes=max_bytes,
        )

    dist.Backend.register_backend(_NAME, create, extended_api=True, devices=["cpu", "cuda"])
    torch_api().register_group_class(_NAME)
    original = c10d._new_process_group_helper

    def helper(size: int, group_rank: int, ranks: list[int], backend: Any, *args: Any, **kwargs: Any) -> Any:
        replaced, native = _is_replaced(str(backend).lower()), state.native
        name = args[1] if len(args) > 1 else kwargs.get("group_name", "")
        state.creating = (str(name), list(ranks), time.monotonic_ns()) if ranks else None
        try:
            group, store = original(
                size, group_rank, ranks, dist.Backend(_NAME) if replaced else backend, *args, **kwargs
            )
            if native is not None and not state.skips_rendezvous:
                native.connect(group, state.epoch)
        finally:
            state.creating = None
        forget_equal_meshes()
        if isinstance(group, RecoverableGroup):
            # What `dist.get_backend` returns and scripts compare with.
            c10d._world.pg_map[group] = (dist.Backend("gloo"), store)
        return group, store

    c10d._new_process_group_helper = helper


def _is_replaced(backend: str) -> bool:
    """Whether a group of this backend becomes a recoverable one.

    For a mesh of CUDA devices in a Gloo world, torch asks for NCCL beside Gloo. Ranks of such a world may share a card,
    which NCCL refuses; a recoverable group takes CUDA tensors, too.
    """
    return backend in _REPLACED or (backend == _MIXED and nccl.groups() is None)


def forget_equal_meshes() -> None:
    """Clear DTensor's cache of placements, which takes an earlier mesh for an equal one with other groups.

    A model that is built again would communicate in groups of the earlier mesh. After a repair only some ranks have
    that mesh in their cache: they would wait for the others in another group. Clears the cache of the calling thread;
    torch keeps one per thread, and runs the backward pass on CUDA in another one.
    """
    # Whatever makes a DTensor imports torch._dynamo. To import it here would cost each rank a second when it starts.
    if "torch.distributed.tensor" in sys.modules and "torch._dynamo" in sys.modules:
        with contextlib.suppress(ImportError):
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            _clear_sharding_prop_cache()


@contextlib.contextmanager
def named_group(name: str) -> Iterator[None]:
    """Give this name to the group that `new_group` creates next.

    torch names a group that only its members create by the number of groups on the rank. If ranks have different
    numbers of groups, they would wait for each other under different names.
    """
    original = c10d._process_group_name
    c10d._process_group_name = lambda ranks, use_hashed_name: c10d.GroupName(name)
    try:
        yield
    finally:
        c10d._process_group_name = original


def all_groups() -> list[RecoverableGroup]:
    """Return the recoverable groups of this rank by name: in the same order on all ranks that share them."""
    groups = [group for group in list(c10d._world.pg_names) if isinstance(group, RecoverableGroup)]
    return sorted(groups, key=lambda group: (len(group.group_name), group.group_name))


def rebuildable_groups() -> list[Any]:
    """Return the groups of this rank that recovery rebuilds: recoverable ones, then those of NCCL; see `all_groups`."""
    native = nccl.groups()
    return [*all_groups(), *(native.all() if native is not None else [])]


def init_default_group(
    backend: str,
    *,
    store: Store,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout_s: float,
    epoch: int = 0,
    recoverable: bool,
    kind: BackendKind = nccl.NCCL,
    max_bytes: int = 0,
    state: GroupsState | None = None,
) -> None:
    """Join the default group; collective over all ranks.

    Args:
        backend: ``shm``, ``gloo`` or ``nccl``. The first is for recoverable groups.
        store: Rendezvous store that all ranks can reach.
        rank: This rank.
        world_size: Number of ranks.
        device: Where this rank computes.
        timeout_s: Timeout of every collective in seconds, also in groups created later without a `timeout=`.
        epoch: How often the groups have been rebuilt.
        recoverable: Whether groups are rebuilt after a failure; otherwise they are torch's own, with their timeout.
        kind: The groups of an ``nccl`` world.
        max_bytes: Maximum size of the memory that one group shares; 0: the usual size.
        state: What the groups share; None: what `current_groups` returns.
    """
    timeout, state = timedelta(seconds=timeout_s), state or current_groups()
    _set_default_timeout(timeout)
    if recoverable:
        install_recoverable_groups(
            state, store, rank=rank, epoch=epoch, shares_memory=backend == "shm", device=device, max_bytes=max_bytes
        )
        if backend == "nccl":
            nccl.install_native_groups(store, device=device, timeout=timeout, kind=kind)
            nccl.install_fence(state.abort)
            # The device is not bound to the group; see `swap_backend`. The rank has set its current device.
            warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
    # A replacement connects as the other ranks do: in `recovery.join_groups`, all groups in order.
    with state.without_rendezvous() if epoch else contextlib.nullcontext():
        dist.init_process_group(
            kind.torch_name if backend == "nccl" else "gloo",
            store=PrefixStore(f"join{epoch}/", store),  # a rank that joins later finds no keys of an earlier epoch
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )


def _set_default_timeout(timeout: timedelta) -> None:
    """Replace torch's 30 minutes (10 on NCCL) for groups created without a `timeout=`."""
    vars(dist.distributed_c10d).update(default_pg_timeout=timeout, default_pg_nccl_timeout=timeout)
