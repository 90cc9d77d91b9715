"""The memory of one group: an anonymous file that all its ranks map, and where in it everything stands.

The first rank makes the file and puts its address under /proc into the store; the kernel lets processes of the same
user open it. The file has no name, is sealed against changes of its size, and no rank keeps a descriptor: it is freed
with the last mapping. Pages come into being when they are first written, so that what a group never uses costs nothing.

Each rank writes only what is its own: its control page, its counters, its slots, and its rings of messages to others.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RING", "SLOTS", "WORD", "Layout", "SharedMemory", "start_time"]

WORD = 8
_PAGE = 4096
_LINE = 64
"""Bytes of a cache line: words that different ranks write do not share one."""
SLOTS = 4
"""Pieces of a rank's data that can be in the memory at a time; see docs/design/shared_memory.md."""
RING = 4
"""Pieces of messages from one rank to another that can be in the memory at a time."""
_MAX_SLOT_BYTES, _MIN_SLOT_BYTES = 4 << 20, 256 << 10
_SLOTS_BYTES = 64 << 20
"""For all slots together, where that leaves slots of a sensible size."""
_MAX_PIECE_BYTES, _MIN_PIECE_BYTES = 256 << 10, 16 << 10
_MESSAGES_BYTES = 16 << 20
"""For all pairs together, where that leaves pieces of a sensible size."""
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def _rounded(size: int, unit: int = _PAGE) -> int:
    return -(-size // unit) * unit


def start_time(pid: int) -> int:
    """When a process was started, in the kernel's ticks; 0: there is none, or it has ended and waits for its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes."""

    size: int
    """Number of ranks."""
    slot_bytes: int
    piece_bytes: int

    @classmethod
    def of(cls, size: int, limit: int = 0) -> Layout:
        """The layout for `size` ranks.

        Args:
            size: Number of ranks.
            limit: How many bytes the memory may have at most; 0: as is best.
        """
        slot = min(_MAX_SLOT_BYTES, max(_MIN_SLOT_BYTES, _SLOTS_BYTES // (size * SLOTS) // _PAGE * _PAGE))
        piece = min(_MAX_PIECE_BYTES, max(_MIN_PIECE_BYTES, _rounded(_MESSAGES_BYTES // (size * size * RING))))
        layout = cls(size, slot, piece)
        while limit and layout.total > limit and slot > _PAGE:
            slot, piece = max(_PAGE, slot // 2), max(_PAGE, piece // 2)
            layout = cls(size, slot, piece)
        return layout

    def control(self, rank: int) -> int:
        """The control page of a rank."""
        return rank * _PAGE

    def sent(self, source: int, target: int) -> int:
        """How many pieces `source` has put into its ring to `target`; written by `source`."""
        return self._counters(source) + target * _LINE

    def taken(self, source: int, target: int) -> int:
        """How many of them `target` has taken; written by `target`. Behind it: the message that it refused."""
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
        """What the pieces in the ring from `source` to `target` are: a cache line for each."""
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
        descriptor: Of the file; not kept.
        layout: Where things are.
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
        """A new file for `layout`: its descriptor, which the caller closes."""
        descriptor = os.memfd_create("axon_nb", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, layout.total)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @staticmethod
    def open(address: str) -> int:
        """A descriptor of the file at `address`, as `address_of` gave it in another process; the caller closes it.

        Raises:
            OSError: it is not there, or belongs to another user.
        """
        path, inode = address.rsplit(":", 1)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(descriptor).st_ino != int(inode):
            os.close(descriptor)
            raise OSError(f"{path} is a different file now")
        return descriptor

    @staticmethod
    def address_of(descriptor: int) -> str:
        """Where other processes of this user find the file while the descriptor is open."""
        return f"/proc/{os.getpid()}/fd/{descriptor}:{os.fstat(descriptor).st_ino}"
