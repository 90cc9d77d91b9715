"""Which communication calls of this rank are in progress."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from axon_nb.engine.groups.flight_recorder import native_waits
from axon_nb.engine.groups.install import all_groups, rebuildable_groups
from axon_nb.engine.groups.state import current_groups
from axon_nb.records.waits import PendingCall

__all__ = ["GroupWaits", "group_waits"]


@dataclass(frozen=True, slots=True)
class GroupWaits:
    """The communication calls in progress on this rank."""

    pending: tuple[PendingCall, ...]
    counts: Mapping[str, int]
    """Collectives started, by group."""
    collectives: int = 0
    """Collectives that the cell started, over all groups."""
    call: str = ""
    """The call that the main thread is in, if its stack does not show it; else empty."""


def group_waits() -> GroupWaits:
    """Report the calls in progress on this rank, and how many collectives it started: by group, and in the cell."""
    state, groups = current_groups(), {group.group_name: group for group in all_groups()}
    pending = []
    for call in state.calls.pending():
        group = groups.get(call.group)
        if group is None:
            continue
        ranks = dist.get_process_group_ranks(group)
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
    native = state.native
    created = {_creation(str(group.group_name)): 1 for group in rebuildable_groups()}
    counts = {name: group.sequence for name, group in groups.items()} | created
    if (creating := state.creating) is not None:
        name, members, since_ns = creating
        counts[_creation(name)] = 1
        call_fields = {
            "number": since_ns,
            "name": "new_group",
            "group": _creation(name),
            "ranks": members,
            "sequence": 1,
        }
        seconds = (time.monotonic_ns() - since_ns) / 1e9
        pending.insert(0, {**call_fields, "peer": -1, "bytes": 0, "seconds": seconds})
    if native is not None:
        return _to_waits(**native_waits(native, pending, counts))
    return _to_waits(pending, counts, collectives=state.calls.num_collectives)


def _to_waits(
    pending: Sequence[Mapping[str, Any]], counts: Mapping[str, int], *, collectives: int = 0, call: str = ""
) -> GroupWaits:
    calls = tuple(PendingCall(**{**fields, "ranks": tuple(fields["ranks"])}) for fields in pending)
    return GroupWaits(calls, counts, collectives, call)


def _creation(name: str) -> str:
    """Return the name under which the creation of a group counts as a collective of its ranks."""
    return f"new_group {name}"
