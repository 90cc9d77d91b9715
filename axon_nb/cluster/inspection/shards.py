"""Requests from the ranks which shards of tensors they hold; ranks answer while they run a cell, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.rpc.requests import request_each
from axon_nb.errors import AxonError, UsageError
from axon_nb.records.placement import Shard
from axon_nb.records.ranks import name_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

__all__ = ["LayoutRequest", "request_layouts"]

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
        self._content: dict[str, Any] = {"names": list(names), "gradients": gradients}
        self._known: dict[int, tuple[str, list[Shard]]] = {}
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
        contents = {rank: {**self._content, "known": self._known.get(rank, ("", []))[0]} for rank in living}
        replies = request_each(state.connection.client, contents, "axon_layouts", timeout_s=_TIMEOUT_S)
        if not replies:
            raise AxonError(
                f"No rank replied within {_TIMEOUT_S:.0f} s. Run `%distributed status` to see what they are doing."
            )
        notes = _notes(replies, state.ranks)
        self.cost_s = max(float(reply.get("spent_s", 0.0)) for reply in replies.values())
        accepted = {rank: reply for rank, reply in replies.items() if "refused" not in reply}
        self.has_changed = notes != self._notes or accepted.keys() != self._known.keys()
        self._notes = notes
        for rank, reply in accepted.items():
            if reply["shards"] is not None:
                self.has_changed = True
                self._known[rank] = (str(reply["key"]), [_read_shard(fields) for fields in reply["shards"]])
        self._known = {rank: self._known[rank] for rank in accepted}
        return [shard for _, shards in self._known.values() for shard in shards], notes


def request_layouts(
    state: ClusterState, names: Sequence[str], *, gradients: bool = False
) -> tuple[list[Shard], list[str]]:
    """Request the shards once; see `LayoutRequest.send`."""
    return LayoutRequest(state, names, gradients=gradients).send()


def _notes(replies: Mapping[int, Mapping[str, Any]], ranks: Sequence[int]) -> list[str]:
    refusals = {rank: str(reply["refused"]) for rank, reply in replies.items() if "refused" in reply}
    if len(refusals) == len(replies):
        reason = Counter(refusals.values()).most_common(1)[0][0]
        raise UsageError(f"{name_ranks(refusals).capitalize()}: {reason}")
    notes = [
        f"{name_ranks([rank for rank in refusals if refusals[rank] == reason]).capitalize()}: {reason}"
        for reason in dict.fromkeys(refusals.values())
    ]
    silent = [rank for rank in ranks if rank not in replies]
    if silent:
        notes.append(f"{name_ranks(silent).capitalize()} did not reply.")
    return notes


def _read_shard(fields: dict[str, Any]) -> Shard:
    # JSON has no tuples.
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return Shard(**values)
