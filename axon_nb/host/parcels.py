"""Bulk data between processes of one user on one host: anonymous files in memory that the notebook makes.

Linux's `memfd_create`: such a file has no name in any folder, so nothing can be left behind, whoever dies, and
the size of /dev/shm is no limit. The notebook alone holds it; a rank opens it through /proc, which the kernel allows to
processes of the same user only. Its pages are written once, sealed, and mapped privately: each process has a
copy of its own, page by page where it writes.

A parcel is a sequence of parts: how many, their sizes, then each at a multiple of 64 bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import sys
from collections.abc import Sequence
from typing import Any

from axon_nb.host.cores import usable_cores
from axon_nb.host.parcel_filling import fill

__all__ = ["Address", "Parcel", "ParcelUnreachable", "join_parts", "parcel_size", "read_parcel", "split_parts",
           "supported", "write_parcel"]  # fmt: skip

Address = tuple[str, int]
"""Where a process of the same user opens a parcel, and its inode: a number of a file that is gone may be used again."""

_ALIGN = 64
_MAPPED = 1 << 20
"""Smaller parcels are read, not mapped: a mapping of Python's takes a file descriptor as long as it lives."""


class ParcelUnreachable(Exception):
    """This process cannot open the parcel: it is on another host, in another container, or of another user."""


def supported() -> bool:
    """Whether this system has such files."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


class Parcel:
    """A parcel of this process; gone when it is closed and nobody maps it any more."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("axon_nb", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self._fd, 0o600)

    @property
    def address(self) -> Address:
        """Where ranks open it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}", os.fstat(self._fd).st_ino

    @property
    def empty(self) -> bool:
        """Whether nothing was written."""
        return not os.fstat(self._fd).st_size

    def write(self, parts: Sequence[Any]) -> None:
        """Write all parts, and seal them."""
        _write(self._fd, parts, writers=1)

    def read(self) -> list[memoryview]:
        """The parts, in memory that is this call's own."""
        return _read(self._fd)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)

    def __enter__(self) -> Parcel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_parcel(address: Address) -> list[memoryview]:
    """The parts of another process's parcel, in memory that is this call's own.

    Raises:
        ParcelUnreachable: see there.
    """
    fd = _open(address, os.O_RDONLY)
    try:
        return _read(fd)
    finally:
        os.close(fd)


def write_parcel(address: Address, parts: Sequence[Any], *, writers: int = 1) -> None:
    """Fill another process's parcel, and seal it.

    Args:
        address: The parcel.
        parts: What it is to hold.
        writers: How many processes of this host do so at the same time.

    Raises:
        ParcelUnreachable: see there.
    """
    fd = _open(address, os.O_RDWR)
    try:
        _write(fd, parts, writers=writers)
    finally:
        os.close(fd)


def _open(address: Address, flags: int) -> int:
    path, inode = address
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise ParcelUnreachable(f"{path}: {error.strerror}") from None
    if os.fstat(fd).st_ino != inode:
        os.close(fd)
        raise ParcelUnreachable(f"{path} is another file")
    return fd


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


def _write(fd: int, parts: Sequence[Any], *, writers: int) -> None:
    views = _views(parts)
    sizes = [view.nbytes for view in views]
    places, total = _places(sizes)
    helped = usable_cores() >= 2 * writers
    os.ftruncate(fd, total)
    os.pwrite(fd, _head(sizes), 0)
    for place, view in zip(places, views, strict=True):
        fill(fd, place, view, helped=helped)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)


def _read(fd: int) -> list[memoryview]:
    # Sealed: it can neither change below us nor be cut short, which would end this process with SIGBUS.
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("the parcel is not complete")
    size = os.fstat(fd).st_size
    if size >= _MAPPED:
        with contextlib.suppress(OSError):  # no file descriptor is free
            return split_parts(_map(fd, size))
    data = bytearray(size)
    if os.preadv(fd, [data], 0) != size:
        raise ValueError("the parcel is not complete")
    return split_parts(data)


def _map(fd: int, size: int) -> mmap.mmap:
    more: Any = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    return mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, **more)


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
