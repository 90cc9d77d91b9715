"""Asking ranks which parts of which tensors they hold; they answer while they run a cell, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.waits import ask
from axon_nb.errors import AxonError, UsageError
from axon_nb.records.ranks import format_ranks
from axon_nb.records.shard import Shard

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster

__all__ = ["ask_layouts"]

_LIMIT_S = 10.0


def ask_layouts(cluster: Cluster, names: Sequence[str], *, gradients: bool = False) -> tuple[list[Shard], list[str]]:
    """The parts of tensors on all living ranks, and notes on ranks that have told nothing.

    Args:
        cluster: The cluster.
        names: Variables of the ranks: modules, optimizers, tensors, collections of tensors.
        gradients: Whether gradients are asked for besides.

    Raises:
        UsageError: no rank has a variable of that name, or what it has holds no tensor.
        AxonError: no rank answers.
    """
    living = [rank for rank in cluster.ranks if rank not in cluster.health.dead]
    content: dict[str, Any] = {"names": list(names), "gradients": gradients}
    answers = ask(cluster.connection.client, living, "axon_layouts", limit_s=_LIMIT_S, **content)
    if not answers:
        raise AxonError(f"No rank has answered within {_LIMIT_S:.0f} s; `%distributed status` tells what they do.")
    refusals = {rank: str(answer["refused"]) for rank, answer in answers.items() if "refused" in answer}
    if len(refusals) == len(answers):
        reason = Counter(refusals.values()).most_common(1)[0][0]
        raise UsageError(f"Rank {format_ranks(refusals)}: {reason}")
    notes = [
        f"Rank {format_ranks([rank for rank in refusals if refusals[rank] == reason])}: {reason}"
        for reason in dict.fromkeys(refusals.values())
    ]
    silent = [rank for rank in cluster.ranks if rank not in answers]
    if silent:
        notes.append(f"Rank {format_ranks(silent)} has not answered.")
    shards = [_read(fields) for answer in answers.values() for fields in answer.get("shards", ())]
    return shards, notes


def _read(fields: dict[str, Any]) -> Shard:
    """JSON has no tuples."""
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return Shard(**values)
