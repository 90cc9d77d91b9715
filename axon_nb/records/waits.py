"""What ranks wait for: their calls in progress, deadlocks, slow ranks and silent ones.

Collectives started on a GPU: on NCCL the host only starts an operation, and may wait for it anywhere, as in `.item()`.
No stack shows that.

A silent rank, one that is stopped, or in C code that holds the GIL, cannot report what it is doing. Over shared memory,
ranks that wait for it read its last call from there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct, field

from axon_nb.records.ranks import name_ranks, ranks_by
from axon_nb.records.units import format_seconds

SAME_SIZE_CALLS = frozenset({"allreduce", "broadcast", "reduce"})
"""Collectives to which each rank passes as much as the others."""
_SAVING = "is a collective: call it on every rank, and use `if rank == 0` only for saving."
_ANY = "is a collective: call it on every rank."
COLLECTIVE_FUNCTIONS: dict[str, str] = {
    "async_save": _ANY,
    "clip_grad_norm_": "sums the norms of all shards and is a collective: call it on every rank.",
    "distribute_module": _ANY,
    "distribute_tensor": _ANY,
    "full_tensor": _SAVING,
    "get_model_state_dict": _SAVING,
    "get_optimizer_state_dict": _SAVING,
    "get_state_dict": _SAVING,
    "get_total_norm": "sums the norms of all shards and is a collective: call it on every rank.",
    "init_device_mesh": _ANY,
    "load": _ANY,
    "new_group": (
        "must be called by every rank, including those outside the new group; with `use_local_synchronization=True` "
        "only by its members."
    ),
    "optim_state_dict": _SAVING,
    "redistribute": _ANY,
    "save": "writes every rank's shards and is a collective: call it on every rank.",
    "set_model_state_dict": _ANY,
    "set_optimizer_state_dict": _ANY,
    "set_state_dict": _ANY,
    "state_dict": _SAVING,
    "summon_full_params": _ANY,
    "the backward pass of a DDP model": (
        "sums gradients over all ranks of its process group: run it on each of them, or build the model with "
        "`process_group=` a group of the ranks that train it, such as `subgroup`."
    ),
    "the forward pass of a DDP model": (
        "synchronizes buffers with all ranks: run the same model on every rank, and all in the same order."
    ),
    "the forward pass of an FSDP model": (
        "gathers its parameters from all ranks: run the same modules (experts, blocks) on every rank in the same order."
    ),
    "the forward pass of a tensor-parallel layer": (
        "exchanges activations with all ranks of its mesh: run the layer on every rank of it."
    ),
    "unshard": _ANY,
}
"""Advice by function name; the text follows the name."""
PUBLIC_NAMES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather_single",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "recv_anysource": "recv",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single",
}
"""Public names of process-group operations."""
_MAX_PARTS = 8
"""Most waits that a sentence lists."""
_USER_THREAD_GRACE_S = 30.0
"""For this long a rank with a user thread running may still communicate, whatever its main thread does."""


class PendingCall(Struct, frozen=True):
    """A communication call in progress."""

    number: int
    """Sequence number on its rank."""
    name: str
    """Operation of the group, such as ``allreduce``."""
    group: str
    """Name of the process group."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    sequence: int
    """Number of collectives started by this rank in the group, including this one; 0 for send and recv."""
    peer: int
    """Global rank of a send's or recv's peer; -1 for collectives and for a recv from any rank."""
    bytes: int
    """Payload on this rank."""
    seconds: float
    """How long it has been in progress."""


