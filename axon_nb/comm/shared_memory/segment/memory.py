"""The memory of one group: an anonymous file that all its ranks map, its layout, and the rings for messages in it.

The first rank creates the file and puts its address under /proc into the store; the kernel lets processes of the same
user open it. The file has no name, its size is sealed, and no rank keeps a descriptor, so it is freed with the last
mapping. Pages are allocated on the first write, so unused parts cost nothing.

Each rank writes only to its own parts: control page, counters, slots, and the rings of messages to other ranks. The
sender adds pieces with headers to a ring, the receiver takes them. Each side writes one counter: pieces added, or
pieces taken. Rings never wait.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from pathlib import Path

from msgspec import Struct

from axon_nb.comm.shared_memory.segment import futex
from axon_nb.comm.shared_memory.segment.futex import copy

WORD = 8
_PAGE = 4096
_LINE = 64
"""Size of a cache line in bytes; words written by different ranks do not share one."""
SLOTS = 4
"""Maximum number of pieces of a rank's data in memory at a time; see docs/design/shared_memory.md."""
RING = 4
"""Maximum number of pieces of messages from one rank to another in memory at a time."""
_MAX_SLOT_BYTES, _MIN_SLOT_BYTES = 2 << 20, 256 << 10
_CROWDED_SLOT_BYTES = 4 << 20
"""Maximum size of a slot if ranks share processors: each piece costs a switch between them."""
_CHUNK_BYTES = 512 << 10
"""Maximum size of a chunk, which stays in the processor's cache from the writer to the readers."""
_SLOTS_BYTES = 64 << 20
"""Bytes for all slots together, unless slots would become too small."""
_MAX_PIECE_BYTES, _MIN_PIECE_BYTES = 256 << 10, 16 << 10
_MESSAGES_BYTES = 16 << 20
"""Bytes for all pairs together, unless pieces would become too small."""
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_HEADER, _HEADER_WORDS = 32 * WORD, 3
"""Where the first rank's control page holds the layout."""
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_LINE_WORDS = 8


