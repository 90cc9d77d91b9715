"""Compares sizes before data flows: Gloo terminates the process if a peer sends more than it expects.

Ranks of one host share a small file per group. Before an operation, a rank writes what it passes, then reads what the
ranks before it have written. If two differ, the later one raises, and has sent nothing. A rank never waits for others.
This takes 2-5 us per operation.

Each word of the file is stored and loaded atomically (`struct` works byte by byte and writes zeros first). The number
of an entry is cleared before the entry is written, and set after it. Before an error is raised both are read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from axon_nb.engine.collective_names import describe_call
from axon_nb.errors import UsageError

__all__ = ["SizeTable", "open_size_table", "start_cell"]

_RING = 8
"""Number of operations that a rank may be ahead and still be compared."""
_WORD_BYTES = 8
_WORDS = 2
"""Words per entry: its number, and the encoded argument."""
_REREAD_S = 0.001
"""Delay before a mismatch is read again: stores of other ranks may become visible in another order."""
_cell = [0]
"""Number of the cell that runs: the same on all its ranks, up to 2 ** 18."""
_MAX_PEERS = 16
"""Largest group in which sends are compared: the table grows with the square of the group's size."""

_DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(dict.fromkeys(_DTYPES), start=1)}
_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in _DTYPE_CODES.items()}

# What must be equal on all ranks: the number of elements and their dtype, or only the number of bytes. It is taken from
# the argument that holds one rank's share. For rooted operations the root must be equal, too.
_OUTPUT, _INPUT = 0, 1
_SIZES = (1 << 37) - 1
_ROOTS = 0xFFF << 44
_REDUCED = {
    "_reduce_scatter_base": _OUTPUT,
    "allreduce": _OUTPUT,
    "reduce": _OUTPUT,
    "reduce_scatter": _OUTPUT,
    "reduce_scatter_single": _OUTPUT,
}
_COPIED = {
    "_allgather_base": _INPUT,
    "all_gather_single": _INPUT,
    "allgather": _INPUT,
    "broadcast": _OUTPUT,
    "gather": _INPUT,
    "scatter": _OUTPUT,
}
_ROOTED = frozenset({"broadcast", "gather", "reduce", "scatter"})
_CODES = {
    name: code for code, name in enumerate(sorted({*_REDUCED, *_COPIED, "all_to_all_single", "alltoall_base"}), 1)
}
_SPLIT = ("all_to_all_single", "alltoall_base")
_COMPARED = {
    name: (position, _CODES[name] << 56, name in _REDUCED, name in _ROOTED)
    for name, position in [*_REDUCED.items(), *_COPIED.items(), *((name, _INPUT) for name in _SPLIT)]
}
"""By operation: position of the argument, shifted code, whether the dtype counts, and whether the root does."""


def _encode(name: str, args: tuple[Any, ...]) -> int:
    """Encode what one rank passes to a collective; 0: it is not compared.

    From the highest bit: operation (7 bits), root + 1 (12), dtype (7), number of elements or bytes (37).
    """
    known = _COMPARED.get(name)
    if known is None or (name in _SPLIT and (len(args) < 4 or args[2] or args[3])):
        return 0  # with split sizes, each pair of ranks may have its own
    position, code, typed, rooted = known
    value = args[position] if len(args) > position else None
    if isinstance(value, (list, tuple)):
        value = value[0] if len(value) == 1 else None
    if not isinstance(value, torch.Tensor):
        return 0
    if rooted:
        code |= ((1 + int(getattr(args[-1], "rootRank", -1))) & 0xFFF) << 44
    if typed:
        return code | (_DTYPE_CODES.get(value.dtype, 0) << 37) | (value.numel() & _SIZES)
    return code | (value.nbytes & _SIZES)


def _describe(entry: int, ranks: Sequence[int]) -> str:
    """Describe an entry, such as ``4 float32`` or ``16 bytes with root rank 0``."""
    size, dtype, root = entry & _SIZES, (entry >> 37) & 0x7F, (entry >> 44) & 0xFFF
    text = f"{size:,} {_NAMES.get(dtype, 'bytes') if dtype else 'bytes'}"
    return f"{text} with root rank {ranks[root - 1]}" if 0 < root <= len(ranks) else text