class RankWaits(Struct, frozen=True):
    """What one rank is waiting for."""

    rank: int
    running: bool
    """Whether it is running a cell."""
    line: int | None
    """Line of the cell; the magic's line is line 1."""
    call: str
    """The torch.distributed function that the main thread is in; empty if none."""
    pending: tuple[PendingCall, ...]
    """Calls in progress, oldest first."""
    counts: Mapping[str, int]
    """Number of collectives started so far, by group."""
    via: str = ""
    """The function that communicates implicitly, such as ``full_tensor``; otherwise empty."""
    waited: int = 0
    """Number of the call that the main thread waits for; 0 if unknown."""
    threads: tuple[str, ...] = ()
    """Names of running threads that the user started: they may communicate too."""
    within: str = ""
    """The user's innermost function, such as `` (step, line 3)``; empty if that is the cell itself."""

    @property
    def blocked_in(self) -> PendingCall | None:
        """The call that blocks the rank; None if its main thread is not communicating."""
        if not (self.running and self.call and self.pending):
            return None
        return next((call for call in self.pending if call.number == self.waited), self.pending[0])

    @property
    def place(self) -> str:
        """Call and line, such as ``all_reduce at line 4 (step, train.py line 40)``."""
        return f"{self.via or self.call}{f' at line {self.line}{self.within}' if self.line else ''}"


class GroupWaits(Struct, frozen=True):
    """The communication calls in progress on one rank."""

    pending: tuple[PendingCall, ...]
    counts: Mapping[str, int]
    """Collectives started, by group."""
    collectives: int = 0
    """Collectives that the cell started, over all groups."""
    call: str = ""
    """The call that the main thread is in, if its stack does not show it; else empty."""
    started: tuple[PendingCall, ...] = ()
    """Collectives that a GPU has in progress, the oldest ones, wherever the main thread is."""


class Arrivals:
    """Which ranks have reached calls that others wait in; a collective is looked at once, not for each rank in it."""

    def __init__(self, reports: Mapping[int, RankWaits]) -> None:
        self._reports = reports
        self._late: dict[tuple[str, int], frozenset[int]] = {}

    def missing(self, waiting: RankWaits, call: PendingCall) -> frozenset[int]:
        """Return the ranks that have not reached a call; ranks that wait in one collective get the same object."""
        if call.sequence == 0:
            return self._missing_peer(waiting, call)
        key = call.group, call.sequence
        if key not in self._late:
            there = (self._reports[rank] for rank in call.ranks if rank in self._reports)
            late = (report.rank for report in there if report.counts.get(call.group, 0) < call.sequence)
            self._late[key] = frozenset(late)
        late_ranks = self._late[key]
        return late_ranks - {waiting.rank} if waiting.rank in late_ranks else late_ranks

    def _missing_peer(self, waiting: RankWaits, call: PendingCall) -> frozenset[int]:
        other = self._reports.get(call.peer)
        if other is None:  # a recv from any rank, or the peer did not respond
            return frozenset()
        # A send finishes when it is received: Gloo does not buffer messages for a late receiver.
        names, peers = (
            (("recv", "recv_anysource"), (waiting.rank, -1)) if call.name == "send" else (("send",), (waiting.rank,))
        )
        has_arrived = any(one.name in names and one.peer in peers for one in other.pending)
        return frozenset() if has_arrived else frozenset({call.peer})


def missing_ranks(reports: Mapping[int, RankWaits], after_s: float) -> dict[int, tuple[int, ...]]:
    """For each rank that has waited at least `after_s` seconds: the ranks that have not reached its call."""
    arrivals = Arrivals(reports)
    in_order: dict[frozenset[int], tuple[int, ...]] = {}
    missing = {}
    for rank, state in reports.items():
        if (call := state.blocked_in) and call.seconds >= after_s and (others := arrivals.missing(state, call)):
            if others not in in_order:
                in_order[others] = tuple(sorted(others))
            missing[rank] = in_order[others]
    return missing


def advice_for(functions: Iterable[str]) -> str:
    """Return advice on the first known function: one sentence with a leading space, or an empty string."""
    for function in functions:
        if advice := COLLECTIVE_FUNCTIONS.get(function):
            return f" {function[0].upper() + function[1:] if ' ' in function else f'`{function}()`'} {advice}"
    return ""


class _Wait(Struct):
    """What some ranks wait for together."""

    others: frozenset[int]
    """The ranks that have not come."""
    enough: int
    """The wait never ends if so many of them cannot come."""
    is_for_any: bool = False
    """Whether one message, from any of them, ends it."""
    ranks: list[int] = field(default_factory=list)
    """Who waits."""
    num_over: int = 0
    """How many of the others cannot come, as far as is known."""


