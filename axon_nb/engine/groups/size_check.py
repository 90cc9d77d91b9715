"""Sizes compared before data flows: Gloo ends the whole process when a peer sends more than was expected.

Ranks of one host share a small file for each group. Before an operation a rank writes down what it brings, then reads
what those who came before have written: of two that differ the later one raises, and has sent nothing. Who only writes
never waits. Some 2-5 us an operation.

Each word of the file is stored and loaded whole (`struct` does so byte by byte, over zeros). The number of an entry is
cleared before the entry is written, and written after it; before anything is said both are read again.
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

__all__ = ["Table", "cell_begins", "open_table"]

_RING = 8
"""Operations that a rank may be ahead and still be compared."""
_WORD_BYTES = 8
_WORDS = 2
"""Of one entry: its number, and what is brought."""
_AGAIN_S = 0.001
"""Before a difference is told it is read a second time: stores of other ranks may become visible in another order."""
_cell = [0]
"""Which cell runs: the same number on all its ranks, up to 2 ** 18."""
_PEERS = 16
"""Sends are compared in groups of at most so many ranks: their table grows with the square."""

_DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(dict.fromkeys(_DTYPES), start=1)}
_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in _DTYPE_CODES.items()}

# What must be equal on all ranks: the number of elements and their type, or bytes alone. Which argument tells it: the
# one that a single rank's share is in. Rooted ones have the root as well.
_OUTPUT, _INPUT = 0, 1
_SIZES = (1 << 37) - 1
_ROOTS = 0xFFF << 44
_ADDED = {
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
_CODES = {name: code for code, name in enumerate(sorted({*_ADDED, *_COPIED, "all_to_all_single", "alltoall_base"}), 1)}
_SPLIT = ("all_to_all_single", "alltoall_base")
_COMPARED = {
    name: (place, _CODES[name] << 56, name in _ADDED, name in _ROOTED)
    for name, place in [*_ADDED.items(), *_COPIED.items(), *((name, _INPUT) for name in _SPLIT)]
}
"""By operation: which argument tells it, its number in place, whether elements of a type count, and whether a root."""


def _fact(name: str, args: tuple[Any, ...]) -> int:
    """What one rank brings to a collective, as one number; 0: it is not compared.

    From the highest bit: operation (7 bits), root + 1 (12), type of the elements (7), their number or bytes (37).
    """
    known = _COMPARED.get(name)
    if known is None or (name in _SPLIT and (len(args) < 4 or args[2] or args[3])):
        return 0  # with split sizes each pair of ranks may have its own
    place, code, typed, rooted = known
    value = args[place] if len(args) > place else None
    if isinstance(value, (list, tuple)):
        value = value[0] if len(value) == 1 else None
    if not isinstance(value, torch.Tensor):
        return 0
    if rooted:
        code |= ((1 + int(getattr(args[-1], "rootRank", -1))) & 0xFFF) << 44
    if typed:
        return code | (_DTYPE_CODES.get(value.dtype, 0) << 37) | (value.numel() & _SIZES)
    return code | (value.nbytes & _SIZES)


def _entry_in_words(entry: int, ranks: Sequence[int]) -> str:
    """In words, such as ``4 float32`` or ``16 bytes, root rank 0``."""
    size, dtype, root = entry & _SIZES, (entry >> 37) & 0x7F, (entry >> 44) & 0xFFF
    words = f"{size:,} {_NAMES.get(dtype, 'bytes') if dtype else 'bytes'}"
    return f"{words} and rank {ranks[root - 1]} as the root" if 0 < root <= len(ranks) else words


class Table:
    """The shared file of one group in one epoch.

    Args:
        folder: Private to the cluster, on this host.
        name: The group's name.
        epoch: How often the groups have been formed.
        rank: This process's rank in the group.
        size: Number of ranks in the group.
    """

    def __init__(self, folder: Path, *, name: str, epoch: int, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._paired = size <= _PEERS
        self._base = _RING * size * _WORDS
        words = self._base + (2 * size * size * _RING * _WORDS if self._paired else 0)
        self._counts: Counter[tuple[bool, int, int]] = Counter()
        self._cell = 0
        self._path = folder / f"meet-{hashlib.sha1(f'{epoch}/{name}'.encode()).hexdigest()[:16]}"
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            length = words * _WORD_BYTES
            os.posix_fallocate(handle, 0, length)  # a full disk is an error here, and not a SIGBUS later
            self._words = memoryview(mmap.mmap(handle, length)).cast("q")
        finally:
            os.close(handle)
        # Whatever was here under this name: all ranks have come so far before the first of them communicates.
        for step in range(_RING):
            self._write(self._place(step, rank), 0, 0)
        for peer in range(size if self._paired else 0):
            for step in range(_RING):
                self._write(self._pair_place(rank, peer, step, sends=True), 0, 0)
                self._write(self._pair_place(peer, rank, step, sends=False), 0, 0)

    def close(self) -> None:
        """The group is formed anew, or gone."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _place(self, sequence: int, rank: int) -> int:
        return (sequence % _RING * self._size + rank) * _WORDS

    def _pair_place(self, source: int, target: int, count: int, *, sends: bool) -> int:
        row = (source * self._size + target) * 2 + (not sends)
        return self._base + (row * _RING + count % _RING) * _WORDS

    def _write(self, place: int, number: int, entry: int) -> None:
        self._words[place] = 0
        self._words[place + 1] = entry
        self._words[place] = number

    def _read_again(self, place: int, number: int, *, otherwise: int) -> int:
        """The entry, when it still is that of this number."""
        time.sleep(_AGAIN_S)
        entry = self._words[place + 1]
        return entry if self._words[place] == number else otherwise

    def compare(self, name: str, args: tuple[Any, ...], sequence: int, ranks: Callable[[], Sequence[int]]) -> None:
        """Write down what this rank brings to collective number `sequence`, and compare it with what others bring.

        Args:
            name: The operation.
            args: Its arguments.
            sequence: Its number in the group.
            ranks: Gives the group's global ranks.

        Raises:
            UsageError: a rank brings something else; nothing has been sent yet.
        """
        if not (entry := _fact(name, args)):
            return
        words, start = self._words, self._place(sequence, 0)
        place = start + self._rank * _WORDS
        words[place] = 0  # as `_write`
        words[place + 1] = entry
        words[place] = sequence
        row = words[start : start + self._size * _WORDS].tolist()
        if row[1::_WORDS].count(entry) == self._size:
            return
        for other in range(self._size):
            number, theirs = row[_WORDS * other : _WORDS * (other + 1)]
            # Other operations do not exchange data: the deadlock watch tells of those.
            if number != sequence or theirs == entry or theirs >> 56 != entry >> 56:
                continue
            theirs = self._read_again(self._place(sequence, other), sequence, otherwise=entry)
            if theirs != entry:
                members = ranks()
                if not (entry ^ theirs) & _ROOTS:  # the same root: that is not what differs
                    entry, theirs = entry & ~_ROOTS, theirs & ~_ROOTS
                raise UsageError(
                    f"{describe_call(name)}: rank {members[self._rank]} brings {_entry_in_words(entry, members)}, "
                    f"rank {members[other]} {_entry_in_words(theirs, members)}; all ranks of a group must bring the "
                    "same."
                )

    def compare_pair(self, name: str, args: tuple[Any, ...], ranks: Callable[[], Sequence[int]]) -> None:
        """Write down the size of a send or recv, and compare it with the other side's.

        Raises:
            UsageError: more is sent than is received; nothing has been sent yet.
        """
        if name == "recv_anysource":
            self._paired = False  # which message it takes is not known: from now on none is compared
        if not self._paired or len(args) < 3:
            return
        peer, tag, size = int(args[1]), int(args[2]), sum(tensor.nbytes for tensor in args[0])
        sends = name == "send"
        if self._cell != _cell[0]:
            # Counted anew in each cell: what one that was ended has left unpaired does not count in the next.
            self._cell = _cell[0]
            self._counts.clear()
        self._counts[sends, peer, tag] = count = self._counts[sends, peer, tag] + 1
        # Messages of another cell or of another tag do not meet this one.
        number = (self._cell << 44) | ((count & 0xFFFFF) << 24) | (tag & 0xFFFFFF)
        source, target = (self._rank, peer) if sends else (peer, self._rank)
        self._write(self._pair_place(source, target, count, sends=sends), number, size)
        far = self._pair_place(source, target, count, sends=not sends)
        if self._words[far] != number or not _too_long(size, self._words[far + 1], sends=sends):
            return
        other = self._read_again(far, number, otherwise=size)
        if _too_long(size, other, sends=sends):
            sent, taken = (size, other) if sends else (other, size)
            members = ranks()
            raise UsageError(
                f"{describe_call(name)}: rank {members[source]} sends {sent:,} bytes, and rank {members[target]} "
                f"receives into {taken:,} bytes; the receiver's tensor must be as large as the sender's."
            )


def _too_long(mine: int, theirs: int, *, sends: bool) -> bool:
    """Whether more is sent than is received."""
    return mine > theirs if sends else theirs > mine


def cell_begins(run: str) -> None:
    """Another cell runs from now on.

    Args:
        run: Its identifier, in hexadecimal digits; the same on all ranks that run it. Empty: not known.
    """
    _cell[0] = int(run[:8] or "0", 16) & 0x3FFFF


def open_table(root: Store, *, name: str, epoch: int, rank: int, size: int) -> Table | None:
    """The table of one group, beside the store's socket; None where there is none: sizes then go unchecked."""
    folder: Path | None = getattr(root, "folder", None)
    if folder is None:
        return None
    try:
        return Table(folder, name=name, epoch=epoch, rank=rank, size=size)
    except (OSError, ValueError):
        return None
