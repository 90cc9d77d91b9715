"""Asking ranks what their memory holds; they answer while they run a cell, too."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.rpc.requests import request_all
from axon_nb.errors import AxonError, ClusterLostError, UsageError
from axon_nb.records.memory import MemoryUse
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
    living = state.live_ranks
    end = time.monotonic() + (_PATIENCE_S if patient else 0.0)
    while True:
        answers = request_all(state.connection.client, living, "axon_memory", timeout_s=_LIMIT_S, names=list(names))
        if time.monotonic() >= end or not any(answer.get("is_pending") for answer in answers.values()):
            break
        time.sleep(_PENDING_S)
    if not answers:
        raise AxonError(f"No rank has answered within {_LIMIT_S:.0f} s; `%distributed status` tells what they do.")
    told: dict[str, list[int]] = {}
    for rank, answer in answers.items():
        for note in (answer["refused"],) if "refused" in answer else answer["notes"]:
            told.setdefault(str(note), []).append(rank)
    refused = [rank for rank, answer in answers.items() if "refused" in answer]
    if len(refused) == len(answers):
        raise UsageError(f"Rank {format_ranks(refused)}: {answers[refused[0]]['refused']}")
    notes = tuple(
        note if len(ranks) == len(answers) else f"Rank {format_ranks(ranks)}: {note}" for note, ranks in told.items()
    )
    if silent := [rank for rank in state.ranks if rank not in answers]:
        notes = (*notes, f"Rank {format_ranks(silent)}: it has not answered.")
    given = {rank: answer for rank, answer in answers.items() if "refused" not in answer}
    model = next((str(answer.get("model", "")) for answer in given.values()), "")
    spent_s = max(float(answer.get("spent_s", 0.0)) for answer in answers.values())
    return MemoryAnswers(_uses(given, "measured"), _uses(given, "estimated"), notes, model, spent_s)


def ask_plan(
    state: ClusterState, names: Sequence[str], asked: Mapping[str, Any] | None, known: str
) -> Mapping[str, Any]:
    """What a rank tells a planner of memory, as `engine/kernel/control.py` says: the first living one.

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
    living = state.live_ranks[:1]
    if not living:
        raise AxonError("No rank lives: `%distributed repair` starts new ones.")
    content = {"names": list(names), "what_if": None if asked is None else dict(asked), "known": known}
    told = _planned(state, living, **content)[living[0]]
    if "first_rank" in told:  # of a pipeline, whose inputs another rank knows
        living = [int(told["first_rank"])]
        told = _planned(state, living, **content)[living[0]]
    if "ranks" not in told:
        return told
    return _with_stages(told, state, names) if told["key"] != known else {**told, "model": None, "states": None}


def _planned(state: ClusterState, ranks: Sequence[int], **content: Any) -> dict[int, dict[str, Any]]:
    answers = request_all(state.connection.client, ranks, "axon_plan", timeout_s=_PATIENCE_S, **content)
    if silent := [rank for rank in ranks if rank not in answers]:
        raise AxonError(f"Rank {format_ranks(silent)} has not answered: `%distributed status` tells what they do.")
    return answers


def _with_stages(told: Mapping[str, Any], state: ClusterState, names: Sequence[str]) -> Mapping[str, Any]:
    """An answer about a pipeline, with its model put together of what its ranks hold."""
    holders = {int(stage): int(rank) for stage, rank in told["ranks"].items()}
    answers = _planned(state, sorted(set(holders.values())), names=list(names), stages=True)
    for rank, answer in answers.items():
        if answer.get("is_pending"):
            return answer
        if "refused" in answer:
            return {**told, "refused": f"Rank {rank}: {answer['refused']}"}
    parts = [base64.b64decode(answers[holders[stage]]["stages"][str(stage)]) for stage in sorted(holders)]
    joined = import_module("axon_nb.plan.named_models").join_stages(parts)
    return {**told, "model": base64.b64encode(joined).decode(), "states": None}


def _uses(answers: Mapping[int, Mapping[str, Any]], name: str) -> dict[int, MemoryUse]:
    return {rank: MemoryUse(**answer[name]) for rank, answer in answers.items() if answer[name] is not None}
