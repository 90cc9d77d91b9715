"""Two slots in the memory that outlives this rank: an allocator of that memory, and what says which slots are complete.

The file begins with a page that holds a header per slot. A header counts only if its number, which is written after
everything that it describes, is not 0. Before the memory of a slot is used again, the number becomes 0. So whenever the
process dies, a slot is complete or it does not exist.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from dataclasses import asdict, dataclass
from typing import Any

import torch

_PAGE = mmap.PAGESIZE
_HEADER_BYTES = 1024
_NUMBER = struct.Struct("<Q")
_LENGTHS = struct.Struct("<II")
"""Bytes and CRC-32 of the record."""
_CHUNK_BYTES = 64 << 20
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Header:
    """What one slot holds."""

    run: str
    """Id of the cell, the same on all its ranks."""
    fence: tuple[int, int]
    """In that cell, how often ranks had communicated between two steps, and the number of steps since."""
    step: int
    """Steps of the optimizer that has made most."""
    offset: int
    """Where the pickled structure lies in the file."""
    size: int
    """Its bytes."""
    checksum: int
    """Its CRC-32."""


class SlotMemory:
    """Allocates memory in the file of this rank; an `Allocator` of snapshots.

    The end of the file when this begins is kept, so that a replacement can copy what its predecessor left there first.

    Args:
        fd: The file.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._end = max(-(-os.fstat(fd).st_size // _PAGE) * _PAGE, _PAGE)
        os.ftruncate(fd, self._end)
        self._headers = mmap.mmap(fd, _PAGE)
        self._number = max(_NUMBER.unpack_from(self._headers, index * _HEADER_BYTES)[0] for index in (0, 1))
        self._before = range(_PAGE, self._end)
        self._chunk, self._used, self._chunk_offset = self._headers, _PAGE, 0
        self._places: dict[int, tuple[mmap.mmap, int, int, torch.Tensor]] = {}
        """By address of a buffer: its chunk, its position there, the chunk's offset in the file, and all of it."""
        self._free: dict[int, list[torch.Tensor]] = {}
        self._idle: set[int] = set()
        """Addresses of free buffers that may have pages."""

    def allocate(self, size: int) -> torch.Tensor:
        """See `Allocator`."""
        rounded = _size_class(size)
        if free := self._free.get(rounded):
            buffer = free.pop()
            self._idle.discard(buffer.data_ptr())
            return buffer[:size]
        if self._used + rounded > len(self._chunk):
            self._map(max(rounded, _CHUNK_BYTES))
        buffer = torch.frombuffer(self._chunk, dtype=torch.uint8, count=rounded, offset=self._used)
        self._places[buffer.data_ptr()] = self._chunk, self._used, self._chunk_offset, buffer
        self._used += rounded
        return buffer[:size]

    def _map(self, size: int) -> None:
        length = -(-size // _PAGE) * _PAGE
        os.ftruncate(self._fd, self._end + length)
        self._chunk, self._used, self._chunk_offset = mmap.mmap(self._fd, length, offset=self._end), 0, self._end
        self._end += length

    def release(self, buffer: torch.Tensor) -> None:
        """See `Allocator`."""
        whole = self._places[buffer.data_ptr()][-1]
        self._free.setdefault(whole.numel(), []).append(whole)
        self._idle.add(whole.data_ptr())

    def buffers(self) -> list[torch.Tensor]:
        """Return all buffers, also those that are free now."""
        return [whole for *_, whole in list(self._places.values())]

    def offset(self, buffer: torch.Tensor) -> int:
        """Return where in the file a buffer lies."""
        _, position, chunk_offset, _ = self._places[buffer.data_ptr()]
        return chunk_offset + position

    def write(self, data: bytes | bytearray) -> torch.Tensor:
        """Copy bytes into a buffer, at least one."""
        buffer = self.allocate(max(1, len(data)))
        if len(data):
            buffer[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        return buffer

    def invalidate(self, index: int) -> None:
        """Say that a slot is incomplete, before its memory is used again."""
        _NUMBER.pack_into(self._headers, index * _HEADER_BYTES, 0)

    def publish(self, index: int, header: Header) -> None:
        """Say that a slot, 0 or 1, is complete."""
        record, start = json.dumps(asdict(header)).encode(), index * _HEADER_BYTES
        begin = start + _NUMBER.size + _LENGTHS.size
        self._headers[begin : begin + len(record)] = record
        _LENGTHS.pack_into(self._headers, start + _NUMBER.size, len(record), zlib.crc32(record))
        self._number += 1
        _NUMBER.pack_into(self._headers, start, self._number)

    def forget_predecessor(self) -> None:
        """Give back the memory that the file held before this process used it."""
        if self._before:
            with mmap.mmap(self._fd, self._before.stop) as before:
                before.madvise(mmap.MADV_REMOVE, self._before.start, len(self._before))
            self._before = range(0)

    def trim(self) -> None:
        """Give the pages of free buffers back to the system."""
        for buffers in self._free.values():
            for buffer in buffers:
                if buffer.data_ptr() in self._idle:
                    chunk, position, *_ = self._places[buffer.data_ptr()]
                    first = -(-position // _PAGE) * _PAGE
                    last = (position + buffer.numel()) // _PAGE * _PAGE
                    if first < last:
                        chunk.madvise(mmap.MADV_REMOVE, first, last - first)
        self._idle.clear()

    def clear(self) -> None:
        """Invalidate both slots and give all memory back; buffers must not be used any more."""
        self.invalidate(0)
        self.invalidate(1)
        os.ftruncate(self._fd, 0)


def _size_class(size: int) -> int:
    """Round up by at most an eighth, so that buffers of similar sizes can replace each other."""
    step = max(_ALIGN, 1 << max(0, size.bit_length() - 4))
    return max(_ALIGN, -(-size // step) * step)


def read_headers(fd: int) -> dict[int, Header]:
    """Return the complete slots by index, the latest first."""
    page = os.pread(fd, _PAGE, 0)
    found = []
    for index in (0, 1):
        start = index * _HEADER_BYTES
        if len(page) < _PAGE or not (number := _NUMBER.unpack_from(page, start)[0]):
            continue
        length, checksum = _LENGTHS.unpack_from(page, start + _NUMBER.size)
        begin = start + _NUMBER.size + _LENGTHS.size
        record = page[begin : begin + length]
        if record and zlib.crc32(record) == checksum:
            found.append((number, index, _header(json.loads(record))))
    return {index: header for _, index, header in sorted(found, reverse=True, key=lambda one: one[0])}


def _header(fields: dict[str, Any]) -> Header:
    return Header(**{**fields, "fence": tuple(fields["fence"])})


def read_bytes(fd: int, offset: int, size: int) -> bytearray:
    """Read bytes of the file.

    Raises:
        ValueError: the file ends before.
    """
    data, done = bytearray(size), 0
    while done < size:
        count = os.preadv(fd, [memoryview(data)[done:]], offset + done)
        if not count:
            raise ValueError("the protected state is incomplete")
        done += count
    return data
