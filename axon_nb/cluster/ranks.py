"""Which ranks a caller means."""

from __future__ import annotations

from collections.abc import Iterable

from axon_nb.errors import UsageError
from axon_nb.records.ranks import parse_ranks

__all__ = ["resolve_ranks"]


def resolve_ranks(ranks: str | Iterable[int] | None, world_size: int) -> list[int]:
    """Ranks as a sorted list without doubles; None means all.

    Raises:
        UsageError: a rank that does not exist, or none at all.
    """
    if ranks is None:
        return list(range(world_size))
    text = ranks if isinstance(ranks, str) else ",".join(str(int(rank)) for rank in ranks)
    chosen = parse_ranks(text, world_size)
    if not chosen:
        raise UsageError(f"no rank is named; ranks are 0 to {world_size - 1}.")
    return chosen
