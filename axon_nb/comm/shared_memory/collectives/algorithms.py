"""The algorithm of each collective, in rounds: those that move bytes, and those that reduce, always in rank order.

The result of a reduction has the same bits on all ranks and in every run, whoever arrives first. NumPy does what it
can: its calls are short and invisible to torch's modes. torch does the rest: 16-bit types are summed in float32 and
rounded once.

Tensors come as addresses of contiguous memory, and as buffers where they are the target of arithmetic; the caller keeps
them alive. Parts of several ranks can share one slot; a table gives their sizes if they differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from axon_nb.comm.errors import TensorError, TensorMismatchError
from axon_nb.comm.shared_memory.collectives.rounds import Rounds
from axon_nb.comm.shared_memory.segment.futex import copy
from axon_nb.comm.shared_memory.segment.pages import REDUCE_OPERATIONS, note_unlike_gloo

DIRECT_BYTES = 64 << 10
"""Up to this size each rank reduces everything itself, with one wait; above, each reduces a part, with two."""
_ALIGN = 64
Arrays = Sequence[Any]
_SUM, _AVG, _PRODUCT, _MIN, _MAX, _BAND, _BOR, _BXOR, _PREMUL = range(9)
_KERNELS: dict[int, Any] = {
    _SUM: np.add,
    _AVG: np.add,
    _PRODUCT: np.multiply,
    _MIN: np.minimum,
    _MAX: np.maximum,
    _BAND: np.bitwise_and,
    _BOR: np.bitwise_or,
    _BXOR: np.bitwise_xor,
    _PREMUL: np.add,
}
_TORCH_KERNELS: dict[int, Any] = {
    _SUM: torch.add,
    _AVG: torch.add,
    _PRODUCT: torch.mul,
    _MIN: torch.minimum,
    _MAX: torch.maximum,
    _PREMUL: torch.add,
}
_BLOCK = 1 << 15
"""Elements that are summed in float32 at a time."""
_WIDENED = (torch.bfloat16, torch.float16)
_NUMPY = {
    dtype: np.dtype(str(dtype).removeprefix("torch.").replace("bool", "bool_").rstrip("_"))
    for dtype in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
}


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


def table_bytes(entries: int) -> int:
    """Return the bytes that a table of so many sizes takes at the start of a slot."""
    return -(-entries * 8 // _ALIGN) * _ALIGN


def part_bytes(slot: int, ranks: int, table: int = 0) -> int:
    """Return the bytes of a slot that each rank's part of a piece takes, behind a table."""
    return (slot - table) // ranks // _ALIGN * _ALIGN


def reduce_scatter_uneven(
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


class Arithmetic:
    """How one dtype is reduced with one operation.

    Args:
        dtype: The dtype of the tensors.
        operation: Number of the reduce operation.
        size: Number of ranks.

    Raises:
        TensorError: the operation is not defined for the dtype.
    """

    def __init__(self, dtype: torch.dtype, operation: int, size: int) -> None:
        if not is_defined(dtype, operation):
            raise TensorError(f"{REDUCE_OPERATIONS[operation]} is not defined for {str(dtype).removeprefix('torch.')}.")
        note_unlike_gloo("", dtype, REDUCE_OPERATIONS[operation])
        self._dtype, self._size = dtype, size
        self._numpy = _NUMPY.get(dtype)
        self._kernel = _KERNELS[operation]
        self._torch_kernel: Any = _TORCH_KERNELS.get(operation)
        self._average = operation == _AVG
        self.reduce: Callable[[Any, Sequence[tuple[Any, int]], int], None] = (
            self._with_torch if self._numpy is None else self._with_numpy
        )
        """Reduce `count` elements at (buffer, offset in bytes) of each source, in this order, into a target."""

    def _with_numpy(self, target: tuple[Any, int], sources: Sequence[tuple[Any, int]], count: int) -> None:
        dtype, kernel = self._numpy, self._kernel
        parts = [np.frombuffer(buffer, dtype, count, offset) for buffer, offset in sources]
        out = np.frombuffer(target[0], dtype, count, target[1])
        with np.errstate(all="ignore"):
            if len(parts) == 1:
                out[:] = parts[0]
            else:
                kernel(parts[0], parts[1], out=out)
            for part in parts[2:]:
                kernel(out, part, out=out)
            if self._average:
                self._divide(out)

    def _divide(self, out: Any) -> None:
        if out.dtype.kind in "fc":
            np.divide(out, self._size, out=out)
        else:  # towards zero, as in C
            out[:] = np.sign(out) * (np.abs(out) // self._size) if out.dtype.kind == "i" else out // self._size

    def _with_torch(self, target: tuple[Any, int], sources: Sequence[tuple[Any, int]], count: int) -> None:
        parts = [torch.frombuffer(buffer, dtype=self._dtype, count=count, offset=offset) for buffer, offset in sources]
        result = torch.frombuffer(target[0], dtype=self._dtype, count=count, offset=target[1])
        if len(parts) == 2 and not self._average:  # torch's kernels compute in float32, and round once
            self._torch_kernel(*parts, out=result)
            return
        for begin in range(0, count, _BLOCK):  # a block stays in the cache from its conversion to its rounding
            block = slice(begin, begin + _BLOCK)
            total = parts[0][block].float()
            for part in parts[1:]:
                self._torch_kernel(total, part[block].float(), out=total)
            if self._average:
                total /= self._size
            result[block].copy_(total)


def is_defined(dtype: torch.dtype, operation: int) -> bool:
    """Whether a dtype can be reduced with an operation."""
    if operation in (_BAND, _BOR, _BXOR):
        return dtype in _NUMPY and not dtype.is_floating_point and not dtype.is_complex
    if operation in (_MIN, _MAX) and dtype.is_complex:
        return False
    if operation in (_AVG, _PREMUL) and dtype is torch.bool:
        return False
    return dtype in _NUMPY or dtype in _WIDENED


@functools.lru_cache(256)
def arithmetic(dtype: torch.dtype, operation: int, size: int) -> Arithmetic:
    """Return the `Arithmetic` for these arguments."""
    return Arithmetic(dtype, operation, size)
