"""Requests memory use from the ranks, and what a memory planner needs; ranks answer while they run a cell, too."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.rpc.requests import request_all
from axon_nb.errors import AxonError, ClusterLostError, UsageError
from axon_nb.records.memory import MemoryUse
from axon_nb.records.protocol.contents import MemoryRequest, PlanReply, PlanRequest
from axon_nb.records.ranks import name_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

_TIMEOUT_S = 10.0
_PLANNER_TIMEOUT_S = 20.0
"""Ranks import the code for estimates and plans on the first request."""
_POLL_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """The memory of all ranks at one moment."""

    measured: Mapping[int, MemoryUse]
    """Measured use of the ranks that replied."""
    estimated: Mapping[int, MemoryUse]
    """Estimates of the ranks for which there is a formula."""
    notes: tuple[str, ...]
    """Sentences about what is unknown, and on which ranks."""
    model: str = ""
    """A key that changes if the one named model is replaced or called differently; empty: no single model was named."""
    cost_s: float = 0.0
    """CPU seconds that the reply cost a rank, at most."""


def request_memory(state: ClusterState, names: Sequence[str], *, wait_for_estimates: bool = True) -> MemorySnapshot:
    """Request what the memory of all live ranks holds.

    Args:
        state: The cluster.
        names: Modules and optimizers on the ranks; empty: everything that their variables hold.
        wait_for_estimates: Whether to wait until the ranks have imported the code for estimates.

    Raises:
        UsageError: no rank has a module or optimizer with one of these names.
        AxonError: no rank replied.
    """
    living = state.live_ranks
    deadline = time.monotonic() + (_PLANNER_TIMEOUT_S if wait_for_estimates else 0.0)
    timeout_s = _PLANNER_TIMEOUT_S if wait_for_estimates else _TIMEOUT_S
    while True:
        replies = request_all(state.connection.client, living, MemoryRequest(tuple(names)), timeout_s=timeout_s)
        if time.monotonic() >= deadline or not any(reply.is_pending for reply in replies.values()):
            break
        time.sleep(_POLL_INTERVAL_S)
    refused = replies.refused
    answered = sorted({*replies, *refused})
    if not answered:
        failures = replies.missing(replies.failed)
        raise AxonError(
            " ".join(failures)
            or f"No rank replied within {timeout_s:.0f} s. Run `%distributed status` to see what they are doing."
        )
    if not replies:
        raise UsageError(f"{name_ranks(refused).capitalize()}: {refused[answered[0]]}")
    ranks_by_note: dict[str, list[int]] = {}
    for rank in answered:
        for note in (refused[rank],) if rank in refused else replies[rank].notes:
            ranks_by_note.setdefault(note, []).append(rank)
    notes = tuple(
        note if len(ranks) == len(answered) else f"{name_ranks(ranks).capitalize()}: {note}"
        for note, ranks in ranks_by_note.items()
    )
    notes = (*notes, *replies.missing(state.ranks))
    return MemorySnapshot(
        measured={rank: reply.measured for rank, reply in replies.items()},
        estimated={rank: reply.estimated for rank, reply in replies.items() if reply.estimated is not None},
        notes=notes,
        model=next(iter(replies.values())).model,
        cost_s=max(reply.spent_s for reply in replies.values()),
    )


def request_plan(state: ClusterState, names: Sequence[str], changes: Mapping[str, Any] | None, known: str) -> PlanReply:
    """Request what a memory planner needs from the first live rank.

    For a pipeline the rank with the first stage replies, and the model is assembled from the stages of all its ranks.

    Args:
        state: The cluster.
        names: A model, and its optimizers if they are named.
        changes: Fields of `MemorySetup` that differ from the current setup; None: the current setup.
        known: The key of the model that the notebook already has.

    Raises:
        ClusterLostError: the cluster is gone.
        UsageError: a name is neither a module nor an optimizer.
        AxonError: no rank is alive, or the rank did not reply.
    """
    if not state.running:
        raise ClusterLostError(
            f"The cluster {state.name!r} is gone. Run `%distributed start` to start a new one, then `%memory` again."
        )
    living = state.live_ranks[:1]
    if not living:
        raise AxonError("No rank is alive. Run `%distributed repair` to start new ones.")
    request = PlanRequest(tuple(names), changes, known)
    reply = _request_planner(state, living, request)[living[0]]
    if reply.first_rank is not None:  # the inputs of a pipeline are known on the rank with its first stage
        reply = _request_planner(state, [reply.first_rank], request)[reply.first_rank]
    if reply.ranks is None or reply.key == known:
        return reply
    return _with_stages(reply, reply.ranks, state, names)


def _request_planner(state: ClusterState, ranks: Sequence[int], request: PlanRequest) -> dict[int, PlanReply]:
    replies = request_all(state.connection.client, ranks, request, timeout_s=_PLANNER_TIMEOUT_S)
    if silent := [rank for rank in ranks if rank not in replies]:
        if replies.refused:
            raise UsageError(next(iter(replies.refused.values())))
        if failures := replies.missing(replies.failed):
            raise AxonError(" ".join(failures))
        raise AxonError(
            f"{name_ranks(silent).capitalize()} did not reply within {_PLANNER_TIMEOUT_S:.0f} s. "
            "Run `%distributed status` to see what the ranks are doing."
        )
    return replies


def _with_stages(reply: PlanReply, holders: Mapping[int, int], state: ClusterState, names: Sequence[str]) -> PlanReply:
    """Return a pipeline's reply with its model, assembled from the stages on its ranks."""
    request = PlanRequest(tuple(names), stages=True)
    replies = _request_planner(state, sorted(set(holders.values())), request)
    for rank, stage_reply in replies.items():
        if stage_reply.is_pending:
            return stage_reply
        if stage_reply.refused:
            return replace(reply, refused=f"Rank {rank}: {stage_reply.refused}")
    parts = [(replies[holders[stage]].stages or {})[stage] for stage in sorted(holders)]
    return replace(reply, model=import_module("axon_nb.plan.named_models").join_stages(parts))
