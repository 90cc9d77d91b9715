"""Deadlock analysis: which rank waits for which, from the communication calls that each rank reports.

Describes slow ranks (which are not a deadlock): where they are, and who has waited for them how long.

Functions that communicate implicitly, with advice for when only some ranks call them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from axon_nb.records.ranks import name_ranks

__all__ = [
    "COLLECTIVE_FUNCTIONS",
    "PUBLIC_NAMES",
    "PendingCall",
    "RankWaits",
    "advice_for",
    "describe_slow_ranks",
    "explain_deadlock",
    "missing_ranks",
]

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
    "redistribute": _SAVING,
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
    "the forward pass of a DDP model": "synchronizes buffers with all ranks: run the model on every rank.",
    "the forward pass of an FSDP model": "gathers its parameters from all ranks: run the model on every rank.",
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

_SAME_SIZE_CALLS = frozenset({"allreduce", "broadcast", "reduce"})
_USER_THREAD_GRACE_S = 30.0
"""For this long a rank with a user thread running may still communicate, whatever its main thread does."""


def advice_for(functions: Iterable[str]) -> str:
    """Return advice on the first known function: one sentence with a leading space, or an empty string."""
    for function in functions:
        if advice := COLLECTIVE_FUNCTIONS.get(function):
            return f" {function[0].upper() + function[1:] if ' ' in function else f'`{function}()`'} {advice}"
    return ""


@dataclass(frozen=True, slots=True)
class PendingCall:
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


@dataclass(frozen=True, slots=True)
class RankWaits:
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


def _missing_peers(me: RankWaits, call: PendingCall, reports: Mapping[int, RankWaits]) -> set[int]:
    """Ranks that have not reached `call`."""
    if call.sequence == 0:
        other = reports.get(call.peer)
        if other is None:  # a recv from any rank, or the peer did not respond
            return set()
        # A send finishes when it is received: Gloo does not buffer messages for a late receiver.
        names, peers = (("recv", "recv_anysource"), (me.rank, -1)) if call.name == "send" else (("send",), (me.rank,))
        return set() if any(c.name in names and c.peer in peers for c in other.pending) else {call.peer}
    peers_in_group = (rank for rank in call.ranks if rank != me.rank and rank in reports)
    return {rank for rank in peers_in_group if reports[rank].counts.get(call.group, 0) < call.sequence}


def _possible_senders(me: RankWaits, call: PendingCall, reports: Mapping[int, RankWaits]) -> set[int]:
    """Ranks of which one must still send, for a recv from any rank; none if one has, or for other calls."""
    if call.sequence or call.peer >= 0:
        return set()
    others = {rank for rank in call.ranks if rank != me.rank and rank in reports}
    sends = any(c.name == "send" and c.peer == me.rank for rank in others for c in reports[rank].pending)
    return set() if sends else others


def missing_ranks(reports: Mapping[int, RankWaits], after_s: float) -> dict[int, tuple[int, ...]]:
    """For each rank that has waited at least `after_s` seconds: the ranks that have not reached its call."""
    blocked = {rank: call for rank, state in reports.items() if (call := state.blocked_in) and call.seconds >= after_s}
    missing = {rank: tuple(sorted(_missing_peers(reports[rank], call, reports))) for rank, call in blocked.items()}
    return {rank: others for rank, others in missing.items() if others}


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
    threaded = {rank for rank, state in reports.items() if state.threads}
    missing, senders = {}, {}
    for rank, call in blocked.items():
        patient = threaded if call.seconds < _USER_THREAD_GRACE_S else set()
        missing[rank] = _missing_peers(reports[rank], call, reports) - patient
        senders[rank] = set() if patient else _possible_senders(reports[rank], call, reports)
    finished = {rank for rank, state in reports.items() if not state.running}
    deadlocked = set(blocked)
    while True:
        over = finished | deadlocked
        remaining = {r for r in deadlocked if missing[r] & over or (senders[r] and senders[r] <= over)}
        if remaining == deadlocked:
            break
        deadlocked = remaining
    if not deadlocked:
        return None
    waits = {rank: missing[rank] & (finished | deadlocked) for rank in deadlocked}
    return _sentence(waits, reports, finished, cell_ranks) + advice_for(
        reports[rank].via for rank in sorted(deadlocked)
    )


def _mismatch(blocked: Mapping[int, PendingCall], reports: Mapping[int, RankWaits]) -> str | None:
    for rank, call in blocked.items():
        for other, report in reports.items():
            theirs = next((c for c in report.pending if (c.group, c.sequence) == (call.group, call.sequence)), None)
            if other == rank or call.sequence == 0 or theirs is None:
                continue
            if other not in blocked or blocked[other] is not theirs:
                if theirs.name == call.name or report.blocked_in is theirs:
                    continue
                started = PUBLIC_NAMES.get(theirs.name, theirs.name)
                return (
                    f"Collective mismatch: rank {rank} is in {reports[rank].place}, rank {other} started {started} "
                    "with `async_op=True` instead and does not wait for it, on the same group."
                )
            here, there = reports[rank].place, report.place
            if theirs.name != call.name:
                return f"Collective mismatch: rank {rank} is in {here}, rank {other} in {there}, on the same group."
            if call.name in _SAME_SIZE_CALLS and theirs.bytes != call.bytes:
                return (
                    f"Size mismatch: rank {rank} passed {call.bytes:,} bytes to {here}, "
                    f"rank {other} passed {theirs.bytes:,} bytes to {there}."
                )
    return None


def _sentence(
    waits: Mapping[int, set[int]],
    reports: Mapping[int, RankWaits],
    finished: Collection[int],
    cell_ranks: Collection[int],
) -> str:
    grouped: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, others in sorted(waits.items()):
        grouped.setdefault((reports[rank].place, tuple(sorted(others))), []).append(rank)
    parts = []
    for (place, missing), ranks in grouped.items():
        verb = "waits" if len(ranks) == 1 else "wait"
        if not missing:
            parts.append(f"{name_ranks(ranks)} {verb} in {place} for a message from any rank, and no rank sends one")
            continue
        parts.append(
            f"{name_ranks(ranks)} {verb} in {place} for {name_ranks(missing)}{_why(missing, finished, cell_ranks)}"
        )
    return "; ".join(parts) + "."


def _why(ranks: Collection[int], finished: Collection[int], cell_ranks: Collection[int]) -> str:
    if not set(ranks) <= set(finished):
        return ""
    verb = ("has", "does") if len(ranks) == 1 else ("have", "do")
    if set(ranks) <= set(cell_ranks):
        return f", which {verb[0]} finished the cell"
    return f", which {verb[1]} not run this cell" if not set(ranks) & set(cell_ranks) else ""


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
    ends = {rank: tuple(other for other in others if other not in waits) for rank, others in waits.items()}
    groups: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for rank, others in sorted(ends.items()):
        if others:
            groups.setdefault((others, reports[rank].place), []).append(rank)
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
