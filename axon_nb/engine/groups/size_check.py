"""Compares sizes before data flows: Gloo terminates the process if a peer sends more than it expects.

Ranks of one host share a small file per group. Before an operation, a rank writes what it passes, as one number per
call, then reads what the ranks before it have written. If two differ, the later one raises, and has sent nothing. A
rank never waits for others. This takes 2-5 us per operation.

Each word of the file is stored and loaded atomically (`struct` works byte by byte and writes zeros first). The number
of an entry is cleared before the entry is written, and set after it. Before an error is raised both are read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from axon_nb.comm.shared_memory.segment.pages import dtype_code, dtype_name
from axon_nb.engine.frames import describe_call
from axon_nb.engine.groups.state import GroupsState
from axon_nb.errors import UsageError
from axon_nb.records.stacks import fsdp_tag
from axon_nb.records.waits import PUBLIC_NAMES, advice_for

# What must be equal on all ranks: the number of elements and their dtype, or only the number of bytes. It is taken from
# the argument that holds one rank's share. For rooted operations the root must be equal, too.
_OUTPUT, _INPUT = 0, 1
_SIZES = (1 << 34) - 1
_DTYPE_AT, _REDUCE_AT, _ROOT_AT, NAME_AT = 34, 41, 45, 56
REDUCTIONS, ROOTS = 0xF << _REDUCE_AT, 0x7FF << _ROOT_AT
_REDUCE_NAMES = list(dist.ReduceOp.RedOpType.__members__)
_KNOWN_REDUCTIONS = list(dist.ReduceOp.RedOpType.__members__.values())
_REDUCED = (
    "_reduce_scatter_base", "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
)  # fmt: skip
_GATHERED = (
    "_allgather_base", "all_gather_single", "all_gather_single_coalesced", "allgather",
    "allgather_into_tensor_coalesced", "gather",
)  # fmt: skip
_POSITIONS = {
    **dict.fromkeys((*_REDUCED, "broadcast", "scatter"), _OUTPUT),
    **dict.fromkeys((*_GATHERED, "all_to_all_single", "alltoall_base"), _INPUT),
}
_ROOTED = frozenset({"broadcast", "gather", "reduce", "scatter"})
_BY_FSDP = frozenset(
    {"_allgather_base", "_reduce_scatter_base", "all_gather_single", "allgather", "reduce_scatter_single"}
)
"""Operations that have the number of FSDP's module in the place of the root."""
_CODES = {name: code for code, name in enumerate(sorted(_POSITIONS), 1)}
CALL_NAMES = {code: PUBLIC_NAMES.get(name, name) for name, code in _CODES.items()}
SPLIT_CALLS = {name: _CODES[name] << NAME_AT for name in ("all_to_all_single", "alltoall_base")}
"""Operations that may have splits, and the entry of one whose sizes are compared pair by pair."""
_COMPARED = {
    name: (position, _CODES[name] << NAME_AT, name in _REDUCED, name in _ROOTED)
    for name, position in _POSITIONS.items()
}
"""By operation: position of the argument, shifted code, whether the dtype counts, and whether the root does."""
_RING = 8
"""Number of operations that a rank may be ahead and still be compared."""
_WORD_BYTES = 8
_WORDS = 2
"""Words per entry: its number, and the encoded argument."""
_REREAD_S = 0.001
"""Delay before a mismatch is read again: stores of other ranks may become visible in another order."""
_MAX_PEERS = 16
"""Largest group in which sends are compared: the table grows with the square of the group's size."""
_SPLIT_NUMBER = 1 << 62
"""Added to the number of an exchange of splits: entries of messages never have this bit."""


def encode(name: str, args: tuple[Any, ...]) -> int:
    """Encode what one rank passes to a collective; 0: it is not compared.

    From the highest bit: operation (7 bits), root + 1 or the number of FSDP's module (11), reduction + 1 (4),
    dtype (7), number of elements or bytes (34).
    """
    known = _COMPARED.get(name)
    if known is None:
        return 0
    position, code, typed, rooted = known
    value = args[position] if len(args) > position else None
    if name in SPLIT_CALLS and (len(args) < 4 or args[2] or args[3]):
        return 0  # each pair of ranks may have its own size
    more = 0
    if isinstance(value, (list, tuple)):
        if not value:
            return 0
        more = sum(item.numel() if typed else item.nbytes for item in value[1:])
        value = value[0]
    if not isinstance(value, torch.Tensor):
        return 0
    if name in _BY_FSDP:
        code |= fsdp_tag(sys._getframe()) << _ROOT_AT
    elif rooted:
        code |= ((1 + int(getattr(args[-1], "rootRank", -1))) & 0x7FF) << _ROOT_AT
    if typed:
        code |= ((1 + _reduction(args[-1])) << _REDUCE_AT) & REDUCTIONS
        return code | (dtype_code(value.dtype) << _DTYPE_AT) | (value.numel() + more & _SIZES)
    return code | (value.nbytes + more & _SIZES)


def _reduction(options: Any) -> int:
    """Return the number of the `ReduceOp` in an operation's options; -1 if there is none."""
    if (reduction := getattr(options, "reduceOp", None)) is None:
        return -1
    # `int(reduction.op)` takes ten times as long.
    return next((number for number, known in enumerate(_KNOWN_REDUCTIONS) if reduction == known), -1)