def explain_deadlock(reports: Mapping[int, RankWaits], cell_ranks: Collection[int], after_s: float) -> str | None:
    """Explain why the cell is deadlocked; None if it is not, or if that is not proven.

    A rank is deadlocked if it waits for a rank that is not running the cell (any more), or for a deadlocked rank.
    Slow ranks never count as missing; ranks with a running user thread do not count as missing for 30 s.

    Args:
        reports: The report of each rank, all taken at the same time.
        cell_ranks: The ranks that the cell was sent to.
        after_s: Minimum waiting time of a call to be considered, in seconds.
    """
    blocked = {rank: call for rank, state in reports.items() if (call := state.blocked_in) and call.seconds >= after_s}
    if (mismatch := _mismatch(blocked, reports)) is not None:
        return mismatch + advice_for(reports[rank].via for rank in blocked)
    finished = {rank for rank, state in reports.items() if not state.running}
    waits = _waits(blocked, reports)
    deadlocked = _deadlocked(waits, finished)
    if not deadlocked:
        return None
    lost: dict[int, tuple[int, ...]] = {}
    for wait in waits:
        others = () if wait.is_for_any else tuple(sorted(wait.others & (finished | deadlocked)))
        lost |= {rank: others for rank in wait.ranks if rank in deadlocked}
    return _sentence(lost, reports, finished, cell_ranks) + advice_for(reports[rank].via for rank in sorted(deadlocked))


def _waits(blocked: Mapping[int, PendingCall], reports: Mapping[int, RankWaits]) -> list[_Wait]:
    """Return what the ranks wait for; those that wait for the same ranks share it."""
    arrivals = Arrivals(reports)
    threaded = frozenset(rank for rank, state in reports.items() if state.threads)
    senders: dict[int, set[int]] = {}
    for rank, report in reports.items():
        for sent in report.pending:
            if sent.name == "send":
                senders.setdefault(sent.peer, set()).add(rank)
    waits: dict[tuple[frozenset[int], bool, bool], _Wait] = {}
    for rank, call in blocked.items():
        is_patient = bool(threaded) and call.seconds < _USER_THREAD_GRACE_S
        if is_for_any := call.sequence == 0 and call.peer < 0:
            is_sent = not senders.get(rank, set()).isdisjoint(call.ranks)
            others = frozenset() if is_sent or is_patient else frozenset(call.ranks).intersection(reports)
            enough = max(2, len(others))  # with the rank itself, which cannot send while it waits
        else:
            others, enough = arrivals.missing(reports[rank], call), 1
        key = others, is_for_any, is_patient
        if key not in waits:
            waits[key] = _Wait(others - threaded if is_patient else others, enough, is_for_any)
        waits[key].ranks.append(rank)
    return list(waits.values())


def _deadlocked(waits: Collection[_Wait], finished: set[int]) -> set[int]:
    """Return the ranks that wait for ever: all that wait, without those whose wait can end, and who waits for these."""
    deadlocked = {rank for wait in waits for rank in wait.ranks}
    over = finished | deadlocked
    waiting_for: dict[int, list[_Wait]] = {}
    for wait in waits:
        wait.num_over = len(wait.others & over)
        for other in wait.others:
            waiting_for.setdefault(other, []).append(wait)
    ending = [wait for wait in waits if wait.num_over < wait.enough]
    while ending:
        for rank in ending.pop().ranks:
            deadlocked.discard(rank)
            for wait in waiting_for.get(rank, ()):
                wait.num_over -= 1
                if wait.num_over == wait.enough - 1:  # it has just become one that can end
                    ending.append(wait)
    return deadlocked


