"""Some of the ranks, that run collectives of their own."""

from __future__ import annotations

from collections.abc import Iterable

from axon_nb.compat.horovod.errors import NotSupportedError
from axon_nb.compat.horovod.negotiation import Channel
from axon_nb.compat.horovod.operation import Operation
from axon_nb.compat.horovod.state import Member, State, current, end_member, find, make_member
from axon_nb.compat.horovod.transfers import nothing
from axon_nb.errors import UsageError

__all__ = [
    "ProcessSet",
    "add_process_set",
    "channel_of",
    "check_ranks",
    "global_process_set",
    "register",
    "remove_process_set",
]


class ProcessSet:
    """Some ranks. Given to `hvd.init` or `hvd.add_process_set` it gets a number, and collectives take it.

    Args:
        ranks_or_comm: Ranks, counted among all.

    Raises:
        NotSupportedError: an MPI communicator.
        UsageError: one is no whole number, or there is none.
    """

    process_set_id: int | None = None
    """None: it was not added, or was removed."""
    mpi_comm = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise NotSupportedError(
                f"ProcessSet({ranks_or_comm!r}): there is no MPI here; a process set is made of a list of ranks."
            )
        given = list(ranks_or_comm)
        if not given or any(type(rank) is not int for rank in given):
            raise UsageError(f"ProcessSet({given!r}): it is made of ranks, which are whole numbers, at least one.")
        self._ranks: list[int] | None = sorted(given)

    @property
    def ranks(self) -> list[int] | None:
        """Global ranks, ascending."""
        return self._ranks

    def _member(self) -> Member | None:
        state = find()
        return None if state is None or self.process_set_id is None else state.sets.get(self.process_set_id)

    def size(self) -> int | None:
        """Number of ranks; None: it was not added."""
        member = self._member()
        return None if member is None else len(member.ranks)

    def rank(self) -> int | None:
        """This rank's place in the set; None: it was not added.

        Raises:
            UsageError: this rank is not in it.
        """
        member = self._member()
        return None if member is None else _channel(member, current()).data.rank()

    def included(self) -> bool | None:
        """Whether this rank is in it; None: Horovod does not know the set's ranks yet."""
        return None if self.ranks is None else current().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


class _Everyone(ProcessSet):
    """All ranks: known as soon as Horovod is initialized."""

    process_set_id = 0

    def __init__(self) -> None:
        self._ranks = None

    @property
    def ranks(self) -> list[int] | None:
        """All ranks; none before `hvd.init()`."""
        member = self._member()
        return [] if member is None else list(member.ranks)


global_process_set: ProcessSet = _Everyone()
"""All ranks."""


def channel_of(process_set: ProcessSet) -> Channel:
    """What the collectives of a set go through on this rank.

    Raises:
        NotInitializedError: `hvd.init()` comes first.
        UsageError: the set was not added, or this rank is not in it.
    """
    state = current()
    number = getattr(process_set, "process_set_id", None)
    member = None if number is None else state.sets.get(number)
    if member is None:
        raise UsageError(
            f"process_set={process_set}: the process set does not exist or has not been registered; "
            "hvd.add_process_set(...) on every rank, or hvd.init(process_sets=[...])."
        )
    return _channel(member, state)


def _channel(member: Member, state: State) -> Channel:
    if member.channel is None:
        raise UsageError(
            f"rank {state.rank} is not part of process set {member.number} of ranks {list(member.ranks)}: guard the "
            "call with `if process_set.included()`."
        )
    return member.channel


def register(state: State, process_set: ProcessSet) -> None:
    """Make a set's groups and number it; collective over all ranks."""
    process_set.process_set_id = make_member(state, process_set.ranks or ()).number


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a process set; every rank does, members or not, with the same ranks.

    Raises:
        UsageError: there is one of these ranks already, or a rank is not in the world.
        HorovodInternalError: other ranks add another one.
    """
    state = current()
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    check_ranks(state, chosen)
    everyone = channel_of(global_process_set)
    ranks = chosen.ranks
    # Under one name, so that ranks that add different sets learn of it rather than wait.
    operation = Operation("add_process_set", everyone.next_name("process_set"), f"ranks {ranks}", nothing())
    everyone.call(operation)
    everyone.finish(operation)
    register(state, chosen)
    return chosen


def check_ranks(state: State, process_set: ProcessSet) -> None:
    """Look at a set that is to be added.

    Raises:
        UsageError: there is one of these ranks already, or a rank is not in the world, or is there twice.
    """
    ranks = tuple(process_set.ranks or ())
    world = len(state.hosts)
    if not all(0 <= rank < world for rank in ranks) or len(set(ranks)) < len(ranks):
        raise UsageError(f"{process_set}: ranks are 0 to {world - 1}, each once.")
    if any(member.ranks == ranks for member in state.sets.values()):
        raise UsageError(f"Attempted to add a duplicate process set: {process_set}; use the one that is there.")


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; every rank does. Whether there was one that can be removed, which all ranks' cannot.

    Raises:
        HorovodInternalError: other ranks remove another one.
    """
    state = current()
    number = process_set.process_set_id
    if number is None or number == 0 or number not in state.sets:
        return False
    everyone = channel_of(global_process_set)
    operation = Operation("remove_process_set", everyone.next_name("process_set"), f"set {number}", nothing())
    everyone.call(operation)
    everyone.finish(operation)
    end_member(state.sets.pop(number))
    process_set.process_set_id = None
    return True
