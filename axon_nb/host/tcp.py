"""The rendezvous store over TCP for ranks on other hosts: one address, and only for clients that know the key."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from axon_nb.host.framing import encode
from axon_nb.host.peers import Connection, StoreConnection
from axon_nb.host.sealing import NONCE_SIZE, PROOF_SIZE, Handshake, MessageSigner

__all__ = ["AuthenticatedStoreConnection", "TcpListener"]

_HANDSHAKE_TIMEOUT_S = 10.0


class AuthenticatedStoreConnection(StoreConnection):
    """Connection of a rank on another host; its messages are read only after it has proven that it knows the key."""

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        on_close: Callable[[Connection], None],
        handle: Callable[[list[bytes], Callable[[list[bytes]], None]], None],
        key: bytes,
    ) -> None:
        self._handshake = Handshake(key)
        self._handshake_bytes = bytearray()
        self._signer: MessageSigner | None = None
        self._since = time.monotonic()
        super().__init__(sock, selector, on_close, handle)
        self.send(self._handshake.challenge)

    @property
    def overdue(self) -> bool:
        """Whether the client failed to authenticate in time."""
        return self._signer is None and time.monotonic() - self._since > _HANDSHAKE_TIMEOUT_S

    def received(self, data: bytes) -> None:
        """Complete the handshake, then answer messages."""
        if self._signer is None:
            self._handshake_bytes += data
            if len(self._handshake_bytes) < NONCE_SIZE + PROOF_SIZE:
                return
            answer, data = bytes(self._handshake_bytes), b""
            proof, self._signer = self._handshake.check(
                answer
            )  # raises if wrong or too long, which closes the connection
            self.send(proof)
        for message in self._decoder.feed(data):
            self._handle(self._signer.verify(message), self._answer)

    def _answer(self, parts: list[bytes]) -> None:
        if self._signer is not None:
            self.send(encode(self._signer.sign(parts)))


class TcpListener:
    """A listening TCP socket on one address.

    Args:
        ip: The only address of this host to listen on.
        selector: The agent's selector.
        accept: Called with each new connection.
    """

    def __init__(self, ip: str, selector: selectors.BaseSelector, accept: Callable[[socket.socket], Any]) -> None:
        self.sock = socket.create_server((ip, 0), backlog=128)
        self.sock.setblocking(False)
        self._accept = accept
        selector.register(self.sock, selectors.EVENT_READ, self.on_ready)

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self.sock.getsockname()[1])

    def on_ready(self, mask: int) -> None:
        """Accept one connection."""
        with contextlib.suppress(OSError):
            connection, _ = self.sock.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._accept(connection)