def _mismatch(blocked: Mapping[int, PendingCall], reports: Mapping[int, RankWaits]) -> str | None:
    # Of each collective, the first rank of every kind: by operation, by size if it must agree, and whether it waits.
    first: dict[tuple[str, int], dict[tuple[str, int, bool], int]] = {}
    for rank, report in reports.items():
        seen = set()
        for call in report.pending:
            key, waits = (call.group, call.sequence), blocked.get(rank) is call
            if not call.sequence or key in seen:
                continue
            seen.add(key)
            if waits or report.blocked_in is not call:
                size = call.bytes if waits and call.name in SAME_SIZE_CALLS else 0
                first.setdefault(key, {}).setdefault((call.name, size, waits), rank)
    for rank, call in blocked.items():
        here = reports[rank].place
        for (name, size, waits), other in first.get((call.group, call.sequence), {}).items():
            there = reports[other].place
            if name != call.name and not waits:
                started = PUBLIC_NAMES.get(name, name)
                return (
                    f"Collective mismatch: rank {rank} is in {here}, rank {other} started {started} "
                    "with `async_op=True` instead and does not wait for it, on the same group."
                )
            if name != call.name:
                return f"Collective mismatch: rank {rank} is in {here}, rank {other} in {there}, on the same group."
            if waits and name in SAME_SIZE_CALLS and size != call.bytes:
                return (
                    f"Size mismatch: rank {rank} passed {call.bytes:,} bytes to {here}, "
                    f"rank {other} passed {size:,} bytes to {there}."
                )
    return None


def _sentence(
    waits: Mapping[int, tuple[int, ...]],
    reports: Mapping[int, RankWaits],
    finished: Collection[int],
    cell_ranks: Collection[int],
) -> str:
    shown = list(ranks_by(((reports[rank].place, others), rank) for rank, others in sorted(waits.items())).items())
    if len(shown) > _MAX_PARTS:  # those that wait for ranks which have finished say why, so they come first
        shown = sorted(shown, key=lambda item: not set(item[0][1]) & set(finished))[:_MAX_PARTS]
    parts = []
    for (place, missing), ranks in shown:
        verb = "waits" if len(ranks) == 1 else "wait"
        if not missing:
            parts.append(f"{name_ranks(ranks)} {verb} in {place} for a message from any rank, and no rank sends one")
            continue
        parts.append(
            f"{name_ranks(ranks)} {verb} in {place} for {name_ranks(missing)}{_why(missing, finished, cell_ranks)}"
        )
    if rest := len(waits) - sum(len(ranks) for _, ranks in shown):
        parts.append(f"{rest:,} more ranks wait for these or for each other")
    return "; ".join(parts) + "."


def _why(ranks: Collection[int], finished: Collection[int], cell_ranks: Collection[int]) -> str:
    if not set(ranks) <= set(finished):
        return ""
    verb = ("has", "does") if len(ranks) == 1 else ("have", "do")
    if set(ranks) <= set(cell_ranks):
        return f", which {verb[0]} finished the cell"
    return f", which {verb[1]} not run this cell" if not set(ranks) & set(cell_ranks) else ""


Started = Mapping[int, Sequence[PendingCall]]
"""The collectives in progress by rank, oldest first."""


def explain_mismatch(started: Started) -> str:
    """Return which ranks started different collectives, or passed different sizes, at one place of a group's order.

    Whatever the GPUs make of them is wrong: they hang, or mix the values. Empty if no two ranks differ.
    """
    first: dict[tuple[str, int], tuple[int, PendingCall]] = {}
    for rank, calls in sorted(started.items()):
        for call in calls:
            other, theirs = first.setdefault((call.group, call.sequence), (rank, call))
            name, their_name = _name(call), _name(theirs)
            if call.name != theirs.name:
                return f"Collective mismatch: rank {other} started {their_name}, rank {rank} {name}, on the same group."
            if call.name in SAME_SIZE_CALLS and call.bytes != theirs.bytes:
                return (
                    f"Size mismatch in {name}: rank {other} passed {theirs.bytes:,} bytes, rank {rank} {call.bytes:,}."
                )
    return ""


def describe_absent_ranks(started: Started, cell_ranks: Collection[int], after_s: float) -> str:
    """Return a line on a collective that needs ranks which do not run this cell; empty if there is none.

    It is not an error: a later cell may start it on the other ranks.

    Args:
        started: The collectives in progress.
        cell_ranks: The ranks that the cell was sent to.
        after_s: How long a collective must have been in progress, in seconds.
    """
    for rank in sorted(set(started) & set(cell_ranks)):
        for call in started[rank]:
            if call.seconds >= after_s and (absent := set(call.ranks) - set(cell_ranks)):
                verb = "does" if len(absent) == 1 else "do"
                return (
                    f"Rank {rank} started {_name(call)}, which needs {name_ranks(absent)}, which {verb} not run this "
                    "cell: pass `group=subgroup` to use the ranks of the cell alone"
                )
    return ""


