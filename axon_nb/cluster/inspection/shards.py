"""Asking ranks which parts of which tensors they hold; they answer while they run a cell, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from axon_nb.cluster.rpc.requests import Answers, ask_each
from axon_nb.errors import AxonError, UsageError
from axon_nb.records.placement import Shard
from axon_nb.records.protocol.contents import LayoutsReply, LayoutsRequest
from axon_nb.records.ranks import format_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

__all__ = ["LayoutQuestion", "ask_layouts"]

_LIMIT_S = 10.0


class LayoutQuestion:
    """One question, to be asked again and again: of a rank that holds what it held, only that is sent.

    Not thread-safe: who asks holds a lock.

    Args:
        state: The cluster.
        names: Variables of the ranks: modules, optimizers, tensors, collections of tensors.
        gradients: Whether gradients are asked for besides.
    """

    def __init__(self, state: ClusterState, names: Sequence[str], *, gradients: bool = False) -> None:
        self._state = state
        self._request = LayoutsRequest(tuple(names), gradients)
        self._known: dict[int, tuple[str, Sequence[Shard]]] = {}
        """By rank: what stands for its last answer, and that."""
        self._notes: list[str] = []
        self.is_news = True
        """Whether the last answer was another one than that before."""
        self.spent_s = 0.0
        """What the last answer has cost the rank for which it was most."""

    def ask(self) -> tuple[list[Shard], list[str]]:
        """The parts of tensors on all living ranks, and notes on ranks that have told nothing.

        Raises:
            UsageError: no rank has a variable of that name, or what it has holds no tensor.
            AxonError: no rank answers.
        """
        state = self._state
        living = state.living
        asked = {rank: replace(self._request, known=self._known.get(rank, ("", ()))[0]) for rank in living}
        answers = ask_each(state.connection.client, asked, limit_s=_LIMIT_S)
        if not answers and not answers.refused:
            raise AxonError(f"No rank has answered within {_LIMIT_S:.0f} s; `%distributed status` tells what they do.")
        notes = _notes(answers, state.ranks)
        self.spent_s = max(answer.spent_s for answer in answers.values())
        self.is_news = notes != self._notes or answers.keys() != self._known.keys()
        self._notes = notes
        for rank, answer in answers.items():
            if answer.shards is not None:
                self.is_news = True
                self._known[rank] = (answer.key, answer.shards)
        self._known = {rank: self._known[rank] for rank in answers}
        return [shard for _, shards in self._known.values() for shard in shards], notes


def ask_layouts(state: ClusterState, names: Sequence[str], *, gradients: bool = False) -> tuple[list[Shard], list[str]]:
    """As `LayoutQuestion.ask`, once."""
    return LayoutQuestion(state, names, gradients=gradients).ask()


def _notes(answers: Answers[LayoutsReply], ranks: Sequence[int]) -> list[str]:
    refusals = answers.refused
    if not answers:
        reason = Counter(refusals.values()).most_common(1)[0][0]
        raise UsageError(f"Rank {format_ranks(refusals)}: {reason}")
    notes = [
        f"Rank {format_ranks([rank for rank in refusals if refusals[rank] == reason])}: {reason}"
        for reason in dict.fromkeys(refusals.values())
    ]
    silent = [rank for rank in ranks if rank not in answers and rank not in refusals]
    if silent:
        notes.append(f"Rank {format_ranks(silent)} has not answered.")
    return notes
