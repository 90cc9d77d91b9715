"""Anonymous memory files: bulk data between processes of one user on one host, and memory that outlives a rank.

The files come from Linux's `memfd_create`. They have no path, so nothing is left behind when a process dies, and the
size of /dev/shm does not matter. Only the notebook holds blocks open; a rank opens them through /proc, which the kernel
allows for processes of the same user only. Pages are written once, sealed, and mapped copy-on-write.

A block is a sequence of parts: their number, their sizes, then each part at a multiple of 64 bytes. It is one file, or
two consecutive ones. Most of the time to fill it goes into allocating a page for every 4 KiB, and writes to one file
are serialised. So large data is split over two files, each written by its own thread. Several files are mapped as one
contiguous, copy-on-write memory region.

Files are `FileIO` objects from the moment they are opened: an interrupt may come after any call, and a bare file
descriptor would then stay open forever.

Memory that outlives a rank is one file per rank, which the host agent opens before it forks the rank. A rank inherits
the descriptor, and so does its replacement after a death. Nobody else can open the file, and when the agent exits
nothing is left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from axon_nb.host.resources import usable_cores

_MAP_FIXED = 0x10
"""From Linux's <sys/mman.h>, the same on every architecture that torch supports; Python does not define it."""
_FAILED = ctypes.c_void_p(-1).value
BlockAddress = tuple[tuple[str, int], tuple[str, int]]
"""Paths at which a process of the same user opens the block's files, with their inodes: descriptors get reused."""
_ALIGN = 64
_MIN_MAPPED_BYTES = 1 << 20
"""Smaller blocks are read, which is faster than mapping them."""
_NAMES, _FLAGS, _MODES = ("axon_nb",) * 2, (os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING,) * 2, ("r+",) * 2
"""Arguments for the two files."""
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_CHUNK = 16 << 20
"""Bytes per write: interrupts are handled between two writes."""
_MIN_SPLIT_BYTES = 32 << 20
"""Less than this is not worth a second thread."""
_Piece = tuple[int, memoryview]
_NAME = "axon_nb-kept-memory-{rank}"


def map_files(files: Sequence[tuple[int, int]]) -> mmap.mmap:
    """Map all files as one contiguous region; none of them has to stay open.

    Python's own `mmap` maps a single file and keeps a duplicate file descriptor. So this maps anonymous memory and
    replaces its pages; they are released with the last view.

    Args:
        files: File descriptor and size in bytes of each; all sizes but the last are multiples of the page size.

    Raises:
        OSError: not enough address space.
    """
    kind, protection = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    mapped = mmap.mmap(-1, sum(size for _, size in files), flags=kind | mmap.MAP_ANONYMOUS, prot=protection)
    anchor = ctypes.c_char.from_buffer(mapped)
    start = ctypes.addressof(anchor)
    del anchor  # its export would keep the mapping from being closed
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (*(ctypes.c_void_p, ctypes.c_size_t), *(ctypes.c_int,) * 3, ctypes.c_long)
    for fd, size in files:
        if libc.mmap(start, size, protection, kind | _MAP_FIXED, fd, 0) == _FAILED:
            number = ctypes.get_errno()
            mapped.close()
            raise OSError(number, "cannot map the shared block")
        start += size
    return mapped


class SharedBlockUnavailableError(Exception):
    """The block cannot be opened: the processes differ in host, container or user."""


