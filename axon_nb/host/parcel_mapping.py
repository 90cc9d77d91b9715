"""Mapping several files as one contiguous, copy-on-write memory region."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

__all__ = ["map_files"]

_MAP_FIXED = 0x10
"""From Linux's <sys/mman.h>, the same on every architecture that torch supports; Python does not define it."""
_FAILED = ctypes.c_void_p(-1).value


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
