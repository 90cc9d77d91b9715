"""Collectives that move bytes: all_gather, broadcast, gather, scatter, all_to_all.

Tensors come as addresses of contiguous memory that the caller keeps alive.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axon_nb.comm.errors import TensorMismatchError
from axon_nb.comm.shared_memory.collectives.rounds import Rounds
from axon_nb.comm.shared_memory.collectives.uneven import part_bytes, table_bytes
from axon_nb.comm.shared_memory.segment.futex import copy


def _pieces(size: int, piece: int) -> int:
    return max(1, -(-size // piece))


def barrier(rounds: Rounds) -> None:
    """Wait until all ranks have arrived."""
    rounds.run(1, None, None)


def all_gather(rounds: Rounds, source: int, size: int, targets: Sequence[int]) -> None:
    """Copy `size` bytes at `source` of each rank to that rank's address in `targets`."""
    piece, self_rank, base = rounds.piece_bytes(size), rounds.rank, rounds.address
    others = [(rank, target) for rank, target in enumerate(targets) if rank != self_rank]
    copies_own = targets[self_rank] != source

    def write(i: int) -> None:
        copy(base + rounds.slot(self_rank, i), source + i * piece, min(piece, size - i * piece))

    def read(i: int) -> None:
        count = min(piece, size - i * piece)
        for rank, target in others:
            copy(target + i * piece, base + rounds.slot(rank, i), count)
        if copies_own:
            copy(targets[self_rank] + i * piece, base + rounds.slot(self_rank, i), count)

    rounds.run(_pieces(size, piece), write, read)


def broadcast(rounds: Rounds, address: int, size: int, root: int) -> None:
    """Copy `size` bytes at `address` of the root to that of each rank."""
    piece, base = rounds.layout.slot_bytes, rounds.address

    def write(i: int) -> None:
        copy(base + rounds.slot(root, i), address + i * piece, min(piece, size - i * piece))

    def read(i: int) -> None:
        copy(address + i * piece, base + rounds.slot(root, i), min(piece, size - i * piece))

    if rounds.rank == root:
        rounds.run(_pieces(size, piece), write, None)
    else:
        rounds.run(_pieces(size, piece), None, read, root)


def gather(rounds: Rounds, source: int, size: int, targets: Sequence[int] | None, root: int) -> None:
    """Copy `size` bytes at `source` of each rank to the root's `targets`, by rank."""
    piece, base = rounds.layout.slot_bytes, rounds.address

    def write(i: int) -> None:
        copy(base + rounds.slot(rounds.rank, i), source + i * piece, min(piece, size - i * piece))

    def read(i: int) -> None:
        assert targets is not None
        count = min(piece, size - i * piece)
        for rank, target in enumerate(targets):
            if rank != root:
                copy(target + i * piece, base + rounds.slot(rank, i), count)

    if rounds.rank != root:
        rounds.run(_pieces(size, piece), write, None, root)
        return
    rounds.run(_pieces(size, piece), None, read)
    if targets is not None and targets[root] != source:
        copy(targets[root], source, size)


def scatter(rounds: Rounds, sources: Sequence[int] | None, size: int, target: int, root: int) -> None:
    """Copy `size` bytes at each of the root's `sources` to `target` of the rank with that index."""
    piece = part_bytes(rounds.layout.slot_bytes, rounds.size)
    base = rounds.address

    def write(i: int) -> None:
        assert sources is not None
        place, count = base + rounds.slot(root, i), min(piece, size - i * piece)
        for rank, source in enumerate(sources):
            if rank != root:
                copy(place + rank * piece, source + i * piece, count)

    def read(i: int) -> None:
        start = base + rounds.slot(root, i) + rounds.rank * piece
        copy(target + i * piece, start, min(piece, size - i * piece))

    if rounds.rank != root:
        rounds.run(_pieces(size, piece), None, read, root)
        return
    rounds.run(_pieces(size, piece), write, None)
    if sources is not None and sources[root] != target:
        copy(target, sources[root], size)


def all_to_all(
    rounds: Rounds, sources: Sequence[int], sent: Sequence[int], targets: Sequence[int], taken: Sequence[int]
) -> None:
    """Copy `sent[p]` bytes at `sources[p]` to rank p, and `taken[p]` bytes from rank p to `targets[p]`.

    Raises:
        TensorMismatchError: two ranks disagree about what one sends to the other; raised on all ranks.
    """
    n, self_rank, base = rounds.size, rounds.rank, rounds.address
    table = table_bytes(2 * n)
    piece = part_bytes(rounds.layout.slot_bytes, n, table)

    def write(i: int) -> None:
        place = base + rounds.slot(self_rank, i) + table
        for rank in range(n):
            if rank != self_rank and (count := min(piece, sent[rank] - i * piece)) > 0:
                copy(place + rank * piece, sources[rank] + i * piece, count)

    def read(i: int) -> None:
        for rank in range(n):
            if rank != self_rank and (count := min(piece, taken[rank] - i * piece)) > 0:
                copy(targets[rank] + i * piece, base + rounds.slot(rank, i) + table + self_rank * piece, count)

    mine = np.frombuffer(rounds.buffer, np.int64, 2 * n, rounds.slot(self_rank, 0))
    mine[:n], mine[n:] = sent, taken
    write(0)
    rounds.post(1)
    rounds.wait_for_peers()
    tables = np.stack([np.frombuffer(rounds.buffer, np.int64, 2 * n, rounds.slot(rank, 0)) for rank in range(n)])
    pieces = _pieces(int(tables.max()), piece)
    wrong = np.argwhere(tables[:, :n] != tables[:, n:].T)
    if len(wrong):
        # Once all ranks are at step 2, all have read the tables, and the next collective may use the slots.
        rounds.post(2)
        rounds.wait(-1, 2)
        source, target = (int(rank) for rank in wrong[0])
        members = rounds.progress.members
        place = rounds.place("all_to_all")
        raise TensorMismatchError(
            f"{place}: rank {members[source]} sends {tables[source, target]:,} bytes to rank {members[target]}, "
            f"which expects {tables[target, n + source]:,}; split sizes must match."
        )
    rounds.move(pieces, write, read)
    rounds.end(pieces)
    if sent[self_rank] and targets[self_rank] != sources[self_rank]:
        copy(targets[self_rank], sources[self_rank], sent[self_rank])