def _name(call: PendingCall) -> str:
    return PUBLIC_NAMES.get(call.name, call.name)


def describe_slow_ranks(reports: Mapping[int, RankWaits], after_s: float) -> str:
    """Return a line such as ``Waiting for rank 1 (line 7): ranks 0,2-3 have been in all_reduce at line 4 for 3.2 s``.

    Names the root of the wait: ranks that wait for others themselves are not named as slow, unless all do.

    Args:
        reports: The report of each rank, all taken at the same time.
        after_s: Minimum waiting time of a call to be considered, in seconds.

    Returns:
        The line, or an empty string if no rank has waited that long.
    """
    waits = missing_ranks(reports, after_s)
    ends = {others: tuple(other for other in others if other not in waits) for others in set(waits.values())}
    waiting = [rank for rank, others in sorted(waits.items()) if ends[others]]
    groups = ranks_by(((ends[waits[rank]], reports[rank].place), rank) for rank in waiting)
    if not groups:
        return ""
    (others, place), ranks = max(groups.items(), key=lambda item: (len(item[1]), -item[1][0]))
    seconds = max(call.seconds for rank in ranks if (call := reports[rank].blocked_in))
    verb = "has" if len(ranks) == 1 else "have"
    took = f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whom = f"{name_ranks(others)}{_where([reports[rank] for rank in others])}"
    return f"Waiting for {whom}: {name_ranks(ranks)} {verb} been in {place} for {took}"


def _where(late: list[RankWaits]) -> str:
    places = {state.place if state.call else f"line {state.line}" for state in late if state.running and state.line}
    return f" ({places.pop()})" if len(places) == 1 and all(state.running for state in late) else ""


class PeerCall(Struct, frozen=True):
    """What a rank sees of another one that it waits for."""

    rank: int
    """Global rank of the other one."""
    operation: str
    """Its last collective in the group, such as ``all_reduce``; empty: it has made none."""
    line: int
    """Line of the cell that made this call; 0: unknown."""
    is_waiting: bool
    """Whether it waits in this call."""
    is_stopped: bool
    """Whether its process is stopped."""

    def __str__(self) -> str:
        state = "stopped" if self.is_stopped else "does not reply"
        if not self.operation:
            return state
        if not self.is_waiting:  # the line may be one of an earlier cell
            return f"{state}; its last call was {self.operation}"
        place = f"in {self.operation}{f' at line {self.line}' if self.line else ''}"
        return f"{state} {place}" if self.is_stopped else f"{state}; it is {place}"


def describe_silent_ranks(
    reports: Mapping[int, RankWaits],
    peers: Mapping[int, Sequence[PeerCall]],
    silent: Collection[int],
    after_s: float,
) -> str:
    """Return a line such as ``Waiting for rank 1 (stopped): ranks 0,2 have been in all_reduce at line 4 for 3.2 s``.

    Args:
        reports: The reports of the ranks that reply, all taken at the same time.
        peers: What each of them sees of the ranks that it waits for.
        silent: The ranks that do not reply.
        after_s: Minimum waiting time of a call to be considered, in seconds.

    Returns:
        The line, or an empty string if no rank is known to have waited that long for a silent one.
    """
    waiting: dict[tuple[PeerCall, str], dict[int, float]] = {}
    for rank, report in sorted(reports.items()):
        call = report.blocked_in
        if call is None or call.seconds < after_s:
            continue
        for peer in peers.get(rank, ()):
            if peer.rank in silent:
                waiting.setdefault((peer, report.place), {})[rank] = call.seconds
    if not waiting:
        return ""
    (peer, place), ranks = max(waiting.items(), key=lambda item: (len(item[1]), -item[0][0].rank))
    verb = "has" if len(ranks) == 1 else "have"
    return (
        f"Waiting for rank {peer.rank} ({peer}): {name_ranks(ranks)} {verb} been in {place} for "
        f"{format_seconds(max(ranks.values()))}"
    )
