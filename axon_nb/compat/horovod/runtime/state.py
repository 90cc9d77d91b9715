"""Horovod's state on this rank between `init` and `shutdown`: process sets, calls in progress, hosts."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from axon_nb.comm import ProcessGroup
from axon_nb.comm.group import rebuild_count
from axon_nb.compat.horovod.runtime.errors import NotInitializedError
from axon_nb.compat.horovod.runtime.negotiation import Channel
from axon_nb.compat.horovod.runtime.operation import Operation
from axon_nb.compat.horovod.runtime.transfers import placeholder

__all__ = ["Member", "State", "current", "end_member", "find", "forget", "make_member", "remember"]


@dataclass(slots=True)
class Member:
    """One rank's view of a process set."""

    number: int
    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    groups: tuple[ProcessGroup, ProcessGroup]
    """Groups for the negotiation and for the data."""
    channel: Channel | None
    """None if this rank is not in the set."""


@dataclass(slots=True)
class State:
    """Horovod's state on one rank."""

    rank: int
    hosts: tuple[str, ...]
    """The host of each rank."""
    owner: bool = False
    """Whether `init` created the default group, so that `shutdown` destroys it."""
    sets: dict[int, Member] = field(default_factory=dict)
    """Process sets by id; 0 is the set of all ranks."""
    next_set: int = 0
    handles: dict[int, tuple[Channel, Sequence[Operation], Any]] = field(default_factory=dict)
    """Calls that were not waited for, by handle."""
    next_handle: int = 0
    lost: set[int] = field(default_factory=set)
    """Handles of calls that were aborted with their cell."""
    formed: int = 0
    """How often the groups had been rebuilt when this state was created."""
    serial: int = field(default_factory=itertools.count(1).__next__)
    """Distinguishes this `init` from others in this process."""

    @property
    def era(self) -> tuple[int, int]:
        """Changes when all calls in progress are lost."""
        return self.serial, self.formed

    def freshen(self) -> None:
        """Forget the pending calls after the groups were rebuilt: no rank has them any more."""
        if self.formed == rebuild_count():
            return
        self.formed = rebuild_count()
        self.lost |= set(self.handles)
        self.handles.clear()
        for member in self.sets.values():
            if member.channel is not None:
                member.channel.reset()


# By default group: the ranks of a mock world share one process. Weak references, as groups must not be kept alive
# after the default group was destroyed: Gloo would crash the process.
_states: weakref.WeakKeyDictionary[Any, State] = weakref.WeakKeyDictionary()


def find() -> State | None:
    """Return Horovod's state; None if not initialized."""
    if not dist.is_initialized():
        return None
    state = _states.get(dist.group.WORLD)
    if state is not None:
        state.freshen()
    return state


def current() -> State:
    """Return Horovod's state.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
    """
    state = find()
    if state is None:
        raise NotInitializedError
    return state


def remember(state: State) -> None:
    """From now on Horovod is this here."""
    state.formed = rebuild_count()
    _states[dist.group.WORLD] = state


def forget() -> None:
    """Remove Horovod's state."""
    _states.pop(dist.group.WORLD, None)


def make_member(state: State, ranks: Sequence[int]) -> Member:
    """Create and register the groups of a process set; collective over all ranks, members or not."""
    groups = (ProcessGroup(ranks), ProcessGroup(ranks))
    channel = Channel(*groups, absent=placeholder) if groups[0].is_member else None
    member = Member(state.next_set, tuple(sorted(ranks)), groups, channel)
    state.sets[member.number] = member
    state.next_set += 1
    return member


# Groups with calls in progress: destroying one would wait for them.
_kept: list[Member] = []


def end_member(member: Member) -> None:
    """Destroy the groups of a process set, unless they have calls in progress, which would never complete."""
    if member.channel is None:
        return
    if member.channel.busy:
        _kept.append(member)
        return
    for group in member.groups:
        dist.destroy_process_group(group.torch_group)
