"""Ring buffers for messages from one rank to another: the sender adds pieces with headers, the receiver takes them.

Each side writes one counter: pieces added, or pieces taken. Nothing here waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from axon_nb.comm.shared_memory.segment import futex
from axon_nb.comm.shared_memory.segment.futex import copy
from axon_nb.comm.shared_memory.segment.memory import RING, WORD, SharedMemory

_LINE_WORDS = 8


@dataclass(frozen=True, slots=True)
class Head:
    """What one piece is."""

    tag: int
    total: int
    """Size of the whole message in bytes."""
    offset: int
    number: int
    """Number of the message in its ring, from 1."""
    line: int
    """Line of the cell that sends it; 0: unknown."""
    dtype: int
    """Number of the dtype of its elements."""


class OutRing:
    """The sender's side.

    Args:
        memory: The group's memory.
        source: This rank.
        target: The rank that receives.
    """

    def __init__(self, memory: SharedMemory, source: int, target: int) -> None:
        layout = memory.layout
        self._words = memory.words
        self._sent = layout.sent(source, target) // WORD
        self._taken = layout.taken(source, target) // WORD
        self._sent_address = memory.address + layout.sent(source, target)
        self.bell = memory.address + layout.taken(source, target)
        """Address of the word that changes when space becomes available."""
        self._heads = layout.heads(source, target) // WORD
        self._pieces = [memory.address + layout.piece(source, target, number) for number in range(RING)]
        self.piece_bytes = layout.piece_bytes

    def room(self) -> bool:
        """Whether there is space for a piece."""
        return self._words[self._sent] - self._words[self._taken] < RING

    def taken(self) -> int:
        """Number of pieces taken."""
        return self._words[self._taken]

    def refused(self) -> tuple[int, int, int]:
        """Number of the last message that the receiver refused, and the size and dtype that it expected."""
        words, place = self._words, self._taken
        number = words[place + 1]
        if futex.NEEDS_FENCE:
            futex.fence()
        return number, words[place + 2], words[place + 3]

    def put(self, head: Head, address: int) -> int:
        """Add the piece of a message at `head.offset`, read from `address`; return its size in bytes."""
        words, sent = self._words, self._words[self._sent]
        if futex.NEEDS_FENCE:
            futex.fence()
        place = self._heads + sent % RING * _LINE_WORDS
        count = min(self.piece_bytes, head.total - head.offset)
        words[place] = head.tag
        words[place + 1] = head.total
        words[place + 2] = head.offset
        words[place + 3] = head.number
        words[place + 4] = head.line
        words[place + 5] = head.dtype
        copy(self._pieces[sent % RING], address, count)
        if futex.NEEDS_FENCE:
            futex.fence()
        words[self._sent] = sent + 1
        futex.wake(self._sent_address)
        return count


class InRing:
    """The receiver's side; like `OutRing`."""

    def __init__(self, memory: SharedMemory, source: int, target: int) -> None:
        layout = memory.layout
        self._words = memory.words
        self._sent = layout.sent(source, target) // WORD
        self._taken = layout.taken(source, target) // WORD
        self.bell = memory.address + layout.sent(source, target)
        """Address of the word that changes when another piece arrives."""
        self._taken_address = memory.address + layout.taken(source, target)
        self._heads = layout.heads(source, target) // WORD
        self._pieces = [memory.address + layout.piece(source, target, number) for number in range(RING)]
        self.piece_bytes = layout.piece_bytes

    def sent(self) -> int:
        """Number of pieces added."""
        return self._words[self._sent]

    def head(self) -> Head | None:
        """The oldest piece in the ring."""
        words, taken = self._words, self._words[self._taken]
        if words[self._sent] == taken:
            return None
        if futex.NEEDS_FENCE:
            futex.fence()
        place = self._heads + taken % RING * _LINE_WORDS
        return Head(*words[place : place + 6])

    def take(self, head: Head, address: int) -> int:
        """Copy that piece to `address` (0: discard it), and remove it; return its size in bytes."""
        words, taken = self._words, self._words[self._taken]
        count = min(self.piece_bytes, head.total - head.offset)
        if address:
            copy(address, self._pieces[taken % RING], count)
        if futex.NEEDS_FENCE:
            futex.fence()
        words[self._taken] = taken + 1
        futex.wake(self._taken_address)
        return count

    def refuse(self, number: int, size: int, dtype: int) -> None:
        """Report to the sender that a message is longer than the expected `size` bytes, or not of the `dtype`."""
        self._words[self._taken + 2] = size
        self._words[self._taken + 3] = dtype
        if futex.NEEDS_FENCE:
            futex.fence()
        self._words[self._taken + 1] = number
