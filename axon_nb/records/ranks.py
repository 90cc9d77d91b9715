"""Sets of ranks: parsed from what a caller gives, and formatted as ``0,2-3``, ``rank 2`` or ``ranks 0-3``."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TypeVar

from axon_nb.errors import UsageError

K = TypeVar("K")
Runs = tuple[tuple[int, int, int], ...]
"""Ranks as few ranges: the first of each, how many, and the distance between two."""


_MAX_PIECES = 16
"""Most ranks and ranges that a sentence lists."""


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks compactly, such as ``0,2-3``."""
    return ",".join(_pieces(ranks))


def _pieces(ranks: Iterable[int]) -> list[str]:
    pieces: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if pieces and rank == pieces[-1][-1] + 1:
            pieces[-1][1:] = [rank]
        else:
            pieces.append([rank])
    return ["-".join(map(str, piece)) for piece in pieces]


def ranks_by(pairs: Iterable[tuple[K, int]]) -> dict[K, list[int]]:
    """Group ranks by what is paired with each."""
    groups: dict[K, list[int]] = {}
    for key, rank in pairs:
        groups.setdefault(key, []).append(rank)
    return groups


def name_ranks(ranks: Iterable[int]) -> str:
    """Name ranks in a sentence: ``rank 2`` or ``ranks 0-1,3``; capitalise the result to start a sentence.

    Of many scattered ones it lists some, and their number: ``ranks 0,2,4,6,8,10,12,14,…,1022 (512 ranks)``.
    """
    distinct = set(ranks)
    pieces = _pieces(distinct)
    if len(pieces) > _MAX_PIECES:
        return f"ranks {','.join(pieces[: _MAX_PIECES // 2])},…,{pieces[-1]} ({len(distinct)} ranks)"
    return f"{'rank' if len(distinct) == 1 else 'ranks'} {','.join(pieces)}"


def parse_ranks(spec: str, world_size: int) -> list[int]:
    """Parse a set of ranks; return them sorted and without duplicates.

    Args:
        spec: Comma-separated parts: ``2``, ``2-3``, ``-1`` (the last), ``1:`` or ``:2`` (as Python slices), ``all``,
            ``even``, ``odd``.
        world_size: Number of ranks.

    Raises:
        UsageError: a part is malformed, a rank does not exist, or no rank is selected.
    """
    ranks: set[int] = set()
    for part in spec.split(","):
        ranks.update(_parse_part(part.strip(), spec, world_size))
    if not ranks:
        raise UsageError(f"ranks {spec!r} selects none of the ranks 0 to {world_size - 1}.")
    return sorted(ranks)


def _parse_part(part: str, spec: str, world_size: int) -> Iterable[int]:
    words = {"all": range(world_size), "even": range(0, world_size, 2), "odd": range(1, world_size, 2)}
    if part in words:
        return words[part]
    try:
        if ":" in part:
            return range(world_size)[slice(*(int(end) if end else None for end in part.split(":")))]
        first, dash, last = part[1:].partition("-")
        low = int(part[0] + first) if dash else int(part)
        high = int(last) if dash else low
    except (ValueError, IndexError, TypeError):
        raise UsageError(f"ranks {spec!r}: {part!r} is not a rank; use a form such as 0,2-3.") from None
    if low < 0 and not dash:
        low = high = low + world_size
    for rank in (low, high):
        if not 0 <= rank < world_size:
            wanted = part if low < 0 or low == high else str(rank)
            raise UsageError(f"rank {wanted} does not exist: ranks are 0 to {world_size - 1}.")
    if low > high:
        raise UsageError(f"ranks {spec!r}: {part!r} is reversed; use {high}-{low}.")
    return range(low, high + 1)


def resolve_ranks(ranks: str | Iterable[int] | None, world_size: int) -> list[int]:
    """Ranks as a sorted list without doubles; None means all.

    Raises:
        UsageError: a rank that does not exist, or none at all.
    """
    if ranks is None:
        return list(range(world_size))
    text = ranks if isinstance(ranks, str) else ",".join(str(int(rank)) for rank in ranks)
    if not text.strip():
        raise UsageError(f"no rank is named; ranks are 0 to {world_size - 1}.")
    return parse_ranks(text, world_size)


def pack_ranks(ranks: Sequence[int]) -> Runs:
    """Return ranks in a form whose size does not grow with their number, as long as they are as regular as a mesh."""
    runs: list[tuple[int, int, int]] = []
    for rank in ranks:
        first, count, step = runs[-1] if runs else (0, 0, 0)
        if runs and (count == 1 or rank == first + count * step):
            runs[-1] = first, count + 1, step if count > 1 else rank - first
        else:
            runs.append((rank, 1, 1))
    return tuple(runs)


@functools.lru_cache(maxsize=256)  # all ranks of a group send the same, several times per second
def unpack_ranks(runs: Runs) -> tuple[int, ...]:
    """Return the ranks that `pack_ranks` was given."""
    return tuple(first + index * step for first, count, step in runs for index in range(count))