def describe_entry(entry: int, ranks: Sequence[int]) -> str:
    """Describe an entry, such as ``4 float32`` or ``16 bytes with root rank 0``."""
    size, dtype = entry & _SIZES, (entry >> _DTYPE_AT) & 0x7F
    reduction, root = (entry & REDUCTIONS) >> _REDUCE_AT, (entry & ROOTS) >> _ROOT_AT
    text = f"{size:,} {dtype_name(dtype) or 'bytes'}"
    text += f" with ReduceOp.{_REDUCE_NAMES[reduction - 1]}" if reduction else ""
    return f"{text} with root rank {ranks[root - 1]}" if 0 < root <= len(ranks) else text


def split_bytes(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the bytes of each rank's part of an all_to_all's tensor; without splits they are equal."""
    if not splits:
        return [tensor.nbytes // size] * size
    row = tensor.nbytes // max(1, tensor.shape[0])
    return [count * row for count in splits]


class SizeTable:
    """The shared file of one group in one epoch.

    Args:
        folder: The cluster's private folder on this host.
        state: What the groups of this rank share.
        name: The group's name.
        epoch: How often the groups have been rebuilt.
        rank: This process's rank in the group.
        size: Number of ranks in the group.
    """

    def __init__(self, folder: Path, state: GroupsState, *, name: str, epoch: int, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._compares_pairs = size <= _MAX_PEERS
        self._base = _RING * size * _WORDS
        words = self._base + (2 * size * size * _RING * _WORDS if self._compares_pairs else 0)
        self._counts: Counter[tuple[bool, int, int]] = Counter()
        self._state = state
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
        if name in SPLIT_CALLS and self._size <= _MAX_PEERS and len(args) > 3:
            self._check_splits(name, args, sequence, ranks)
            entry = SPLIT_CALLS[name]
        elif not (entry := encode(name, args)):
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
            if number != sequence or theirs == entry:
                continue
            theirs = self._reread(self._index(sequence, other), sequence, otherwise=entry)
            if theirs != entry:
                self._refuse(name, entry, theirs, other, ranks())

    def retract(self, sequence: int) -> None:
        """Remove what this rank wrote for a collective that failed before it began: the next has its number."""
        own = [(sequence, self._index(sequence, self._rank))]
        for peer in range(self._size if self._compares_pairs else 0):
            for source, target in ((self._rank, peer), (peer, self._rank)):
                index = self._pair_index(source, target, sequence, sends=source == self._rank)
                own.append((_SPLIT_NUMBER | sequence, index))
        for number, index in own:
            if self._words[index] == number:
                self._words[index] = 0

    def _refuse(self, name: str, entry: int, theirs: int, other: int, ranks: Sequence[int]) -> None:
        local, other = ranks[self._rank], ranks[other]
        call = describe_call(name)
        if theirs >> NAME_AT != entry >> NAME_AT:
            raise UsageError(
                f"Collective mismatch: rank {local} is in {call}, rank {other} in {CALL_NAMES[theirs >> NAME_AT]}, "
                "on the same group."
            )
        if name in _BY_FSDP and (entry ^ theirs) & ROOTS:
            raise UsageError(
                f"Collective mismatch: rank {local} is in {call}, rank {other} in another module or call, on the same "
                f"group.{advice_for([call.partition(' at line ')[0]])}"
            )
        for part in (ROOTS, REDUCTIONS):
            if not (entry ^ theirs) & part:  # they are equal, so they are not the difference
                entry, theirs = entry & ~part, theirs & ~part
        here, there = describe_entry(entry, ranks), describe_entry(theirs, ranks)
        raise UsageError(
            f"{call}: rank {local} passed {here}, rank {other} passed {there}; all ranks of a group must pass the same."
        )

    def _check_splits(
        self, name: str, args: tuple[Any, ...], sequence: int, ranks: Callable[[], Sequence[int]]
    ) -> None:
        """Write how much this rank sends to and expects from each other, and compare it with what they do."""
        number, peers = _SPLIT_NUMBER | sequence, range(self._size)
        expected, sent = split_bytes(args[0], args[2], self._size), split_bytes(args[1], args[3], self._size)
        for peer in peers:
            self._write(self._pair_index(self._rank, peer, sequence, sends=True), number, sent[peer])
            self._write(self._pair_index(peer, self._rank, sequence, sends=False), number, expected[peer])
        for peer in peers:
            for sizes, sends, source, target in ((sent, True, self._rank, peer), (expected, False, peer, self._rank)):
                index = self._pair_index(source, target, sequence, sends=not sends)
                if self._words[index] != number or self._words[index + 1] == sizes[peer]:
                    continue
                theirs = self._reread(index, number, otherwise=sizes[peer])
                if theirs != sizes[peer]:
                    members = ranks()
                    first, second = (sizes[peer], theirs) if sends else (theirs, sizes[peer])
                    raise UsageError(
                        f"{describe_call(name)}: rank {members[source]} sends {first:,} bytes to rank "
                        f"{members[target]}, which expects {second:,} bytes; the splits of both must agree."
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
        if self._cell != self._state.run:
            # Counted per cell: calls that an aborted cell left unpaired do not count in the next one.
            self._cell = self._state.run
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


def _overflows(ours: int, theirs: int, *, sends: bool) -> bool:
    """Whether more bytes are sent than received."""
    return ours > theirs if sends else theirs > ours


def open_size_table(
    root: Store, state: GroupsState, *, name: str, epoch: int, rank: int, size: int
) -> SizeTable | None:
    """Open the table of one group, beside the store's socket; None if that is impossible: sizes then go unchecked."""
    folder: Path | None = getattr(root, "folder", None)
    if folder is None:
        return None
    try:
        return SizeTable(folder, state, name=name, epoch=epoch, rank=rank, size=size)
    except (OSError, ValueError):
        return None
