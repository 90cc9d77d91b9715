"""Which communication calls of this rank are in progress."""

from __future__ import annotations

import time

import torch.distributed as dist

from axon_nb.engine.groups.install import all_groups, rebuildable_groups
from axon_nb.engine.groups.state import current_groups
from axon_nb.records.waits.calls import GroupWaits, PendingCall


def group_waits() -> GroupWaits:
    """Report the calls in progress on this rank, and how many collectives it started: by group, and in the cell."""
    state, groups = current_groups(), {group.group_name: group for group in all_groups()}
    pending = []
    for call in state.calls.pending():
        group = groups.get(call.group)
        if group is None:
            continue
        members = dist.get_process_group_ranks(group)
        pending.append(
            PendingCall(
                number=call.number,
                name=call.name,
                group=call.group,
                ranks=tuple(members),
                sequence=call.sequence,
                peer=members[call.peer] if 0 <= call.peer < len(members) else -1,
                bytes=call.bytes,
                seconds=(time.monotonic_ns() - call.started_ns) / 1e9,
            )
        )
    native = state.native
    created = {_creation(str(group.group_name)): 1 for group in rebuildable_groups()}
    counts = {name: group.sequence for name, group in groups.items()} | created | state.joined
    if (creating := state.creating) is not None:
        name, members, since_ns = creating
        counts[_creation(name)] = 1
        seconds = (time.monotonic_ns() - since_ns) / 1e9
        creation = PendingCall(since_ns, "new_group", _creation(name), tuple(members), 1, -1, 0, seconds)
        pending.insert(0, creation)
    if (joining := state.joining) is not None:
        function, ranks, since_ns = joining
        counts[function] = state.joined[function]
        seconds = (time.monotonic_ns() - since_ns) / 1e9
        pending.insert(0, PendingCall(since_ns, function, function, ranks, counts[function], -1, 0, seconds))
    if native is not None:
        from axon_nb.engine.groups.flight_recorder import native_waits

        return native_waits(native, pending, counts)
    return GroupWaits(tuple(pending), counts, state.calls.num_collectives)


def _creation(name: str) -> str:
    """Return the name under which the creation of a group counts as a collective of its ranks."""
    return f"new_group {name}"