class SizeTable:
    """The shared file of one group in one epoch.

    Args:
        folder: The cluster's private folder on this host.
        name: The group's name.
        epoch: How often the groups have been rebuilt.
        rank: This process's rank in the group.
        size: Number of ranks in the group.
    """

    def __init__(self, folder: Path, *, name: str, epoch: int, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._compares_pairs = size <= _MAX_PEERS
        self._base = _RING * size * _WORDS
        words = self._base + (2 * size * size * _RING * _WORDS if self._compares_pairs else 0)
        self._counts: Counter[tuple[bool, int, int]] = Counter()
        self._cell = 0
        self._path = folder / f"sizes-{hashlib.sha1(f'{epoch}/{name}'.encode()).hexdigest()[:16]}"
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            length = words * _WORD_BYTES
            os.posix_fallocate(handle, 0, length)  # so that a full disk is an error here, not a SIGBUS later
            self._words = memoryview(mmap.mmap(handle, length)).cast("q")
        finally:
            os.close(handle)
        # Clear old content: all ranks get this far before the first of them communicates.
        for step in range(_RING):
            self._write(self._index(step, rank), 0, 0)
        for peer in range(size if self._compares_pairs else 0):
            for step in range(_RING):
                self._write(self._pair_index(rank, peer, step, sends=True), 0, 0)
                self._write(self._pair_index(peer, rank, step, sends=False), 0, 0)

    def close(self) -> None:
        """Remove the file: the group is rebuilt, or gone."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _index(self, sequence: int, rank: int) -> int:
        return (sequence % _RING * self._size + rank) * _WORDS

    def _pair_index(self, source: int, target: int, count: int, *, sends: bool) -> int:
        row = (source * self._size + target) * 2 + (not sends)
        return self._base + (row * _RING + count % _RING) * _WORDS

    def _write(self, index: int, number: int, entry: int) -> None:
        self._words[index] = 0
        self._words[index + 1] = entry
        self._words[index] = number

    def _reread(self, index: int, number: int, *, otherwise: int) -> int:
        """Return the entry if it still has this number."""
        time.sleep(_REREAD_S)
        entry = self._words[index + 1]
        return entry if self._words[index] == number else otherwise

    def check_collective(
        self, name: str, args: tuple[Any, ...], sequence: int, ranks: Callable[[], Sequence[int]]
    ) -> None:
        """Write what this rank passes to collective number `sequence`, and compare it with what others pass.

        Args:
            name: The operation.
            args: Its arguments.
            sequence: Its number in the group.
            ranks: Returns the group's global ranks.

        Raises:
            UsageError: another rank passes something different; nothing has been sent yet.
        """
        if not (entry := _encode(name, args)):
            return
        words, start = self._words, self._index(sequence, 0)
        index = start + self._rank * _WORDS
        words[index] = 0  # inlined `_write`
        words[index + 1] = entry
        words[index] = sequence
        row = words[start : start + self._size * _WORDS].tolist()
        if row[1::_WORDS].count(entry) == self._size:
            return
        for other in range(self._size):
            number, theirs = row[_WORDS * other : _WORDS * (other + 1)]
            # Different operations do not exchange data: the deadlock watch reports those.
            if number != sequence or theirs == entry or theirs >> 56 != entry >> 56:
                continue
            theirs = self._reread(self._index(sequence, other), sequence, otherwise=entry)
            if theirs != entry:
                members = ranks()
                if not (entry ^ theirs) & _ROOTS:  # the roots are equal, so they are not the difference
                    entry, theirs = entry & ~_ROOTS, theirs & ~_ROOTS
                raise UsageError(
                    f"{describe_call(name)}: rank {members[self._rank]} passed {_describe(entry, members)}, "
                    f"rank {members[other]} passed {_describe(theirs, members)}; all ranks of a group must pass the "
                    "same."
                )

    def check_point_to_point(self, name: str, args: tuple[Any, ...], ranks: Callable[[], Sequence[int]]) -> None:
        """Write the size of a send or recv, and compare it with the peer's.

        Raises:
            UsageError: the sender's tensor is larger than the receiver's; nothing has been sent yet.
        """
        if name == "recv_anysource":
            self._compares_pairs = False  # nothing says which message it takes: compare none from now on
        if not self._compares_pairs or len(args) < 3:
            return
        peer, tag, size = int(args[1]), int(args[2]), sum(tensor.nbytes for tensor in args[0])
        sends = name == "send"
        if self._cell != _cell[0]:
            # Counted per cell: calls that an aborted cell left unpaired do not count in the next one.
            self._cell = _cell[0]
            self._counts.clear()
        self._counts[sends, peer, tag] = count = self._counts[sends, peer, tag] + 1
        # Messages of another cell or another tag do not match this one.
        number = (self._cell << 44) | ((count & 0xFFFFF) << 24) | (tag & 0xFFFFFF)
        source, target = (self._rank, peer) if sends else (peer, self._rank)
        self._write(self._pair_index(source, target, count, sends=sends), number, size)
        peer_index = self._pair_index(source, target, count, sends=not sends)
        if self._words[peer_index] != number or not _overflows(size, self._words[peer_index + 1], sends=sends):
            return
        other = self._reread(peer_index, number, otherwise=size)
        if _overflows(size, other, sends=sends):
            sent, received = (size, other) if sends else (other, size)
            members = ranks()
            raise UsageError(
                f"{describe_call(name)}: rank {members[source]} sends {sent:,} bytes, but rank {members[target]} "
                f"receives into {received:,} bytes; the receiver's tensor must be as large as the sender's."
            )


def _overflows(own: int, theirs: int, *, sends: bool) -> bool:
    """Whether more bytes are sent than received."""
    return own > theirs if sends else theirs > own


def start_cell(run: str) -> None:
    """Note that another cell runs from now on.

    Args:
        run: Its identifier, in hexadecimal digits; the same on all ranks that run it. Empty: unknown.
    """
    _cell[0] = int(run[:8] or "0", 16) & 0x3FFFF


def open_size_table(root: Store, *, name: str, epoch: int, rank: int, size: int) -> SizeTable | None:
    """Open the table of one group, beside the store's socket; None if that is impossible: sizes then go unchecked."""
    folder: Path | None = getattr(root, "folder", None)
    if folder is None:
        return None
    try:
        return SizeTable(folder, name=name, epoch=epoch, rank=rank, size=size)
    except (OSError, ValueError):
        return None
