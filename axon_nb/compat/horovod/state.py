"""What Horovod is on this rank between `init` and `shutdown`: the process sets, the calls under way, the hosts."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from axon_nb.comm import ProcessGroup
from axon_nb.comm.forming import forming
from axon_nb.compat.horovod.errors import NotInitializedError
from axon_nb.compat.horovod.negotiation import Channel
from axon_nb.compat.horovod.operation import Operation
from axon_nb.compat.horovod.transfers import stand_in

__all__ = ["Member", "State", "current", "end_member", "find", "forget", "make_member", "remember"]


@dataclass(slots=True)
class Member:
    """A process set as one rank has it."""

    number: int
    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    groups: tuple[ProcessGroup, ProcessGroup]
    """What carries the rounds of the negotiation, and what carries the data."""
    channel: Channel | None
    """None: this rank is not in the set."""


@dataclass(slots=True)
class State:
    """Of one rank."""

    rank: int
    hosts: tuple[str, ...]
    """The host of each rank."""
    owner: bool = False
    """Whether `init` formed the default group, so that `shutdown` ends it."""
    sets: dict[int, Member] = field(default_factory=dict)
    """By number; 0 is the set of all ranks."""
    next_set: int = 0
    handles: dict[int, tuple[Channel, Sequence[Operation], Any]] = field(default_factory=dict)
    """The calls that were not waited for, by number."""
    next_handle: int = 0
    lost: set[int] = field(default_factory=set)
    """Numbers of calls that were under way when their cell was ended."""
    formed: int = 0
    """Which forming of the groups all this is about."""
    serial: int = field(default_factory=itertools.count(1).__next__)
    """Tells one `init` of this process from another."""

    @property
    def era(self) -> tuple[int, int]:
        """Changes when everything that was under way is lost."""
        return self.serial, self.formed

    def freshen(self) -> None:
        """Forget the calls that were under way when the groups were formed anew: no rank has them any more."""
        if self.formed == forming():
            return
        self.formed = forming()
        self.lost |= set(self.handles)
        self.handles.clear()
        for member in self.sets.values():
            if member.channel is not None:
                member.channel.reset()


# By default group: ranks of a mock world have one each in one process. Held weakly, as groups must not be kept alive
# when the default group is ended: Gloo takes the process down then.
_states: weakref.WeakKeyDictionary[Any, State] = weakref.WeakKeyDictionary()


def find() -> State | None:
    """What Horovod is here; None: it was not initialized."""
    if not dist.is_initialized():
        return None
    state = _states.get(dist.group.WORLD)
    if state is not None:
        state.freshen()
    return state


def current() -> State:
    """What Horovod is here.

    Raises:
        NotInitializedError: nothing yet.
    """
    state = find()
    if state is None:
        raise NotInitializedError
    return state


def remember(state: State) -> None:
    """From now on Horovod is this here."""
    state.formed = forming()
    _states[dist.group.WORLD] = state


def forget() -> None:
    """Horovod is nothing here any more."""
    _states.pop(dist.group.WORLD, None)


def make_member(state: State, ranks: Sequence[int]) -> Member:
    """Make the groups of a process set and note it; collective over all ranks, members or not."""
    groups = (ProcessGroup(ranks), ProcessGroup(ranks))
    channel = Channel(*groups, absent=stand_in) if groups[0].is_member else None
    member = Member(state.next_set, tuple(sorted(ranks)), groups, channel)
    state.sets[member.number] = member
    state.next_set += 1
    return member


# Groups with calls under way: to end one would wait for them.
_kept: list[Member] = []


def end_member(member: Member) -> None:
    """End the groups of a process set, unless calls are under way in them, which nobody will complete."""
    if member.channel is None:
        return
    if member.channel.busy:
        _kept.append(member)
        return
    for group in member.groups:
        dist.destroy_process_group(group.torch_group)
