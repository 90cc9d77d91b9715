"""Bulk data between processes of one user on one host: anonymous files in memory that the notebook makes.

Linux's `memfd_create`: such a file has no name in any folder, so nothing can be left behind, whoever dies, and
the size of /dev/shm is no limit. The notebook alone holds it; a rank opens it through /proc, which the kernel allows to
processes of the same user only. Its pages are written once, sealed, and mapped privately: each process has a
copy of its own, page by page where it writes.

A parcel is a sequence of parts: how many, their sizes, then each at a multiple of 64 bytes. It is one file, or two that
follow each other: see `host.parcel_filling`.

Files are objects of `FileIO` from the moment that they are open: an interrupt may come after any call, and one that is
only a number by then stays open for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from io import FileIO
from typing import Any

from axon_nb.host.cores import usable_cores
from axon_nb.host.parcel_filling import border_of, fill
from axon_nb.host.parcel_mapping import map_files

__all__ = ["Address", "Parcel", "ParcelUnreachable", "join_parts", "parcel_size", "read_parcel", "split_parts",
           "supported", "write_parcel"]  # fmt: skip

Address = tuple[tuple[str, int], tuple[str, int]]
"""Where a process of the same user opens a parcel's files, and their inodes: a number may be used again."""

_ALIGN = 64
_MAPPED = 1 << 20
"""Smaller parcels are read, not mapped, which takes longer for them."""
_NAMES, _FLAGS, _MODES = ("axon_nb",) * 2, (os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING,) * 2, ("r+",) * 2
"""Of its two files."""
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class ParcelUnreachable(Exception):
    """This process cannot open the parcel: it is on another host, in another container, or of another user."""


def supported() -> bool:
    """Whether this system has such files."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


class Parcel:
    """A parcel of this process; gone when it is closed and nobody maps it any more."""

    def __init__(self) -> None:
        # One call of C for both, see the module.
        self._files = tuple(map(FileIO, map(os.memfd_create, _NAMES, _FLAGS), _MODES))
        for file in self._files:
            os.fchmod(file.fileno(), 0o600)

    @property
    def address(self) -> Address:
        """Where ranks open it."""
        numbers = [file.fileno() for file in self._files]
        first, second = ((f"/proc/{os.getpid()}/fd/{fd}", os.fstat(fd).st_ino) for fd in numbers)
        return first, second

    @property
    def empty(self) -> bool:
        """Whether nothing was written."""
        return not os.fstat(self._files[0].fileno()).st_size

    def write(self, parts: Sequence[Any]) -> None:
        """Write all parts, and seal them."""
        _write(self._files, parts, writers=1)

    def read(self) -> list[memoryview]:
        """The parts, in memory that is this call's own."""
        return _read(self._files)

    def close(self) -> None:
        """Let go of it."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Parcel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_parcel(address: Address) -> list[memoryview]:
    """The parts of another process's parcel, in memory that is this call's own.

    Raises:
        ParcelUnreachable: see there.
    """
    with _opened(address, "r") as files:
        return _read(files)


def write_parcel(address: Address, parts: Sequence[Any], *, writers: int = 1) -> None:
    """Fill another process's parcel, and seal it.

    Args:
        address: The parcel.
        parts: What it is to hold.
        writers: How many processes of this host do so at the same time.

    Raises:
        ParcelUnreachable: see there.
    """
    with _opened(address, "r+") as files:
        _write(files, parts, writers=writers)


@contextlib.contextmanager
def _opened(address: Address, mode: str) -> Iterator[tuple[FileIO, ...]]:
    with _open(*address[0], mode) as first, _open(*address[1], mode) as second:
        yield first, second


def _open(path: str, inode: int, mode: str) -> FileIO:
    try:
        file = FileIO(path, mode)
    except OSError as error:
        raise ParcelUnreachable(f"{path}: {error.strerror}") from None
    if os.fstat(file.fileno()).st_ino != inode:
        file.close()
        raise ParcelUnreachable(f"{path} is another file")
    return file


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The offset of each part, and the size of the whole, in bytes."""
    places, end = [], 8 * (1 + len(sizes))
    for size in sizes:
        start = -(-end // _ALIGN) * _ALIGN
        places.append(start)
        end = start + size
    return places, end


def _views(parts: Sequence[Any]) -> list[memoryview]:
    return [memoryview(part).cast("B") for part in parts]


def parcel_size(parts: Sequence[Any]) -> int:
    """Bytes that a parcel of these parts takes."""
    return _places([view.nbytes for view in _views(parts)])[1]


def _head(sizes: Sequence[int]) -> bytes:
    return struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes)


def _write(files: tuple[FileIO, ...], parts: Sequence[Any], *, writers: int) -> None:
    first, second = (file.fileno() for file in files)
    views = _views(parts)
    sizes = [view.nbytes for view in views]
    places, total = _places(sizes)
    border = border_of(total, helped=usable_cores() >= 2 * writers)
    os.ftruncate(first, border)
    os.ftruncate(second, total - border)
    fill((first, second), [(0, memoryview(_head(sizes))), *zip(places, views, strict=True)], border)
    for fd in (first, second):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def _read(files: tuple[FileIO, ...]) -> list[memoryview]:
    numbers = [file.fileno() for file in files]
    # Sealed: it can neither change below us nor be cut short, which would end this process with SIGBUS.
    if not all(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK for fd in numbers):
        raise ValueError("the parcel is not complete")
    sized = [(fd, size) for fd in numbers if (size := os.fstat(fd).st_size)]
    total = sum(size for _, size in sized)
    if total >= _MAPPED:
        with contextlib.suppress(OSError):  # there is no room: says the read below
            return split_parts(map_files(sized))
    data, done = bytearray(total), 0
    for fd, size in sized:
        end = done + size
        while done < end:
            done += os.preadv(fd, [memoryview(data)[done:end]], size - (end - done))
    return split_parts(data)


def join_parts(parts: Sequence[Any]) -> bytearray:
    """The bytes of a parcel, for where memory is not shared."""
    views = _views(parts)
    sizes = [view.nbytes for view in views]
    places, total = _places(sizes)
    data = bytearray(total)
    head = _head(sizes)
    data[: len(head)] = head
    for place, view in zip(places, views, strict=True):
        data[place : place + view.nbytes] = view
    return data


def split_parts(data: Any) -> list[memoryview]:
    """The parts of a parcel's bytes, without a copy; what was empty gives none."""
    view = memoryview(data).cast("B")
    if not view.nbytes:
        return []
    (count,) = struct.unpack_from("<Q", view)
    sizes = struct.unpack_from(f"<{count}Q", view, 8)
    places, _ = _places(sizes)
    return [view[place : place + size] for place, size in zip(places, sizes, strict=True)]
