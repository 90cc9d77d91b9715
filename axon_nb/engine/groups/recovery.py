"""Abort, from any thread at any time; and, when all ranks are idle, forming the groups anew under the same objects."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.group import mark_rebuilt
from axon_nb.compat.deepspeed import clear_cached_groups
from axon_nb.engine.groups import activity, nccl
from axon_nb.engine.groups.abort import ABORT, stand_down, stop_at
from axon_nb.engine.groups.flight_recorder import native_waits
from axon_nb.engine.groups.gloo import leaked
from axon_nb.engine.groups.install import all_groups, c10d, groups_state, named_group
from axon_nb.engine.groups.store import nobody_to_wait_for
from axon_nb.engine.groups.work import fail_all
from axon_nb.engine.groups.wrapper_reset import rebuild_reducers, reset_wrappers
from axon_nb.records.protocol.recovery import GroupRecord, RebuildReport
from axon_nb.records.waits import PendingCall

__all__ = [
    "GroupWaits",
    "abort",
    "agree_on_groups",
    "agree_on_names",
    "condition",
    "join_groups",
    "recover",
    "recreate",
    "registry",
    "stand_down",
    "waits",
]

_POISON_LIMIT_S = 1.0


def abort(*, again: bool) -> None:
    """End every wait of this rank in any group, and refuse new ones until `recover`.

    Args:
        again: The groups have been poisoned already; only wake who waits.
    """
    ABORT.set()
    threads = []
    if not again:
        # Each group takes milliseconds, one after the other that is half a second for a dozen.
        poisoners = [group.poisoner() for group in all_groups()]
        threads = [threading.Thread(target=poison, name="axon_nb-poison", daemon=True) for poison in poisoners]
    for thread in threads:
        thread.start()
    fail_all()
    if (native := nccl.groups()) is not None:
        native.abort(limit_s=nccl.ABORT_LIMIT_S)
    end = time.monotonic() + _POISON_LIMIT_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


@dataclass(frozen=True, slots=True)
class GroupWaits:
    """The calls of this rank that have begun and not ended."""

    pending: tuple[PendingCall, ...]
    counts: Mapping[str, int]
    """Collectives begun, by group."""
    collectives: int = 0
    """Collectives begun in the cell, in all groups together."""
    call: str = ""
    """What the main thread is in although its stack does not show it; empty otherwise."""


def waits() -> GroupWaits:
    """The calls of this rank that have begun and not ended, and how many collectives: by group, and in the cell."""
    groups = {group.group_name: group for group in all_groups()}
    pending = []
    for call in activity.pending():
        group = groups.get(call.group)
        if group is None:
            continue
        ranks = sorted(c10d._world.pg_group_ranks[group], key=c10d._world.pg_group_ranks[group].__getitem__)
        pending.append(
            {
                "number": call.number,
                "name": call.name,
                "group": call.group,
                "ranks": ranks,
                "sequence": call.sequence,
                "peer": ranks[call.peer] if 0 <= call.peer < len(ranks) else -1,
                "bytes": call.bytes,
                "seconds": (time.monotonic_ns() - call.started_ns) / 1e9,
            }
        )
    counts = {name: group.sequence for name, group in groups.items()} | {_made(name): 1 for name in groups}
    if (forming := groups_state.forming) is not None:
        name, members, since_ns = forming
        counts[_made(name)] = 1
        facts = {"number": since_ns, "name": "new_group", "group": _made(name), "ranks": members, "sequence": 1}
        seconds = (time.monotonic_ns() - since_ns) / 1e9
        pending.insert(0, {**facts, "peer": -1, "bytes": 0, "seconds": seconds})
    if (native := nccl.groups()) is not None:
        return _as_waits(**native_waits(native, pending, counts))
    return _as_waits(pending, counts, collectives=activity.collectives())


def _as_waits(
    pending: Sequence[Mapping[str, Any]], counts: Mapping[str, int], *, collectives: int = 0, call: str = ""
) -> GroupWaits:
    calls = tuple(PendingCall(**{**facts, "ranks": tuple(facts["ranks"])}) for facts in pending)
    return GroupWaits(calls, counts, collectives, call)


def _made(name: str) -> str:
    """Under what name the making of a group counts as a collective of its ranks."""
    return f"new_group {name}"


def condition() -> dict[str, Any]:
    """Whether the groups are fit for use here: the last forming's number, and whether it or an abort is under way."""
    return {"epoch": groups_state.epoch, "aborted": ABORT.is_set(), "forming": groups_state.reforming}


