"""A group of ranks, as every rank sees it: also those that are no members."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch.distributed as dist

from axon_nb.comm.errors import CommError, InvalidRank, NotInGroup, WorldClosed
from axon_nb.comm.kinds import Backend
from axon_nb.comm.mock import NAME, MockBackend

__all__ = ["GroupFacts", "GroupLike", "ProcessGroup", "checked_ranks", "resolve"]


class GroupFacts(NamedTuple):
    """What never changes of a group."""

    ranks: tuple[int, ...]
    """Global ranks of the members, ascending."""
    backend: Backend
    rank: int = -1
    """This process's rank in the group; -1: it is no member."""
    name: str = ""
    """torch's name of the group."""
    emits_spans: bool = False
    """Whether the group itself records what it carries."""


class ProcessGroup:
    """Some ranks of the world that communicate among themselves.

    Making one is collective: every rank of the world makes it, members or not, in the same order. Ranks in calls
    (`src`, `dst`) count within the group, from 0, in ascending order of the global ranks.

    Args:
        ranks: Global ranks: a list, a range, or any iterable of ints.

    Raises:
        InvalidRank: one of them is not in the world, or is there twice, or there is none.
        WorldClosed: there is no world.
    """

    facts: GroupFacts

    def __init__(self, ranks: Iterable[int]) -> None:
        if not dist.is_initialized():
            raise WorldClosed("There is no world to make a group in: `World.init()` comes first.")
        chosen = checked_ranks(ranks, dist.get_world_size())
        made = dist.new_group(list(chosen))
        member = dist.get_rank() in chosen
        self._torch: Any = made if member else None
        self.facts = _facts_of(made, chosen) if member else GroupFacts(chosen, _backend_of(None))

    @classmethod
    def with_facts(cls, torch_group: Any, facts: GroupFacts) -> ProcessGroup:
        """The group of torch's of which these facts are known; None: of which this process is no member."""
        self = cls.__new__(cls)
        self._torch = torch_group
        self.facts = facts
        return self

    @classmethod
    def wrap(cls, group: dist.ProcessGroup | None = None) -> ProcessGroup:
        """The default group, or one that torch made.

        Raises:
            WorldClosed: there is no default group.
        """
        if group is None and not dist.is_initialized():
            raise WorldClosed("There is no world: `World.init()`, or run this in a `%%distributed` cell.")
        torch_group: Any = dist.group.WORLD if group is None else group
        return cls.with_facts(torch_group, _facts_of(torch_group, tuple(dist.get_process_group_ranks(torch_group))))

    @classmethod
    def from_backend(cls, backend: Any) -> ProcessGroup:
        """The group of a backend that was made by hand, such as one of `MockBackend.create_world(4)`."""
        ranks, group = tuple(range(backend.world_size())), backend.group
        return cls.with_facts(group, GroupFacts(ranks, Backend(backend.kind), group.rank(), group.group_name))

    @classmethod
    def mock(cls) -> ProcessGroup:
        """A group of this process alone, without any world: every collective is over at once."""
        return cls.from_backend(MockBackend.create_world(1)[0])

    @property
    def torch_group(self) -> Any:
        """Torch's own group.

        Raises:
            NotInGroup: this rank is no member.
        """
        self._check_member()
        return self._torch

    def _check_member(self) -> None:
        if self._torch is None:
            raise NotInGroup(
                f"Rank {dist.get_rank()} is no member of the group of ranks {list(self.ranks)}: guard the call with "
                "`if group.contains(rank)`, or make it on the default group."
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the members, ascending."""
        return self.facts.ranks

    @property
    def backend(self) -> Backend:
        """What carries the group's messages."""
        return self.facts.backend

    def rank(self) -> int:
        """This process's rank in the group, from 0.

        Raises:
            NotInGroup: it is no member.
        """
        self._check_member()
        return self.facts.rank

    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    world_size = size

    def contains(self, rank: int) -> bool:
        """Whether this global rank is a member."""
        return rank in self.ranks

    @property
    def is_member(self) -> bool:
        """Whether this process is a member."""
        return self._torch is not None

    def check_rank(self, rank: int, name: str) -> int:
        """`rank` if the group has it.

        Raises:
            InvalidRank: it has not.
        """
        if type(rank) is not int:
            rank = _as_rank(rank, name)
        if not 0 <= rank < len(self.ranks):
            mapped = f" (global rank {rank} is number {self.ranks.index(rank)} there)" if rank in self.ranks else ""
            raise InvalidRank(
                f"{name}={rank}: the group of ranks {list(self.ranks)} has ranks 0 to {len(self.ranks) - 1}{mapped}."
            )
        return rank

    def __repr__(self) -> str:
        who = f"rank={self.rank()}" if self.is_member else "not a member"
        return f"ProcessGroup({who}, ranks={list(self.ranks)}, backend={self.backend.value!r})"


GroupLike = ProcessGroup | dist.ProcessGroup | None
"""What `group=` takes: ours, torch's, or None for the default group."""


# What never changes of a group of torch's. Held weakly: a Gloo group that outlives `destroy_process_group` takes the
# process down when it ends ("terminate called without an active exception").
_known: weakref.WeakKeyDictionary[Any, GroupFacts] = weakref.WeakKeyDictionary()


def resolve(group: Any) -> ProcessGroup:
    """The group that `group=` means; a World stands for its default group, a mesh with one axis for the axis's.

    Raises:
        CommError: that is no group.
        NotInGroup: that is what torch gives a rank that is no member.
        WorldClosed: there is no default group.
    """
    if isinstance(group, ProcessGroup):
        return group
    if group is not None and callable(default := getattr(group, "default_group", None)):
        chosen: ProcessGroup = default()
        return chosen
    torch_group: Any = dist.group.WORLD if group is None else group
    try:
        facts = None if torch_group is None else _known.get(torch_group)
    except TypeError:
        raise _no_group(group) from None
    if facts is not None:
        return ProcessGroup.with_facts(torch_group, facts)
    if torch_group is not None and not isinstance(torch_group, dist.ProcessGroup):
        return resolve(_of_mesh(torch_group))
    wrapped = ProcessGroup.wrap(torch_group)
    _known[wrapped.torch_group] = wrapped.facts
    return wrapped


def _of_mesh(mesh: Any) -> Any:
    if not callable(getattr(mesh, "get_group", None)):
        raise _no_group(mesh)
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        raise CommError(f"group: a mesh of axes {', '.join(map(str, names))}; take one of them: mesh[{names[0]!r}].")
    return mesh.get_group()


def _no_group(given: Any) -> CommError:
    nobody = dist.GroupMember.NON_GROUP_MEMBER
    if type(given) is type(nobody) and given == nobody:
        return NotInGroup("this rank is no member of the group: torch's `new_group` gave it no group.")
    return CommError(
        f"group={given!r}: it is a ProcessGroup, a World, a mesh with one axis, a group of torch's, or None for all "
        "ranks. A group of some ranks: `ProcessGroup([0, 2])`, made on every rank."
    )


def checked_ranks(ranks: Iterable[int], world_size: int) -> tuple[int, ...]:
    """The ranks of a new group.

    Raises:
        InvalidRank: one is not in the world or is there twice, or there is none.
    """
    if not isinstance(ranks, Iterable):
        raise InvalidRank(f"ranks: {ranks!r} is no list of ranks, such as [0, 1].")
    chosen = [_as_rank(rank, "ranks") for rank in ranks]
    if not chosen:
        raise InvalidRank("A group has at least one rank; got none.")
    for rank in chosen:
        if not 0 <= rank < world_size:
            raise InvalidRank(f"rank {rank}: the world has ranks 0 to {world_size - 1}.")
    if len(set(chosen)) < len(chosen):
        raise InvalidRank(f"ranks {list(chosen)}: one is there twice.")
    return tuple(sorted(chosen))


def _as_rank(given: Any, name: str) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise InvalidRank(f"{name}: {given!r} is no rank; ranks are whole numbers from 0.") from None


def _facts_of(group: Any, ranks: tuple[int, ...]) -> GroupFacts:
    emits_spans = bool(getattr(group, "emits_spans", False))
    return GroupFacts(ranks, _backend_of(group), int(group.rank()), str(group.group_name), emits_spans)


def _backend_of(group: Any) -> Backend:
    name = str(dist.get_backend(group)).lower()
    if NAME in name:
        return Backend.MOCK
    return Backend.NCCL if "nccl" in name else Backend.GLOO
