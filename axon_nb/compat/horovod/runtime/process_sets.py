"""Process sets: subsets of ranks with their own collectives."""

from __future__ import annotations

from collections.abc import Iterable

from axon_nb.compat.horovod.runtime.errors import NotSupportedError
from axon_nb.compat.horovod.runtime.negotiation import Channel
from axon_nb.compat.horovod.runtime.operation import Operation
from axon_nb.compat.horovod.runtime.state import Member, State, current, end_member, find, make_member
from axon_nb.compat.horovod.runtime.transfers import nothing
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
    """A subset of ranks for collectives; register it with `hvd.init` or `hvd.add_process_set`.

    Args:
        ranks_or_comm: Global ranks.

    Raises:
        NotSupportedError: an MPI communicator.
        UsageError: an entry is not an integer, or there is none.
    """

    process_set_id: int | None = None
    """None if it is not registered."""
    mpi_comm = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise NotSupportedError(f"ProcessSet({ranks_or_comm!r}): MPI is not supported; pass a list of ranks.")
        given = list(ranks_or_comm)
        if not given or any(type(rank) is not int for rank in given):
            raise UsageError(f"ProcessSet({given!r}): pass at least one rank, as integers.")
        self._ranks: list[int] | None = sorted(given)

    @property
    def ranks(self) -> list[int] | None:
        """Global ranks, ascending."""
        return self._ranks

    def _member(self) -> Member | None:
        state = find()
        return None if state is None or self.process_set_id is None else state.sets.get(self.process_set_id)

    def size(self) -> int | None:
        """Number of ranks; None if not registered."""
        member = self._member()
        return None if member is None else len(member.ranks)

    def rank(self) -> int | None:
        """This rank's index in the set; None if not registered.

        Raises:
            UsageError: this rank is not in it.
        """
        member = self._member()
        return None if member is None else _channel(member, current()).data.rank()

    def included(self) -> bool | None:
        """Whether this rank is in it; None if the set's ranks are not known yet."""
        return None if self.ranks is None else current().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


class _Everyone(ProcessSet):
    """The set of all ranks, available once Horovod is initialized."""

    process_set_id = 0

    def __init__(self) -> None:
        self._ranks = None

    @property
    def ranks(self) -> list[int] | None:
        """All ranks; empty before `hvd.init()`."""
        member = self._member()
        return [] if member is None else list(member.ranks)


global_process_set: ProcessSet = _Everyone()
"""The process set of all ranks."""


def channel_of(process_set: ProcessSet) -> Channel:
    """Return the channel of a set's collectives on this rank.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
        UsageError: the set is not registered, or this rank is not in it.
    """
    state = current()
    number = getattr(process_set, "process_set_id", None)
    member = None if number is None else state.sets.get(number)
    if member is None:
        raise UsageError(
            f"process_set={process_set}: the process set does not exist or has not been registered; "
            "call hvd.add_process_set(...) on every rank, or hvd.init(process_sets=[...])."
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
    """Create a set's groups and assign its id; collective over all ranks."""
    process_set.process_set_id = make_member(state, process_set.ranks or ()).number


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set; every rank must call this, members or not, with the same ranks.

    Raises:
        UsageError: a set with these ranks exists, or a rank does not exist.
        HorovodInternalError: other ranks add a different set.
    """
    state = current()
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    check_ranks(state, chosen)
    everyone = channel_of(global_process_set)
    ranks = chosen.ranks
    # Under one name, so that ranks that add different sets get an error instead of waiting.
    operation = Operation("add_process_set", everyone.next_name("process_set"), f"ranks {ranks}", nothing())
    everyone.call(operation)
    everyone.finish(operation)
    register(state, chosen)
    return chosen


def check_ranks(state: State, process_set: ProcessSet) -> None:
    """Validate a set before it is registered.

    Raises:
        UsageError: a set with these ranks exists, or a rank does not exist or is duplicate.
    """
    ranks = tuple(process_set.ranks or ())
    world = len(state.hosts)
    if not all(0 <= rank < world for rank in ranks) or len(set(ranks)) < len(ranks):
        raise UsageError(f"{process_set}: ranks must be distinct and from 0 to {world - 1}.")
    if any(member.ranks == ranks for member in state.sets.values()):
        raise UsageError(f"Attempted to add a duplicate process set: {process_set}; use the existing one.")


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; every rank must call this. Return whether it was removed; the global set never is.

    Raises:
        HorovodInternalError: other ranks remove a different set.
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
