"""Requests from the ranks which shards of tensors they hold; ranks answer while they run a cell, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from axon_nb.cluster.rpc.requests import Replies, request_each
from axon_nb.errors import AxonError, UsageError
from axon_nb.records.placement import Shard
from axon_nb.records.protocol.contents import LayoutsReply, LayoutsRequest
from axon_nb.records.ranks import name_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

_TIMEOUT_S = 10.0


class LayoutRequest:
    """A request that can be repeated; a rank whose shards have not changed sends only its key.

    Not thread-safe: the caller must hold a lock.

    Args:
        state: The cluster.
        names: Variables of the ranks: modules, optimizers, tensors, collections of tensors.
        gradients: Whether to include gradients.
    """

    def __init__(self, state: ClusterState, names: Sequence[str], *, gradients: bool = False) -> None:
        self._state = state
        self._request = LayoutsRequest(tuple(names), gradients)
        self._known: dict[int, tuple[str, Sequence[Shard]]] = {}
        """By rank: the key of its last reply, and the shards."""
        self._notes: list[str] = []
        self.has_changed = True
        """Whether the last reply differed from the one before."""
        self.cost_s = 0.0
        """CPU seconds that the last reply cost a rank, at most."""

    def send(self) -> tuple[list[Shard], list[str]]:
        """Request and return the shards on all live ranks, and notes on the ranks that reported none.

        Raises:
            UsageError: no rank has a variable with that name, or it holds no tensor.
            AxonError: no rank replied.
        """
        state = self._state
        living = state.live_ranks
        requests = {rank: replace(self._request, known=self._known.get(rank, ("", ()))[0]) for rank in living}
        replies = request_each(state.connection.client, requests, timeout_s=_TIMEOUT_S)
        if not replies and not replies.refused:
            raise AxonError(
                " ".join(replies.missing(replies.failed))
                or f"No rank replied within {_TIMEOUT_S:.0f} s. Run `%distributed status` to see what they are doing."
            )
        notes = _notes(replies, state.ranks)
        self.cost_s = max(reply.spent_s for reply in replies.values())
        self.has_changed = notes != self._notes or replies.keys() != self._known.keys()
        self._notes = notes
        for rank, reply in replies.items():
            if reply.shards is not None:
                self.has_changed = True
                self._known[rank] = (reply.key, reply.shards)
        self._known = {rank: self._known[rank] for rank in replies}
        return [shard for _, shards in self._known.values() for shard in shards], notes


def request_layouts(
    state: ClusterState, names: Sequence[str], *, gradients: bool = False
) -> tuple[list[Shard], list[str]]:
    """Request the shards once; see `LayoutRequest.send`."""
    return LayoutRequest(state, names, gradients=gradients).send()


def _notes(replies: Replies[LayoutsReply], ranks: Sequence[int]) -> list[str]:
    refusals = replies.refused
    if not replies:
        reason = Counter(refusals.values()).most_common(1)[0][0]
        raise UsageError(f"{name_ranks(refusals).capitalize()}: {reason}")
    notes = [
        f"{name_ranks([rank for rank in refusals if refusals[rank] == reason]).capitalize()}: {reason}"
        for reason in dict.fromkeys(refusals.values())
    ]
    return notes + replies.missing(ranks)