def memfd_supported() -> bool:
    """Whether this system has `memfd_create`."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


class SharedBlock:
    """A shared-memory block of this process, freed when it is closed and no longer mapped."""

    def __init__(self) -> None:
        # A single C call for both files, see the module's docstring.
        self._files = tuple(map(FileIO, map(os.memfd_create, _NAMES, _FLAGS), _MODES))
        for file in self._files:
            os.fchmod(file.fileno(), 0o600)

    @property
    def address(self) -> BlockAddress:
        """Where ranks open the files."""
        descriptors = [file.fileno() for file in self._files]
        first, second = ((f"/proc/{os.getpid()}/fd/{fd}", os.fstat(fd).st_ino) for fd in descriptors)
        return first, second

    @property
    def empty(self) -> bool:
        """Whether nothing has been written."""
        return not os.fstat(self._files[0].fileno()).st_size

    def write(self, parts: Sequence[Any]) -> None:
        """Write all parts and seal the files."""
        _write(self._files, parts, writers=1)

    def read(self) -> list[memoryview]:
        """Return the parts, in memory private to this call."""
        return _read(self._files)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def __enter__(self) -> SharedBlock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_block(address: BlockAddress) -> list[memoryview]:
    """Return the parts of another process's block, in memory private to this call.

    Raises:
        SharedBlockUnavailableError: this process cannot open the block.
    """
    with _opened(address, "r") as files:
        return _read(files)


def write_block(address: BlockAddress, parts: Sequence[Any], *, writers: int = 1) -> None:
    """Write another process's block and seal it.

    Args:
        address: The block.
        parts: The parts, as buffers.
        writers: How many processes on this host write blocks at the same time.

    Raises:
        SharedBlockUnavailableError: this process cannot open the block.
    """
    with _opened(address, "r+") as files:
        _write(files, parts, writers=writers)


@contextlib.contextmanager
def _opened(address: BlockAddress, mode: str) -> Iterator[tuple[FileIO, ...]]:
    with _open(*address[0], mode) as first, _open(*address[1], mode) as second:
        yield first, second


def _open(path: str, inode: int, mode: str) -> FileIO:
    try:
        file = FileIO(path, mode)
    except OSError as error:
        raise SharedBlockUnavailableError(f"{path}: {error.strerror}") from None
    if os.fstat(file.fileno()).st_ino != inode:
        file.close()
        raise SharedBlockUnavailableError(f"{path} is now a different file")
    return file


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offset of each part and total size, in bytes."""
    offsets, end = [], 8 * (1 + len(sizes))
    for size in sizes:
        start = -(-end // _ALIGN) * _ALIGN
        offsets.append(start)
        end = start + size
    return offsets, end


def _views(parts: Sequence[Any]) -> list[memoryview]:
    return [memoryview(part).cast("B") for part in parts]


def block_size(parts: Sequence[Any]) -> int:
    """Size in bytes of a block with these parts."""
    return _offsets([view.nbytes for view in _views(parts)])[1]


def _header(sizes: Sequence[int]) -> bytes:
    return struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes)


def _write(files: tuple[FileIO, ...], parts: Sequence[Any], *, writers: int) -> None:
    first, second = (file.fileno() for file in files)
    views = _views(parts)
    sizes = [view.nbytes for view in views]
    offsets, total = _offsets(sizes)
    split = split_point(total, two_threads=usable_cores() >= 2 * writers)
    os.ftruncate(first, split)
    os.ftruncate(second, total - split)
    copy_into((first, second), [(0, memoryview(_header(sizes))), *zip(offsets, views, strict=True)], split)
    for fd in (first, second):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def _read(files: tuple[FileIO, ...]) -> list[memoryview]:
    descriptors = [file.fileno() for file in files]
    # Sealed, so that the files can neither change nor be truncated, which would kill this process with SIGBUS.
    if not all(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK for fd in descriptors):
        raise ValueError("the shared block is incomplete")
    sized = [(fd, size) for fd in descriptors if (size := os.fstat(fd).st_size)]
    total = sum(size for _, size in sized)
    if total >= _MIN_MAPPED_BYTES:
        with contextlib.suppress(OSError):  # out of address space or memory: the read below reports it
            return split_parts(map_files(sized))
    data, done = bytearray(total), 0
    for fd, size in sized:
        end = done + size
        while done < end:
            done += os.preadv(fd, [memoryview(data)[done:end]], size - (end - done))
    return split_parts(data)


def join_parts(parts: Sequence[Any]) -> bytearray:
    """Return the content of a block as bytes, for processes that share no memory."""
    views = _views(parts)
    sizes = [view.nbytes for view in views]
    offsets, total = _offsets(sizes)
    data = bytearray(total)
    header = _header(sizes)
    data[: len(header)] = header
    for offset, view in zip(offsets, views, strict=True):
        data[offset : offset + view.nbytes] = view
    return data