def registry() -> list[GroupRecord]:
    """The groups that this rank is in besides the default one."""
    default, native = c10d._get_default_group(), nccl.groups()
    groups: list[Any] = [*all_groups(), *(native.all() if native is not None else [])]
    return [
        GroupRecord(
            name=str(group.group_name),
            ranks=tuple(sorted(c10d._world.pg_group_ranks[group])),
            desc=str(group.group_desc or ""),
            backend=str(dist.get_backend(group)),
        )
        for group in sorted(groups, key=lambda group: (len(group.group_name), group.group_name))
        if group is not default
    ]


def recreate(groups: Sequence[GroupRecord]) -> None:
    """On a replaced rank: make the groups that its predecessor was in, under their old names and in their order."""
    for group in groups:
        if group.name.isdigit():
            c10d._world.group_count = int(group.name)
            with nobody_to_wait_for():
                dist.new_group(list(group.ranks), backend=group.backend, group_desc=group.desc or None)
            continue
        with nobody_to_wait_for(), named_group(group.name):
            dist.new_group(
                list(group.ranks),
                backend=group.backend,
                use_local_synchronization=True,
                group_desc=group.desc or None,
            )


def join_groups(groups: Sequence[GroupRecord], *, epoch: int) -> None:
    """On a replaced rank that has joined the default group: join its predecessor's groups; collective over all ranks.

    The other ranks are in `recover`.

    Args:
        groups: What `registry` returned on the other ranks, for the groups that this rank is in.
        epoch: How often the groups have been rebuilt.
    """
    if (native := nccl.groups()) is not None:
        recreate(groups)
        native.reform(epoch)
        return
    whole = agree_on_groups({group.name: group.ranks for group in groups})
    recreate([group for group in groups if group.name in whole])


def agree_on_groups(own: Mapping[str, Sequence[int]]) -> set[str]:
    """Names of this rank's groups that all of their ranks have; collective over all ranks.

    A rank that was ended in `new_group`, or that destroyed a group by itself, lacks one: the others would wait for it
    in vain.

    Args:
        own: Global ranks of each group that this rank has, by name.
    """
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, sorted(own))
    return {name for name, ranks in own.items() if all(name in said[rank] for rank in ranks)}


def agree_on_names(device: torch.device | str = "cpu") -> None:
    """Set the number of the next group to the highest of all ranks: those that differ would hang in `new_group`."""
    count = torch.tensor(c10d._world.group_count, device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    c10d._world.group_count = int(count)


def _reform(epoch: int) -> int:
    groups = all_groups()
    if not groups:
        return 0
    default, *others = groups
    default.reform(epoch)
    whole = agree_on_groups({group.group_name: list(c10d._world.pg_group_ranks[group]) for group in others})
    for group in others:
        if group.group_name in whole:
            group.reform(epoch)
        else:
            group.give_up()
            c10d.destroy_process_group(group)
    return 1 + len(whole)


def recover(epoch: int, *, replaced: bool = False) -> RebuildReport:
    """Form all groups anew and put wrappers back; collective over all ranks, on the main thread.

    Args:
        epoch: The number of this forming, the same on all ranks, higher than any before.
        replaced: Whether a rank was replaced: its DDP objects are new, and the others' reducers must be.

    Returns:
        How many groups and wrappers, how many poisoned groups this process keeps, and which wrappers were not reset.
    """
    stand_down("")
    stop_at(None)
    activity.forget_all()
    mark_rebuilt()
    if not groups_state.installed:  # a torch that the groups were not tested with: nothing can be formed anew
        return RebuildReport(0, 0, 0, ())
    groups_state.epoch, groups_state.reforming = epoch, True
    native = nccl.groups()
    formed = _reform(epoch) if native is None else native.reform(epoch)
    wrappers, not_reset = reset_wrappers()
    if replaced:
        rebuild_reducers()
        clear_cached_groups()
    agree_on_names(native.device if native is not None else "cpu")
    groups_state.reforming = False
    return RebuildReport(formed, wrappers, leaked(), tuple(not_reset))
