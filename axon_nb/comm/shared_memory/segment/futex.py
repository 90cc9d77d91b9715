"""Waiting on words of shared memory with Linux's futex, and copying between addresses, through ctypes.

A word has 64 bits; the kernel compares the lower half. Every wait may return early, so callers check again and ignore
the return value.

Memory order: a rank writes data first and its progress word afterwards, and reads them in the opposite order. x86-64
keeps the order of stores and of loads (total store order), also in `memmove`: glibc ends non-temporal copies with a
fence. Other processors need barriers. `fence` is one: it releases and acquires a lock, and on aarch64 a store-release
followed by a load-acquire is ordered with everything before and after.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import sys
import threading
import time
from collections.abc import Sequence

NEEDS_FENCE = platform.machine() not in ("x86_64", "AMD64")
"""Whether this processor may reorder plain stores or plain loads."""

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
_FUTEX_WAITV = 449
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF
_LOW = 0xFFFFFFFF
_SIZE_U32 = 2
_MAX_WORDS = 128
_POLL_S = 0.0005
_SMALL_BYTES = 1 << 14
"""Copies up to this size keep the interpreter lock, because getting it back would take longer than the copy."""
_CLOCK_MONOTONIC = 1
_libc = ctypes.CDLL(None, use_errno=True)
_quick = ctypes.PyDLL(None)  # keeps the interpreter lock

_long, _pointer = ctypes.c_long, ctypes.c_void_p
_wait_call = _libc["syscall"]
_wait_call.argtypes = (_long, _pointer, _long, ctypes.c_uint32, _pointer)
_wait_call.restype = _long
_waitv_call = _libc["syscall"]
_waitv_call.argtypes = (_long, _pointer, ctypes.c_uint, ctypes.c_uint, _pointer, ctypes.c_int)
_waitv_call.restype = _long
_wake_call = _quick["syscall"]
_wake_call.argtypes = (_long, _pointer, _long, _long)
_wake_call.restype = _long
_move = _libc["memmove"]
_move.argtypes = (_pointer, _pointer, ctypes.c_size_t)
_move.restype = _pointer
_quick_move = _quick["memmove"]
_quick_move.argtypes = (_pointer, _pointer, ctypes.c_size_t)
_quick_move.restype = _pointer

_barrier = threading.local()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Waiter(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


def is_supported() -> bool:
    """Whether this system has futexes and anonymous memory files that this process may use."""
    return sys.platform == "linux" and _FUTEX != 0 and sys.byteorder == "little"


@functools.lru_cache(16)
def _slice(seconds: float) -> _Timespec:
    """Return the time of a wait, of which there are few different ones."""
    return _relative(seconds)


@functools.cache
def _has_waitv() -> bool:
    """Whether the kernel has `futex_waitv`, and this process may use it; without words it fails otherwise."""
    return _waitv_call(_FUTEX_WAITV, None, 0, 0, None, 0) < 0 and ctypes.get_errno() == errno.EINVAL


def _relative(seconds: float) -> _Timespec:
    whole = int(seconds)
    return _Timespec(whole, int((seconds - whole) * 1e9))


def wait(address: int, value: int, seconds: float) -> None:
    """Sleep until the word at `address` differs from `value`, a wake-up or a signal arrives, or the time is over.

    Args:
        address: Address of a 64-bit word in shared memory.
        value: The value that the caller read.
        seconds: Maximum time to sleep.
    """
    _wait_call(_FUTEX, address, _WAIT, value & _LOW, ctypes.byref(_slice(seconds)))


def wake(address: int) -> None:
    """Wake all waiters on the word at `address`, in any process."""
    _wake_call(_FUTEX, address, _WAKE, _EVERYBODY)


def wait_any(words: Sequence[tuple[int, int]], seconds: float) -> None:
    """Like `wait`, for several words: (address, value) of each. Polls on kernels before 5.16."""
    if not _has_waitv() or len(words) > _MAX_WORDS:
        time.sleep(min(seconds, _POLL_S))
        return
    waiters = (_Waiter * len(words))(*(_Waiter(value & _LOW, address, _SIZE_U32, 0) for address, value in words))
    end = _relative(time.monotonic() + seconds)
    # It may be interrupted or time out, or a word changed already: the caller checks again.
    _waitv_call(_FUTEX_WAITV, waiters, len(words), 0, ctypes.byref(end), _CLOCK_MONOTONIC)


def fence() -> None:
    """Run a full memory barrier on the calling thread; see the module."""
    lock = getattr(_barrier, "lock", None)
    if lock is None:
        lock = _barrier.lock = threading.Lock()
        lock.acquire()
    lock.release()
    lock.acquire()


def copy(target: int, source: int, size: int) -> None:
    """Copy `size` bytes between two addresses."""
    if size > _SMALL_BYTES:
        _move(target, source, size)
    elif size:
        _quick_move(target, source, size)