def _rounded(size: int, unit: int = _PAGE) -> int:
    return -(-size // unit) * unit


def _process_fields(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def start_time(pid: int) -> int:
    """Start time of a process in the kernel's ticks; 0: there is no such process, or it is a zombie."""
    fields = _process_fields(pid)
    return 0 if not fields or fields[0] in ("Z", "X") else int(fields[19])


def process_state(pid: int) -> str:
    """State of a process, a letter as in /proc; empty: there is no such process."""
    return next(iter(_process_fields(pid)), "")


class Layout(Struct, frozen=True):
    """Offsets in bytes."""

    size: int
    """Number of ranks."""
    slot_bytes: int
    chunk_bytes: int
    """Bytes of a rank's data that a step of a collective moves if they do not fit into one slot."""
    piece_bytes: int

    @classmethod
    def of(cls, size: int, limit: int = 0, *, is_crowded: bool = False) -> Layout:
        """Return the layout for `size` ranks.

        Args:
            size: Number of ranks.
            limit: Maximum size of the memory in bytes; 0: the usual size. The result exceeds it if the smallest
                slots and pieces do not fit.
            is_crowded: Whether ranks share processors.
        """
        least = _rounded(size * (_LINE + 2 * WORD) + _LINE)  # a line for each rank, behind two numbers for each
        most, chunk = (_CROWDED_SLOT_BYTES, _CROWDED_SLOT_BYTES) if is_crowded else (_MAX_SLOT_BYTES, _CHUNK_BYTES)
        slot = min(most, max(_MIN_SLOT_BYTES, _SLOTS_BYTES // (size * SLOTS) // _PAGE * _PAGE))
        piece = min(_MAX_PIECE_BYTES, max(_MIN_PIECE_BYTES, _rounded(_MESSAGES_BYTES // (size * size * RING))))
        layout = cls(size, slot, min(slot, chunk), piece)
        while limit and layout.total > limit and (slot > least or piece > _PAGE):
            slot, piece = max(least, _rounded(slot // 2)), _rounded(piece // 2)
            layout = cls(size, slot, min(slot, chunk), piece)
        return layout

    @classmethod
    def read(cls, descriptor: int, size: int) -> Layout:
        """Return the layout that the creator of a file for `size` ranks chose."""
        header = os.pread(descriptor, _HEADER_WORDS * WORD, _HEADER)
        return cls(size, *struct.unpack(f"<{_HEADER_WORDS}q", header))

    def _write(self, descriptor: int) -> None:
        header = struct.pack(f"<{_HEADER_WORDS}q", self.slot_bytes, self.chunk_bytes, self.piece_bytes)
        os.pwrite(descriptor, header, _HEADER)

    def control(self, rank: int) -> int:
        """The control page of a rank."""
        return rank * _PAGE

    def sent(self, source: int, target: int) -> int:
        """Number of pieces that `source` has put into its ring to `target`; written by `source`."""
        return self._counters(source) + target * _LINE

    def taken(self, source: int, target: int) -> int:
        """Number of pieces that `target` has taken; written by `target`, followed by the message that it refused."""
        return self._counters(target) + (self.size + source) * _LINE

    def _counters(self, rank: int) -> int:
        return self.size * _PAGE + rank * _rounded(2 * self.size * _LINE)

    def slot(self, rank: int, number: int) -> int:
        """A slot of a rank."""
        return self._slots + (rank * SLOTS + number) * self.slot_bytes

    @property
    def _slots(self) -> int:
        return self._counters(self.size)

    def heads(self, source: int, target: int) -> int:
        """Headers of the pieces in the ring from `source` to `target`, one cache line each."""
        return self._rings + (source * self.size + target) * (_PAGE + RING * self.piece_bytes)

    def piece(self, source: int, target: int, number: int) -> int:
        """The bytes of a piece."""
        return self.heads(source, target) + _PAGE + number * self.piece_bytes

    @property
    def _rings(self) -> int:
        return self._slots + self.size * SLOTS * self.slot_bytes

    @property
    def total(self) -> int:
        """Size of the memory."""
        return self.heads(self.size, 0)


class SharedMemory:
    """The mapped memory of one group in one epoch.

    Args:
        descriptor: Descriptor of the file; not kept.
        layout: The layout of the memory.
    """

    def __init__(self, descriptor: int, layout: Layout) -> None:
        self.layout = layout
        # Python's own mapping of a file keeps a descriptor. So this maps anonymous memory and replaces its pages; they
        # are released with the last view.
        self.bytes = mmap.mmap(
            -1, layout.total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        anchor = ctypes.c_char.from_buffer(self.bytes)
        self.address = ctypes.addressof(anchor)
        del anchor
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (*(ctypes.c_void_p, ctypes.c_size_t), *(ctypes.c_int,) * 3, ctypes.c_long)
        flags = mmap.MAP_SHARED | _MAP_FIXED
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if libc.mmap(self.address, layout.total, protection, flags, descriptor, 0) == _FAILED:
            raise OSError(ctypes.get_errno(), f"cannot map {layout.total:,} bytes of shared memory")
        self.words = memoryview(self.bytes).cast("q")

    @staticmethod
    def create(layout: Layout) -> int:
        """Create a file for `layout`; return its descriptor, which the caller closes."""
        descriptor = os.memfd_create("axon_nb_group", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, layout.total)
            layout._write(descriptor)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @staticmethod
    def open(address: str) -> int:
        """Open the file at `address`, which `address_of` returned in another process; the caller closes the descriptor.

        Raises:
            OSError: it does not exist, or belongs to another user.
        """
        path, inode = address.rsplit(":", 1)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(descriptor).st_ino != int(inode):
            os.close(descriptor)
            raise OSError(f"{path} is a different file now")
        return descriptor

    @staticmethod
    def address_of(descriptor: int) -> str:
        """Address at which other processes of this user find the file while the descriptor is open."""
        return f"/proc/{os.getpid()}/fd/{descriptor}:{os.fstat(descriptor).st_ino}"


class Head(Struct, frozen=True):
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


class _Ring:
    """The messages of one rank to another.

    Args:
        memory: The group's memory.
        source: The rank that sends.
        target: The rank that receives.
    """

    def __init__(self, memory: SharedMemory, source: int, target: int) -> None:
        layout = memory.layout
        self._words = memory.words
        sent, taken = layout.sent(source, target), layout.taken(source, target)
        self._sent, self._taken = sent // WORD, taken // WORD
        self._sent_address, self._taken_address = memory.address + sent, memory.address + taken
        self._heads = layout.heads(source, target) // WORD
        self._pieces = [memory.address + layout.piece(source, target, number) for number in range(RING)]
        self.piece_bytes = layout.piece_bytes


class OutRing(_Ring):
    """The sender's side."""

    @property
    def bell(self) -> int:
        """Address of the word that changes when space becomes available."""
        return self._taken_address

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


class InRing(_Ring):
    """The receiver's side."""

    @property
    def bell(self) -> int:
        """Address of the word that changes when another piece arrives."""
        return self._sent_address

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
