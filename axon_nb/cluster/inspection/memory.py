"""Asking ranks what their memory holds; they answer while they run a cell, too."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.rpc.requests import ask
from axon_nb.errors import AxonError, ClusterLostError, UsageError
from axon_nb.records.memory import MemoryUse
from axon_nb.records.protocol.contents import MemoryRequest, PlanReply, PlanRequest
from axon_nb.records.ranks import format_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

__all__ = ["MemoryAnswers", "ask_memory", "ask_plan"]

_LIMIT_S = 10.0
_PATIENCE_S = 20.0
_PENDING_S = 0.2


@dataclass(frozen=True, slots=True)
class MemoryAnswers:
    """All ranks at one moment."""

    measured: Mapping[int, MemoryUse]
    """Of the ranks that have answered."""
    estimated: Mapping[int, MemoryUse]
    """Of those for which there is a formula."""
    notes: tuple[str, ...]
    """Sentences: what is not known, and of whom."""
    model: str = ""
    """Changes when the one model that was named is another, or is called otherwise; empty: there is no such one."""
    spent_s: float = 0.0
    """What the answer has cost the rank for which it was most."""


def ask_memory(state: ClusterState, names: Sequence[str], *, patient: bool = True) -> MemoryAnswers:
    """What the memory of all living ranks holds.

    Args:
        state: The cluster.
        names: Modules and optimizers of the ranks; empty: all that their variables hold.
        patient: Whether to wait for estimates, whose code ranks load when they are asked first.

    Raises:
        UsageError: no rank has a module or optimizer of that name.
        AxonError: no rank answers.
    """
    living = state.living
    end = time.monotonic() + (_PATIENCE_S if patient else 0.0)
    while True:
        answers = ask(state.connection.client, living, MemoryRequest(tuple(names)), limit_s=_LIMIT_S)
        if time.monotonic() >= end or not any(answer.is_pending for answer in answers.values()):
            break
        time.sleep(_PENDING_S)
    refused = answers.refused
    heard = sorted({*answers, *refused})
    if not heard:
        raise AxonError(f"No rank has answered within {_LIMIT_S:.0f} s; `%distributed status` tells what they do.")
    if not answers:
        raise UsageError(f"Rank {format_ranks(refused)}: {refused[heard[0]]}")
    told: dict[str, list[int]] = {}
    for rank in heard:
        for note in (refused[rank],) if rank in refused else answers[rank].notes:
            told.setdefault(note, []).append(rank)
    notes = tuple(
        note if len(ranks) == len(heard) else f"Rank {format_ranks(ranks)}: {note}" for note, ranks in told.items()
    )
    if silent := [rank for rank in state.ranks if rank not in heard]:
        notes = (*notes, f"Rank {format_ranks(silent)}: it has not answered.")
    return MemoryAnswers(
        measured={rank: answer.measured for rank, answer in answers.items()},
        estimated={rank: answer.estimated for rank, answer in answers.items() if answer.estimated is not None},
        notes=notes,
        model=next(iter(answers.values())).model,
        spent_s=max(answer.spent_s for answer in answers.values()),
    )


def ask_plan(state: ClusterState, names: Sequence[str], asked: Mapping[str, Any] | None, known: str) -> PlanReply:
    """What a rank tells a planner of memory: the first living one.

    Of a pipeline it is the one with the first stage, and the model is put together of all its ranks' stages.

    Args:
        state: The cluster.
        names: A model, and its optimizers where they are named.
        asked: Fields of `MemorySetup` that differ from what is; None: what is.
        known: The key of the model that is here already.

    Raises:
        AxonError: it does not answer, or there is none.
    """
    if not state.running:
        raise ClusterLostError(f"The cluster {state.name!r} is gone: `%distributed start`, and `%memory` again.")
    living = state.living[:1]
    if not living:
        raise AxonError("No rank lives: `%distributed repair` starts new ones.")
    request = PlanRequest(tuple(names), asked, known)
    told = _planned(state, living, request)[living[0]]
    if told.first is not None:  # of a pipeline, whose inputs another rank knows
        told = _planned(state, [told.first], request)[told.first]
    if told.ranks is None or told.key == known:
        return told
    return _with_stages(told, told.ranks, state, names)


def _planned(state: ClusterState, ranks: Sequence[int], request: PlanRequest) -> dict[int, PlanReply]:
    answers = ask(state.connection.client, ranks, request, limit_s=_PATIENCE_S)
    if silent := [rank for rank in ranks if rank not in answers]:
        raise AxonError(f"Rank {format_ranks(silent)} has not answered: `%distributed status` tells what they do.")
    return answers


def _with_stages(told: PlanReply, holders: Mapping[int, int], state: ClusterState, names: Sequence[str]) -> PlanReply:
    """An answer about a pipeline, with its model put together of what its ranks hold."""
    request = PlanRequest(tuple(names), stages=True)
    answers = _planned(state, sorted(set(holders.values())), request)
    for rank, answer in answers.items():
        if answer.is_pending:
            return answer
        if answer.refused:
            return replace(told, refused=f"Rank {rank}: {answer.refused}")
    parts = [(answers[holders[stage]].stages or {})[stage] for stage in sorted(holders)]
    return replace(told, model=import_module("axon_nb.plan.named_models").join_stages(parts))
