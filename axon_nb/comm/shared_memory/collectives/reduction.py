"""Collectives that reduce: all_reduce, reduce, reduce_scatter; always in rank order.

Tensors come as addresses of contiguous memory, and as buffers where they are the target of arithmetic; the caller keeps
them alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axon_nb.comm.shared_memory.collectives.arithmetic import Arithmetic
from axon_nb.comm.shared_memory.collectives.rounds import Rounds
from axon_nb.comm.shared_memory.collectives.uneven import part_bytes
from axon_nb.comm.shared_memory.segment.futex import copy

DIRECT_BYTES = 64 << 10
"""Up to this size each rank reduces everything itself, with one wait; above, each reduces a part, with two."""


def all_reduce_small(rounds: Rounds, address: int, *, size: int, count: int, sums: Arithmetic, scratch: Any) -> None:
    """Reduce `count` elements, `size` bytes, at `address` in place; they fit into a slot.

    Args:
        rounds: The group.
        address: Where the elements are.
        size: Their bytes.
        count: How many.
        sums: The arithmetic.
        scratch: A buffer of this process and its address.
    """
    base = rounds.address
    copy(base + rounds.slot(rounds.rank, 0), address, size)
    rounds.post(1)
    rounds.wait_for_peers()
    if count:
        buffer = rounds.buffer
        sums.reduce((scratch[0], 0), [(buffer, rounds.slot(rank, 0)) for rank in range(rounds.size)], count)
        copy(address, scratch[1], size)
    rounds.end(1)


def all_reduce(rounds: Rounds, address: int, *, target: Any, count: int, item: int, sums: Arithmetic) -> None:
    """Reduce elements in place.

    Each rank writes all but its own part of a piece into its slot, reduces its own part of all ranks into the gap, and
    collects the parts of the others. Step `i` writes piece `i`, reduces piece `i - 1` and collects piece `i - 2`.

    Args:
        rounds: The group.
        address: Where the elements are.
        target: The same memory as a buffer.
        count: How many elements.
        item: Bytes of one.
        sums: The arithmetic.
    """
    n, self_rank, base, buffer = rounds.size, rounds.rank, rounds.address, rounds.buffer
    piece = rounds.piece_bytes(count * item) // item
    pieces = -(-count // piece)

    def edges_of(i: int) -> list[int]:
        """The offsets in bytes of the parts of a piece, and its end."""
        length = min(piece, count - i * piece)
        return [rank * length // n * item for rank in range(n + 1)]

    for i in range(pieces + 2):
        if i < pieces:
            edges, place, slot = edges_of(i), address + i * piece * item, base + rounds.slot(self_rank, i)
            copy(slot, place, edges[self_rank])
            copy(slot + edges[self_rank + 1], place + edges[self_rank + 1], edges[n] - edges[self_rank + 1])
        if i > 1:
            rounds.wait(-1, i)
        if 0 < i <= pieces:
            edges, offset = edges_of(i - 1), (i - 1) * piece * item
            start, size = edges[self_rank], edges[self_rank + 1] - edges[self_rank]
            if size:
                sources = [(buffer, rounds.slot(rank, i - 1) + start) for rank in range(n)]
                gap, sources[self_rank] = sources[self_rank], (target, offset + start)
                sums.reduce(gap, sources, size // item)
                copy(address + offset + start, base + gap[1], size)
        if i > 1:
            edges, place = edges_of(i - 2), address + (i - 2) * piece * item
            for rank in range(n):
                if rank != self_rank:
                    start = edges[rank]
                    copy(place + start, base + rounds.slot(rank, i - 2) + start, edges[rank + 1] - start)
        rounds.post(i + 1)
        if i == 0:
            rounds.wait_for_peers()
    rounds.end(pieces)


def reduce(rounds: Rounds, address: int, *, buffer: Any, count: int, item: int, sums: Arithmetic, root: int) -> None:
    """Reduce `count` elements of `item` bytes of all ranks into the root's.

    Args:
        rounds: The group.
        address: Where this rank's elements are.
        buffer: The same memory as a buffer, on the root.
        count: How many elements.
        item: Bytes of one.
        sums: The arithmetic.
        root: Group rank of the root.
    """
    self_rank, base = rounds.rank, rounds.address
    piece = rounds.piece_bytes(count * item) // item
    pieces = max(1, -(-count // piece))

    def write(i: int) -> None:
        copy(base + rounds.slot(self_rank, i), address + i * piece * item, min(piece, count - i * piece) * item)

    def read(i: int) -> None:
        length = min(piece, count - i * piece)
        if length > 0:
            sources = [(rounds.buffer, rounds.slot(rank, i)) for rank in range(rounds.size)]
            sums.reduce((buffer, i * piece * item), sources, length)

    if self_rank == root:
        rounds.run(pieces, write, read)
    else:
        rounds.run(pieces, write, None, root)


def reduce_scatter(
    rounds: Rounds, sources: Sequence[int], *, own_part: Any, buffer: Any, count: int, item: int, sums: Arithmetic
) -> None:
    """Reduce the elements that all ranks have for this one.

    Args:
        rounds: The group.
        sources: The address of this rank's `count` elements for each rank.
        own_part: Its elements for itself as a buffer; empty if the result overwrites them.
        buffer: Where the result goes.
        count: Elements for one rank.
        item: Bytes of one.
        sums: The arithmetic.
    """
    n, self_rank, base = rounds.size, rounds.rank, rounds.address
    piece = part_bytes(rounds.piece_bytes(count * item * n), n) // item
    pieces = max(1, -(-count // piece))
    stride = piece * item
    skips_own = len(own_part) > 0

    def write(i: int) -> None:
        place, length = base + rounds.slot(self_rank, i), min(piece, count - i * piece) * item
        for rank in range(n):
            if rank != self_rank or not skips_own:
                copy(place + rank * stride, sources[rank] + i * stride, length)

    def read(i: int) -> None:
        length = min(piece, count - i * piece)
        if length > 0:
            parts = [(rounds.buffer, rounds.slot(rank, i) + self_rank * stride) for rank in range(n)]
            if skips_own:
                parts[self_rank] = (own_part, i * stride)
            sums.reduce((buffer, i * stride), parts, length)

    rounds.run(pieces, write, read)
