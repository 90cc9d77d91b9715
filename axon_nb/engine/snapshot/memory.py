"""Copies of storages: where they lie, which are still equal to the storage, and how they are written back.

A version counter says that a tensor has changed, never that it has not: `.data`, NumPy arrays and foreign libraries
write without it. So a storage whose counters have moved is copied, and any other one is compared with its last copy.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from msgspec import Struct

from axon_nb.host.resources import free_memory

_CHUNK_BYTES = 64 << 20
"""What is on a device is compared in pieces of this size, which are uploaded one by one."""

_UNKNOWN_BYTES = 2 << 30
"""Taken for the free memory where nothing says how much there is."""


def default_limit() -> int:
    """Return how many bytes a snapshot may take unless the user says: half of the memory that is free."""
    return (free_memory() or _UNKNOWN_BYTES) // 2


class Allocator(Protocol):
    """Supplies the memory of copies."""

    def allocate(self, size: int) -> torch.Tensor:
        """Return `size` bytes of host memory, uint8 ``[size]``."""

    def release(self, buffer: torch.Tensor) -> None:
        """Take back what `allocate` returned."""


class HostMemory:
    """Memory of this process; released buffers are used again, because new pages cost more time than the copies.

    Args:
        is_pinned: Whether the memory is page-locked, which CUDA copies to several times faster.
    """

    def __init__(self, *, is_pinned: bool = False) -> None:
        self._is_pinned = is_pinned
        self._free: dict[int, list[torch.Tensor]] = {}
        self.used = 0
        """Bytes of the buffers that are not released."""

    def allocate(self, size: int) -> torch.Tensor:
        """See `Allocator`."""
        self.used += size
        if free := self._free.get(size):
            return free.pop()
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._is_pinned)

    def release(self, buffer: torch.Tensor) -> None:
        """See `Allocator`."""
        self.used -= buffer.numel()
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def trim(self, size: int) -> None:
        """Give released buffers back to the system until at most `size` bytes are left."""
        kept = sum(buffer.numel() for buffers in self._free.values() for buffer in buffers)
        for buffers in self._free.values():
            while buffers and kept > size:
                kept -= buffers.pop().numel()


class Copy(Struct):
    """The content of a storage at one time; several snapshots share it if the storage did not change in between."""

    buffer: torch.Tensor
    """uint8 ``[bytes]`` in host memory."""
    versions: frozenset[int]
    """The version counters of its tensors; empty if it has none."""
    users: int
    """The number of snapshots with this copy."""


class StorageFacts(Struct):
    """A storage that belongs to the state."""

    storage: Any
    """torch's UntypedStorage, or one over the memory of a NumPy array."""
    size: int
    """Bytes at the time of the snapshot."""
    versions: set[int]
    copy: Copy | None = None
    """None: not copied yet, or there are no bytes."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Device, address and size, which only views of the same memory share while this one is alive."""
        return _name(self.storage.device), self.storage.data_ptr(), self.size

    def is_unchanged(self, copy: Copy) -> bool:
        """Whether its content equals an earlier copy."""
        return copy.versions == self.versions and equal(self.storage, copy.buffer)

    def save(self, allocator: Allocator) -> Copy:
        """Copy its content, for one snapshot."""
        buffer = allocator.allocate(self.size)
        if self.storage.device.type == "cpu":  # for the many small tensors of a model, `copy_` takes ten times as long
            ctypes.memmove(buffer.data_ptr(), self.storage.data_ptr(), self.size)
        else:
            buffer.copy_(bytes_of(self.storage), non_blocking=buffer.is_pinned())
        self.copy = Copy(buffer, frozenset(self.versions), users=1)
        return self.copy


def storage_key(storage: Any) -> tuple[str, int, int]:
    """Return device, address and size of a storage, which only views of the same memory share while it is alive."""
    return _name(storage.device), storage.data_ptr(), storage.nbytes()


@functools.cache
def _name(device: torch.device) -> str:
    return str(device)


def bytes_of(storage: Any) -> torch.Tensor:
    """Return a storage as uint8 ``[bytes]``."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def equal(storage: Any, buffer: torch.Tensor) -> bool:
    """Whether a storage holds the same bytes as a buffer in host memory, uint8 ``[bytes]``."""
    if storage.nbytes() != buffer.numel():
        return False
    if storage.device.type == "cpu":
        return _compare()(storage.data_ptr(), buffer.data_ptr(), buffer.numel()) == 0
    pieces = zip(bytes_of(storage).split(_CHUNK_BYTES), buffer.split(_CHUNK_BYTES), strict=True)
    return all(torch.equal(ours, theirs.to(ours.device)) for ours, theirs in pieces)


@functools.cache
def _compare() -> Callable[[int, int, int], int]:
    """Return C's `memcmp`: for the many small tensors of a model, `torch.equal` takes ten times as long."""
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes, compare.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int
    return compare


def write_back(saved: Iterable[StorageFacts]) -> list[str]:
    """Write the copies into their storages; those that are equal are not written, for their memory may be read-only.

    Returns:
        A line for each storage that refused its content, such as one that has another size now and belongs to NumPy.
    """
    refused = []
    for facts in saved:
        storage = facts.storage
        try:
            if storage.nbytes() != facts.size:
                storage.resize_(facts.size)
            if facts.copy is not None and not equal(storage, facts.copy.buffer):
                bytes_of(storage).copy_(facts.copy.buffer)
        except RuntimeError as error:
            refused.append(f"a storage of {facts.size} bytes: {error}")
    return refused
