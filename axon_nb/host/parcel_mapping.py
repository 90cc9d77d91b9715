"""Files that follow each other in memory, as if they were one, copied page by page where this process writes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

__all__ = ["map_files"]

_MAP_FIXED = 0x10
"""Of Linux' <sys/mman.h>, on every architecture that torch is built for; Python does not have it."""
_FAILED = ctypes.c_void_p(-1).value


def map_files(files: Sequence[tuple[int, int]]) -> mmap.mmap:
    """One stretch of memory over all files; none of them has to stay open.

    Python's own mapping has room for one file only, and keeps a file descriptor of it. So this is one of no file, whose
    pages are replaced: it gives them back when nobody has a view of it any more.

    Args:
        files: Each one's file descriptor and its size in bytes; of all but the last a multiple of a page's.

    Raises:
        OSError: there is no room for it.
    """
    kind, protection = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    mapped = mmap.mmap(-1, sum(size for _, size in files), flags=kind | mmap.MAP_ANONYMOUS, prot=protection)
    anchor = ctypes.c_char.from_buffer(mapped)
    start = ctypes.addressof(anchor)
    del anchor  # while it lives the mapping could not be closed
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (*(ctypes.c_void_p, ctypes.c_size_t), *(ctypes.c_int,) * 3, ctypes.c_long)
    for fd, size in files:
        if libc.mmap(start, size, protection, kind | _MAP_FIXED, fd, 0) == _FAILED:
            number = ctypes.get_errno()
            mapped.close()
            raise OSError(number, "a parcel cannot be mapped")
        start += size
    return mapped