def split_parts(data: Any) -> list[memoryview]:
    """Return the parts in a block's bytes, without copying; empty bytes have no parts."""
    view = memoryview(data).cast("B")
    if not view.nbytes:
        return []
    (count,) = struct.unpack_from("<Q", view)
    sizes = struct.unpack_from(f"<{count}Q", view, 8)
    offsets, _ = _offsets(sizes)
    return [view[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]


def split_point(size: int, *, two_threads: bool) -> int:
    """Return how many bytes go into the first file; the rest goes into the second one.

    Args:
        size: Total bytes.
        two_threads: Whether there is a core for a second thread. On a core shared with others it costs almost nothing.
    """
    if not two_threads or size < _MIN_SPLIT_BYTES:
        return size
    page = os.sysconf("SC_PAGE_SIZE")
    return size // 2 // page * page


def copy_into(files: tuple[int, int], pieces: Sequence[_Piece], split: int) -> None:
    """Write all pieces into the two files.

    Args:
        files: Two file descriptors, each file already at its final length.
        pieces: Each piece's offset in bytes from the start of the first file, and its data.
        split: Offset at which the second file begins.
    """
    first = [(offset, view[: max(0, split - offset)]) for offset, view in pieces if offset < split]
    second = [
        (max(0, offset - split), view[max(0, split - offset) :])
        for offset, view in pieces
        if offset + view.nbytes > split
    ]
    if not second:
        _fill(files[0], first)
        return
    # Its own file object: after an interrupt here the thread can never write to a reused file descriptor.
    writer = _Writer(FileIO(f"/proc/self/fd/{files[1]}", "r+"), second)
    try:
        writer.start()
        _fill(files[0], first)
    except BaseException:
        writer.stop()
        raise
    writer.result()


def _fill(fd: int, pieces: Sequence[_Piece], stopped: threading.Event | None = None) -> None:
    for offset, view in pieces:
        done = 0
        while done < view.nbytes and not (stopped is not None and stopped.is_set()):
            done += os.pwrite(fd, view[done : done + _CHUNK], offset + done)


class _Writer(threading.Thread):
    """Thread that writes the second file."""

    def __init__(self, file: FileIO, pieces: Sequence[_Piece]) -> None:
        super().__init__(name="axon_nb-shared-block", daemon=True)
        self._file = file
        self._pieces = pieces
        self._stopped = threading.Event()
        self._error: OSError | None = None

    def run(self) -> None:
        """Write the pieces."""
        if self._stopped.is_set():
            return
        try:
            with self._file:
                _fill(self._file.fileno(), self._pieces, self._stopped)
        except OSError as error:  # such as out of memory
            self._error = error

    def stop(self) -> None:
        """Stop and wait for the thread, so that the caller may release the memory it reads."""
        self._stopped.set()
        while self.ident is not None:
            try:
                self.join()
                return
            except RuntimeError:  # it runs, but has not said so yet: an interrupt came while `start` waited for that
                time.sleep(0)
        # Not started, and will do nothing. Python keeps a thread whose start was interrupted, so release its data.
        self._file.close()
        self._pieces = ()

    def result(self) -> None:
        """Wait until everything is written.

        Raises:
            OSError: writing failed.
        """
        try:
            self.join()
        except BaseException:  # an interrupt
            self.stop()
            raise
        if self._error is not None:
            raise self._error


class KeptMemory:
    """The files of all ranks that this agent has forked. An empty one takes no memory."""

    def __init__(self) -> None:
        self._files: dict[int, FileIO] = {}

    def prepare(self, rank: int) -> None:
        """Create the file of a rank, unless there is one. Without it the rank works, and cannot be protected."""
        if rank not in self._files and hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):  # too many open files
                self._files[rank] = FileIO(os.memfd_create(_NAME.format(rank=rank), os.MFD_CLOEXEC), "r+")

    def of_others(self, rank: int) -> list[FileIO]:
        """Return the files that a new process for this rank closes."""
        return [file for other, file in self._files.items() if other != rank]


def find_kept_memory(rank: int) -> int | None:
    """Return the descriptor that this process, a rank, has inherited; None: there is none."""
    name = f"/memfd:{_NAME.format(rank=rank)} (deleted)"
    with contextlib.suppress(FileNotFoundError):  # not Linux
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the one that lists the folder
                if os.readlink(entry) == name:
                    return int(entry.name)
    return None
