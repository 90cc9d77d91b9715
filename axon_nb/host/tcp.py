"""The rendezvous store over TCP, for ranks on other hosts: on one named address, and only for who knows the key."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from axon_nb.host.framing import encode
from axon_nb.host.peers import Peer, StorePeer
from axon_nb.host.sealing import NONCE_SIZE, PROOF_SIZE, Handshake, Seal

__all__ = ["SealedStorePeer", "TcpListener"]

_GREETING_S = 10.0


class SealedStorePeer(StorePeer):
    """A rank's store client on another host; nothing it sends is read before it has proven that it knows the key."""

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        on_close: Callable[[Peer], None],
        handle: Callable[[list[bytes], Callable[[list[bytes]], None]], None],
        key: bytes,
    ) -> None:
        self._handshake = Handshake(key)
        self._answer_so_far = bytearray()
        self._seal: Seal | None = None
        self._since = time.monotonic()
        super().__init__(sock, selector, on_close, handle)
        self.send(self._handshake.challenge)

    @property
    def overdue(self) -> bool:
        """Whether it has had its time to prove itself, and has not."""
        return self._seal is None and time.monotonic() - self._since > _GREETING_S

    def received(self, data: bytes) -> None:
        """The greeting first, then messages."""
        if self._seal is None:
            self._answer_so_far += data
            if len(self._answer_so_far) < NONCE_SIZE + PROOF_SIZE:
                return
            answer, data = bytes(self._answer_so_far), b""
            proof, self._seal = self._handshake.check(answer)  # raises when it is wrong or too long, which closes
            self.send(proof)
        for message in self._decoder.feed(data):
            self._handle(self._seal.open(message), self._answer)

    def _answer(self, parts: list[bytes]) -> None:
        if self._seal is not None:
            self.send(encode(self._seal.close(parts)))


class TcpListener:
    """A listening TCP socket on one address.

    Args:
        ip: The address of this host on which it listens; no other.
        selector: The agent's.
        accept: Takes each connection.
    """

    def __init__(self, ip: str, selector: selectors.BaseSelector, accept: Callable[[socket.socket], Any]) -> None:
        self.sock = socket.create_server((ip, 0), backlog=128)
        self.sock.setblocking(False)
        self._accept = accept
        selector.register(self.sock, selectors.EVENT_READ, self.on_ready)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.sock.getsockname()[1])

    def on_ready(self, mask: int) -> None:
        """Take one connection."""
        with contextlib.suppress(OSError):
            connection, _ = self.sock.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._accept(connection)
