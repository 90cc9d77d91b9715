"""Abort, from any thread at any time; and, when all ranks are idle, rebuild the groups under the same objects."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.group import rank_device, resolve
from axon_nb.compat.deepspeed import clear_cached_groups
from axon_nb.engine.groups import nccl
from axon_nb.engine.groups.install import all_groups, c10d, named_group, rebuildable_groups
from axon_nb.engine.groups.recoverable import RecoverableGroup
from axon_nb.engine.groups.state import current_groups
from axon_nb.engine.groups.wrapper_reset import rebuild_reducers, reset_wrappers
from axon_nb.records.protocol.recovery import GroupRecord, RebuildReport

_CLOSE_TIMEOUT_S = 1.0
_GLOO = "gloo"


def abort(*, again: bool) -> None:
    """End every wait of this rank in any group, and refuse new ones until `recover`.

    Args:
        again: Whether the connections were closed by an earlier abort; this one only wakes waiting threads.
    """
    state = current_groups()
    state.abort.set()
    threads = []
    if not again:
        # Each group takes milliseconds; one after the other that would be half a second for a dozen.
        closers = [group.connection_closer() for group in all_groups()]
        threads = [threading.Thread(target=close, name="axon_nb-close", daemon=True) for close in closers]
    for thread in threads:
        try:
            thread.start()
        except RuntimeError:  # the limit of threads is reached
            thread.run()
    state.fail_all_futures()
    if (native := state.native) is not None:
        native.abort(timeout_s=nccl.ABORT_TIMEOUT_S)
    end = time.monotonic() + _CLOSE_TIMEOUT_S
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, end - time.monotonic()))


def num_calls() -> int:
    """Return the number of communication calls that this rank has started; on NCCL from zero after each rebuild."""
    state = current_groups()
    return state.calls.num_calls + (0 if state.native is None else state.native.num_collectives())


def disable_groups(reason: str) -> None:
    """Refuse communication, because the groups cannot be rebuilt; cells still run."""
    current_groups().abort.clear(broken=reason)


def list_groups() -> list[GroupRecord]:
    """List the groups that this rank is in, besides the default one."""
    default = c10d._get_default_group()
    return [
        GroupRecord(
            name=str(group.group_name),
            ranks=tuple(sorted(c10d._world.pg_group_ranks[group])),
            desc=str(group.group_desc or ""),
            backend=str(dist.get_backend(group)),
            timeout_s=_timeout(group).total_seconds(),
        )
        for group in sorted(rebuildable_groups(), key=lambda group: (len(group.group_name), group.group_name))
        if group is not default
    ]


def _timeout(group: Any) -> timedelta:
    native = nccl.groups()
    return group.timeout if isinstance(group, RecoverableGroup) or native is None else native.timeout_of(group)


def recreate_groups(groups: Sequence[GroupRecord]) -> None:
    """Create, on a replacement rank, the groups of its predecessor: with their names and in their order."""
    for group in groups:
        options: dict[str, Any] = {"backend": group.backend, "group_desc": group.desc or None}
        options["timeout"] = timedelta(seconds=group.timeout_s)
        if group.name.isdigit():
            c10d._world.group_count = int(group.name)
            with current_groups().without_rendezvous():
                dist.new_group(list(group.ranks), **options)
            continue
        with current_groups().without_rendezvous(), named_group(group.name):
            dist.new_group(list(group.ranks), use_local_synchronization=True, **options)


def join_groups(groups: Sequence[GroupRecord], *, epoch: int) -> None:
    """Join the predecessor's groups, on a replacement that has joined the default group; collective over all ranks.

    The other ranks are in `recover`.

    Args:
        groups: What `list_groups` returned on the other ranks, for the groups that this rank is in.
        epoch: How often the groups have been rebuilt.
    """
    native = nccl.groups()
    if native is not None:
        if problems := list(filter(None, native.exchange(epoch, "").values())):
            raise RuntimeError(problems[0])
        native.rebuild(c10d._get_default_group(), epoch)
    complete = common_groups({group.name: group.ranks for group in groups})
    joinable = [group for group in groups if group.name in complete]
    recreate_groups([group for group in joinable if group.backend == _GLOO])
    if native is not None:
        # torch makes them without a connection.
        recreate_groups([group for group in joinable if group.backend != _GLOO])
        for group in native.all():
            if group is not c10d._get_default_group():
                native.rebuild(group, epoch)
        native.end_rebuild()


def common_groups(members: Mapping[str, Sequence[int]]) -> set[str]:
    """Return the names of this rank's groups that all of their ranks have; collective over all ranks.

    A rank that was aborted in `new_group`, or that destroyed a group on its own, lacks one: the others would wait
    for it forever.

    Args:
        members: Global ranks of each group that this rank has, by name.
    """
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, sorted(members))
    return {name for name, ranks in members.items() if all(name in names[rank] for rank in ranks)}


def sync_group_count(device: torch.device | str = "cpu") -> None:
    """Set the number of the next group to the highest of all ranks; if numbers differ, `new_group` hangs."""
    count = torch.tensor(c10d._world.group_count, device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    c10d._world.group_count = int(count)


def _rebuild_groups(epoch: int) -> int:
    """Rebuild the default group, agree on the others with it, and rebuild those: on all ranks in the same order.

    Gloo groups beside those of NCCL come first.
    """
    native, groups = nccl.groups(), rebuildable_groups()
    if not groups:
        return 0
    if native is not None:
        native.begin_rebuild()
    default = c10d._get_default_group()
    _rebuild(default, epoch)
    ranks_of, size = c10d._world.pg_group_ranks, dist.get_world_size()
    # Before a world that shrinks is complete, it still has the groups of the ranks that leave.
    others = [group for group in groups if group is not default and max(ranks_of[group]) < size]
    complete = common_groups({group.group_name: list(c10d._world.pg_group_ranks[group]) for group in others})
    for group in others:
        if group.group_name in complete:
            _rebuild(group, epoch)
        else:
            _drop(group)
    if native is not None:
        native.end_rebuild()
    return 1 + len(complete)


def _rebuild(group: Any, epoch: int) -> None:
    native = nccl.groups()
    if isinstance(group, RecoverableGroup) or native is None:
        group.rebuild(epoch)
    else:
        native.rebuild(group, epoch)


def _drop(group: Any) -> None:
    """Drop a group that some of its ranks do not have; operations on it raise."""
    if isinstance(group, RecoverableGroup):
        group.disable()
    c10d.destroy_process_group(group)


def recover(epoch: int, *, replaced: bool = False) -> RebuildReport:
    """Rebuild all groups and reset wrappers; collective over all ranks, on the main thread.

    Args:
        epoch: Number of this rebuild: the same on all ranks, and higher than any before.
        replaced: Whether a rank was replaced: its DDP objects are new, so the others need new reducers.
    """
    state = current_groups()
    state.abort.clear()
    state.abort.stop_at(None)
    state.calls.clear()
    state.joined.clear()
    if not state.installed:  # an untested torch: nothing can be rebuilt
        return RebuildReport(0, 0, 0, ())
    state.epoch, state.rebuilding = epoch, True
    native = state.native
    problem = nccl.device_problem(rank_device(resolve(None)), rank=dist.get_rank())
    # A rank without its device would fail in the first collective, and keep the others waiting there.
    if native is not None and any(native.exchange(epoch, problem).values()):
        state.rebuilding = False
        return RebuildReport(0, 0, 0, (), lost_device=problem)
    num_groups = _rebuild_groups(epoch)
    wrappers, not_reset = reset_wrappers()
    if replaced:
        rebuild_reducers()
        clear_cached_groups()
    sync_group_count(native.device if native is not None else "cpu")
    state.rebuilding = False
    return RebuildReport(num_groups, wrappers, len(state.gloo.abandoned), tuple(filter(None, [*not_reset, problem])))
