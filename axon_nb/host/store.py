"""Server side of the rendezvous store, run by the agent's event loop without threads or torch; and its wire format.

A message is a list of byte strings, each preceded by its length.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Protocol

from msgspec import Struct

_HEAD = struct.Struct("<II")
_ITEM = struct.Struct("<I")
MAX_MESSAGE = 1 << 30
"""Largest message in bytes. A longer one is rejected: the peer does not speak our protocol."""


class Reply(Protocol):
    """Sends one reply to the requesting client."""

    def __call__(self, parts: list[bytes], /) -> None: ...


class _Waiter(Struct):
    keys: list[bytes]
    deadline: float
    reply: Reply


class StoreServer:
    """Keys and values behind a `torch.distributed.Store`: set, add, compare-and-set, append, delete, wait.

    A wait has a timeout in milliseconds and gets the values, or an empty reply when it expires. Clients wait in short
    slices, so that interrupts are handled between two of them.
    """

    def __init__(self) -> None:
        self._table: dict[bytes, bytes] = {}
        self._waiters: list[_Waiter] = []

    def handle(self, message: list[bytes], reply: Reply) -> None:
        """Execute one request and reply: at once, or for a wait when all its keys exist."""
        command, args = message[0], message[1:]
        if command == b"wait":
            self._wait(args, reply)
            return
        changed, answer = self._apply(command, args)
        reply(answer)
        if changed:
            self._wake()

    def _apply(self, command: bytes, args: list[bytes]) -> tuple[bool, list[bytes]]:
        table = self._table
        match command:
            case b"set":
                for key, value in zip(args[::2], args[1::2], strict=True):
                    table[key] = value
                return True, [b""]
            case b"add":
                total = b"%d" % (int(table.get(args[0], b"0")) + int(args[1]))
                table[args[0]] = total
                return True, [total]
            case b"compare_set":
                key, expected, desired = args
                current = table.get(key)
                if current == expected or (current is None and not expected):
                    table[key] = desired
                    return True, [desired]
                return False, [expected if current is None else current]
            case b"append":
                table[args[0]] = table.get(args[0], b"") + args[1]
                return True, [b""]
            case b"delete":
                return False, [b"1" if table.pop(args[0], None) is not None else b"0"]
            case b"delete_prefix":
                matching = [key for key in table if key.startswith(args[0])]
                for key in matching:
                    del table[key]
                return False, [b"%d" % len(matching)]
            case b"check":
                return False, [b"1" if all(key in table for key in args) else b"0"]
            case b"count":
                return False, [b"%d" % len(table)]
        return False, []

    def _wait(self, args: list[bytes], reply: Reply) -> None:
        keys = args[1:]
        if all(key in self._table for key in keys):
            reply([self._table[key] for key in keys])
        else:
            self._waiters.append(_Waiter(keys, time.monotonic() + int(args[0]) / 1000, reply))

    def _wake(self) -> None:
        waiting = []
        for waiter in self._waiters:
            if all(key in self._table for key in waiter.keys):
                waiter.reply([self._table[key] for key in waiter.keys])
            else:
                waiting.append(waiter)
        self._waiters = waiting

    def expire(self, now: float) -> float | None:
        """Reply to expired waits; return when the next one expires, in `time.monotonic` seconds."""
        waiting = []
        for waiter in self._waiters:
            if waiter.deadline <= now:
                waiter.reply([])
            else:
                waiting.append(waiter)
        self._waiters = waiting
        return min((waiter.deadline for waiter in waiting), default=None)


def encode(parts: list[bytes]) -> bytes:
    """Encode one message: total length and number of parts, then each part preceded by its length."""
    body = b"".join(_ITEM.pack(len(part)) + part for part in parts)
    return _HEAD.pack(len(body), len(parts)) + body


def _decode_body(body: bytes | memoryview, count: int) -> list[bytes]:
    parts: list[bytes] = []
    at = 0
    for _ in range(count):
        if at + _ITEM.size > len(body):
            raise ValueError(f"truncated store message: part {len(parts)} is missing")
        (size,) = _ITEM.unpack_from(body, at)
        at += _ITEM.size
        if at + size > len(body):
            raise ValueError(f"invalid store message: part {len(parts)} is longer than the message")
        parts.append(bytes(body[at : at + size]))
        at += size
    if at != len(body):
        raise ValueError(f"invalid store message: {len(body) - at} bytes after the last part")
    return parts


class Decoder:
    """Splits a byte stream that arrives in chunks into messages."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Return the messages that `data` completes, in order.

        Raises:
        ValueError: the bytes are not a valid message.
        """
        self._pending += data
        messages = []
        while len(self._pending) >= _HEAD.size:
            size, count = _HEAD.unpack_from(self._pending)
            if size > MAX_MESSAGE:
                raise ValueError(f"store message of {size} bytes exceeds the limit of {MAX_MESSAGE}")
            end = _HEAD.size + size
            if len(self._pending) < end:
                break
            messages.append(_decode_body(bytes(self._pending[_HEAD.size : end]), count))
            del self._pending[:end]
        return messages


def receive(sock: socket.socket) -> list[bytes]:
    """Read one message from a blocking socket.

    Raises:
        ConnectionError: the peer closed the connection.
    """
    closed = "the rendezvous store closed the connection"
    size, count = _HEAD.unpack(exactly(sock, _HEAD.size, closed))
    return _decode_body(exactly(sock, size, closed), count)


def exactly(sock: socket.socket, size: int, closed: str) -> bytes:
    """Read `size` bytes from a blocking socket.

    Raises:
        ConnectionError: the peer closed the connection; the message is `closed`.
    """
    chunks, left = [], size
    while left:
        chunk = sock.recv(min(left, 1 << 20))
        if not chunk:
            raise ConnectionError(closed)
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)
