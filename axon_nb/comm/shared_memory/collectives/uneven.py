"""Parts of several ranks in one slot: their size, the table of sizes that differ, and reduce_scatter of such parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from axon_nb.comm.errors import TensorMismatchError
from axon_nb.comm.shared_memory.collectives.arithmetic import Arithmetic
from axon_nb.comm.shared_memory.collectives.rounds import Rounds
from axon_nb.comm.shared_memory.segment.futex import copy

_ALIGN = 64


def table_bytes(entries: int) -> int:
    """Return the bytes that a table of so many sizes takes at the start of a slot."""
    return -(-entries * 8 // _ALIGN) * _ALIGN


def part_bytes(slot: int, ranks: int, table: int = 0) -> int:
    """Return the bytes of a slot that each rank's part of a piece takes, behind a table."""
    return (slot - table) // ranks // _ALIGN * _ALIGN


def reduce_scatter(
    rounds: Rounds, sources: Sequence[int], counts: Sequence[int], *, buffer: Any, item: int, sums: Arithmetic
) -> None:
    """Reduce the elements that all ranks have for this one.

    The parts of a rank are one sequence of elements. It moves through the slots piece by piece, behind a table of the
    counts; each rank reduces what belongs to it.

    Args:
        rounds: The group.
        sources: The address of this rank's elements for each rank.
        counts: How many these are, by rank; must be the same on all ranks.
        buffer: Where the result goes.
        item: Bytes of an element.
        sums: The arithmetic.

    Raises:
        TensorMismatchError: the counts differ between ranks; raised on all.
    """
    n, self_rank, base = rounds.size, rounds.rank, rounds.address
    edges = [sum(counts[:rank]) for rank in range(n + 1)]
    table = table_bytes(n)
    piece = (rounds.layout.slot_bytes - table) // _ALIGN * _ALIGN // item
    pieces = max(1, -(-edges[n] // piece))

    def overlap(i: int, rank: int) -> tuple[int, int]:
        """The first element of piece `i` for a rank, and the end."""
        return max(edges[rank], i * piece), min(edges[rank + 1], (i + 1) * piece)

    def write(i: int) -> None:
        place = base + rounds.slot(self_rank, i) + table
        for rank in range(n):
            start, end = overlap(i, rank)
            if start < end:
                source = sources[rank] + (start - edges[rank]) * item
                copy(place + (start - i * piece) * item, source, (end - start) * item)

    def read(i: int) -> None:
        start, end = overlap(i, self_rank)
        if start < end:
            offset = table + (start - i * piece) * item
            parts = [(rounds.buffer, rounds.slot(rank, i) + offset) for rank in range(n)]
            sums.reduce((buffer, (start - edges[self_rank]) * item), parts, end - start)

    np.frombuffer(rounds.buffer, np.int64, n, rounds.slot(self_rank, 0))[:] = counts
    write(0)
    rounds.post(1)
    rounds.wait_for_peers()
    tables = np.stack([np.frombuffer(rounds.buffer, np.int64, n, rounds.slot(rank, 0)) for rank in range(n)])
    wrong = np.argwhere(tables != tables[0])
    if len(wrong):
        # Once all ranks are at step 2, all have read the tables, and the next collective may use the slots.
        rounds.post(2)
        rounds.wait(-1, 2)
        members, (rank, target) = rounds.progress.members, (int(number) for number in wrong[0])
        raise TensorMismatchError(
            f"{rounds.place('reduce_scatter')}: for rank {members[target]}, rank {members[0]} passed "
            f"{tables[0, target]:,} elements and rank {members[rank]} {tables[rank, target]:,}; must be the same."
        )
    rounds.move(pieces, write, read)
    rounds.end(pieces)
