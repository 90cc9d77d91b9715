"""Wire format of the rendezvous store: a message is a list of byte strings, each preceded by its length."""

from __future__ import annotations

import socket
import struct

__all__ = ["MAX_MESSAGE", "Decoder", "encode", "receive"]

_HEAD = struct.Struct("<II")
_ITEM = struct.Struct("<I")
MAX_MESSAGE = 1 << 30
"""Largest message in bytes. A longer one is rejected: the peer does not speak our protocol."""


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
        EOFError: the peer closed the connection.
    """
    size, count = _HEAD.unpack(_exactly(sock, _HEAD.size))
    return _decode_body(_exactly(sock, size), count)


def _exactly(sock: socket.socket, size: int) -> bytes:
    chunks, left = [], size
    while left:
        chunk = sock.recv(min(left, 1 << 20))
        if not chunk:
            raise EOFError("the rendezvous store closed the connection")
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)
