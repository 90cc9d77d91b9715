"""Connections of the agent's event loop: private Unix sockets, and TCP for other hosts that know the key.

Over them go JSON commands and messages of the store. The rendezvous store and the agents of other hosts use TCP, on one
address. Both ends prove that they know the key, which is never sent, and sign each message. Signatures are HMAC-SHA256
(RFC 2104) with a separate key per connection and direction, and each includes a sequence number, which prevents
replay.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from axon_nb.host.children import child_pids, signal_group
from axon_nb.host.store import Decoder, encode, exactly

_MAX_LINE = 16 << 20
NONCE_SIZE = 32
PROOF_SIZE = 32
_HANDSHAKE_TIMEOUT_S = 10.0
_MAX_UNAUTHENTICATED = 64
_THIN_LINEAR_TIMEOUTS = 16
"""Linux's TCP_THIN_LINEAR_TIMEOUTS."""
Send = Callable[[list[bytes]], None]


class Connection:
    """An accepted connection; reads and writes never block the event loop.

    Args:
        sock: The socket.
        selector: The agent's selector.
        on_close: Called when the connection is closed.
        handle: Called with each message, as the kind of connection says.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        on_close: Callable[[Connection], None],
        handle: Callable[..., None],
    ) -> None:
        self.sock = sock
        self._selector = selector
        self._on_close = on_close
        self._handle = handle
        self._outgoing, self._pending = bytearray(), bytearray()
        self._decoder = Decoder()
        self.closed = False
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, self.on_ready)

    def on_ready(self, mask: int) -> None:
        """Handle a readable or writable socket; called by the event loop."""
        try:
            if mask & selectors.EVENT_WRITE:
                self._drain()
            if mask & selectors.EVENT_READ:
                data = self.sock.recv(1 << 18)
                if not data:
                    self.close()
                    return
                self.received(data)
        except BlockingIOError:
            pass
        except Exception:  # whatever a client sends, it closes this connection only
            self.close()

    def received(self, data: bytes) -> None:
        """Process received bytes."""
        raise NotImplementedError

    def send(self, data: bytes) -> None:
        """Send as much as the socket accepts now, the rest when it becomes writable."""
        if self.closed:
            return
        self._outgoing += data
        try:
            self._drain()
        except OSError:
            self.close()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                sent = self.sock.send(self._outgoing)
                del self._outgoing[:sent]
        self._watch_writes()

    def _watch_writes(self) -> None:
        if not self.closed:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
            self._selector.modify(self.sock, events, self.on_ready)

    def close(self) -> None:
        """Close the connection and unregister it."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self.sock)
        self.sock.close()
        self._on_close(self)


class CommandConnection(Connection):
    """Connection of a notebook: one JSON object per line in each direction. It and the object are handled."""

    owner = ""

    def received(self, data: bytes) -> None:
        """Execute each complete line."""
        self._pending += data
        while (end := self._pending.find(b"\n")) >= 0:
            line = bytes(self._pending[:end])
            del self._pending[: end + 1]
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("a command must be a JSON object")
            self._handle(self, message)
        if len(self._pending) > _MAX_LINE:
            raise ValueError(f"command exceeds {_MAX_LINE} bytes")

    def send_message(self, message: dict[str, Any]) -> None:
        """Send one reply or event."""
        self.send(json.dumps(message).encode() + b"\n")


class StoreConnection(Connection):
    """Connection of a rank's store client. The message is handled, and a function that sends the answer."""

    def received(self, data: bytes) -> None:
        """Answer each complete message."""
        for message in self._decoder.feed(data):
            self._handle(message, self._answer)

    def _answer(self, parts: list[bytes]) -> None:
        self.send(encode(parts))


class Listener:
    """A listening Unix socket, mode 0600, that accepts connections of this user only."""

    def __init__(self, path: Path, selector: selectors.BaseSelector, accept: Callable[[socket.socket], Any]) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        # Under its name only once it listens: others remove the folder of a socket that refuses them.
        early, mask = path.with_suffix(".s"), os.umask(0o177)
        try:
            self.sock.bind(str(early))
        finally:
            os.umask(mask)
        self.sock.listen(128)
        early.rename(path)
        self.sock.setblocking(False)
        self._accept = accept
        selector.register(self.sock, selectors.EVENT_READ, self.on_ready)

    def on_ready(self, mask: int) -> None:
        """Accept one connection."""
        # OSError: the peer is gone, or no file descriptor is free; pending connections are accepted later.
        with contextlib.suppress(OSError):
            connection, _ = self.sock.accept()
            credentials = peer_credentials(connection)
            if credentials is None or credentials[1] == os.getuid():
                self._accept(connection)
            else:
                connection.close()


def peer_credentials(sock: socket.socket) -> tuple[int, int] | None:
    """Return pid and user of the process at the other end; None if the system does not say."""
    if not sys.platform.startswith("linux"):
        return None
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid), int(uid)


class PeerProcess:
    """The process that listens at the other end of a Unix socket. A signal reaches it or nobody, whatever its pid.

    Args:
        sock: A connected socket; a reply after this proves that the process is the one that is held here.
    """

    def __init__(self, sock: socket.socket) -> None:
        pid, uid = peer_credentials(sock) or (0, -1)
        self.pid = pid
        self._handle: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # an old kernel, or none that has handles
            if pid > 0 and uid == os.getuid():
                self._handle = os.pidfd_open(pid)

    def signal(self, number: int) -> bool:
        """Send a signal; return whether the process was there."""
        if self._handle is None:
            return False
        try:
            signal.pidfd_send_signal(self._handle, number)
        except OSError:
            return False
        return True

    def kill_with_children(self) -> bool:
        """Kill the process, and the process groups of what it started; return whether it was there."""
        if not self.signal(signal.SIGSTOP):  # it must not reap a child now: the pid could become another process's
            return False
        for pid in child_pids(self.pid):
            signal_group(pid, signal.SIGKILL)
        return self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Release the handle."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def resend_soon(sock: socket.socket) -> None:
    """Have what was lost on a link sent again after a constant time, so soon after the link is back."""
    with contextlib.suppress(OSError):  # Linux only
        sock.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)


def store_key(cluster_key: bytes) -> bytes:
    """Derive the store's key from the key that signs ipyparallel's messages, which both ends already have."""
    return _sign(cluster_key, b"axon_nb rendezvous store")


def link_key(cluster_key: bytes) -> bytes:
    """Derive the key with which agents of other hosts join, in the same way."""
    return _sign(cluster_key, b"axon_nb host link")


def mask_server_key(key: bytes, server_key: bytes) -> bytes:
    """Encrypt, or decrypt again, the controller's public CURVE key: whoever knows it can connect to the controller.

    Args:
        key: The key with which agents join. The same one never encrypts anything else.
        server_key: At most 64 bytes.
    """
    pad = hmac.digest(key, b"axon_nb controller", "sha512")
    return bytes(one ^ other for one, other in zip(server_key, pad, strict=False))


def _sign(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


class MessageSigner:
    """Signs the messages that one end sends and verifies those it receives."""

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        self._keys = (sending, receiving)
        self._sent = self._received = 0

    def sign(self, parts: list[bytes]) -> list[bytes]:
        """Return the message with its signature appended as a part."""
        self._sent += 1
        return [*parts, _sign(self._keys[0], self._sent.to_bytes(8, "big"), encode(parts))]

    def verify(self, parts: list[bytes]) -> list[bytes]:
        """Check the signature and return the message without it.

        Raises:
            ValueError: the signature is wrong, or the message was replayed.
        """
        self._received += 1
        *content, proof = parts or [b""]
        expected = _sign(self._keys[1], self._received.to_bytes(8, "big"), encode(content))
        if not hmac.compare_digest(proof, expected):
            raise ValueError("message with a wrong signature")
        return content


class Handshake:
    """The listening side of the handshake: send `challenge`, then pass the reply to `check`."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.challenge = os.urandom(NONCE_SIZE)

    def check(self, answer: bytes) -> tuple[bytes, MessageSigner]:
        """Verify a client's reply; return the proof to send back and the connection's signer.

        Args:
            answer: The client's nonce and its proof, `NONCE_SIZE` + `PROOF_SIZE` bytes.

        Raises:
            ValueError: the client does not know the key.
        """
        nonce, proof = answer[:NONCE_SIZE], answer[NONCE_SIZE:]
        session = _sign(self._key, self.challenge, nonce)
        if not hmac.compare_digest(proof, _sign(session, b"rank")):
            raise ValueError("the client does not know the key")
        return _sign(session, b"store"), MessageSigner(_sign(session, b"to rank"), _sign(session, b"to store"))


def authenticate(sock: socket.socket, key: bytes) -> MessageSigner:
    """Perform the connecting side of the handshake on a blocking socket.

    Raises:
        ConnectionError: the peer closed the connection or does not know the key.
    """
    closed = "the other end closed the connection: the cluster's key does not match"
    challenge = exactly(sock, NONCE_SIZE, closed)
    nonce = os.urandom(NONCE_SIZE)
    session = _sign(key, challenge, nonce)
    sock.sendall(nonce + _sign(session, b"rank"))
    if not hmac.compare_digest(exactly(sock, PROOF_SIZE, closed), _sign(session, b"store")):
        raise ConnectionError("the other end does not know the cluster's key")
    return MessageSigner(_sign(session, b"to store"), _sign(session, b"to rank"))


class SignedConnection(Connection):
    """A connection between two ends that have authenticated; every message is signed.

    Args:
        sock: The socket.
        selector: The agent's selector.
        on_close: Called when the connection is closed.
        handle: Called with each message and a function that sends a reply.
        signer: Signs and verifies; None: no message is accepted yet.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        on_close: Callable[[Connection], None],
        handle: Callable[[list[bytes], Send], None],
        signer: MessageSigner | None,
    ) -> None:
        self._signer = signer
        self.received_at = time.monotonic()
        """When the last bytes arrived; monotonic time in seconds."""
        super().__init__(sock, selector, on_close, handle)

    @property
    def received_ns(self) -> int:
        """The same in nanoseconds."""
        return round(self.received_at * 1e9)

    def received(self, data: bytes) -> None:
        """Verify and handle each complete message."""
        self.received_at = time.monotonic()
        if self._signer is not None:
            for message in self._decoder.feed(data):
                self._handle(self._signer.verify(message), self.send_parts)

    def send_parts(self, parts: list[bytes]) -> None:
        """Send one message."""
        if self._signer is not None:
            self.send(encode(self._signer.sign(parts)))

    def send_message(self, message: dict[str, Any]) -> None:
        """Send one JSON object."""
        self.send_parts([json.dumps(message).encode()])


class AcceptedConnection(SignedConnection):
    """A connection that a client opened; its messages are read only after it has proven that it knows the key."""

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        on_close: Callable[[Connection], None],
        handle: Callable[[list[bytes], Send], None],
        key: bytes,
    ) -> None:
        self._handshake = Handshake(key)
        self.since = time.monotonic()
        super().__init__(sock, selector, on_close, handle, None)
        self.send(self._handshake.challenge)

    @property
    def authenticated(self) -> bool:
        """Whether the client has proven that it knows the key."""
        return self._signer is not None

    @property
    def overdue(self) -> bool:
        """Whether the client failed to authenticate in time."""
        return self._signer is None and time.monotonic() - self.since > _HANDSHAKE_TIMEOUT_S

    def received(self, data: bytes) -> None:
        """Complete the handshake, then handle messages."""
        if self._signer is None:
            self._pending += data
            if len(self._pending) < NONCE_SIZE + PROOF_SIZE:
                return
            # Raises if the reply is wrong or too long, which closes the connection.
            proof, self._signer = self._handshake.check(bytes(self._pending))
            self.send(proof)
            return
        super().received(data)


def close_unauthenticated(connections: Iterable[Connection]) -> None:
    """Close connections that did not authenticate in time, and the oldest of too many: each costs a file."""
    waiting = [one for one in connections if isinstance(one, AcceptedConnection) and not one.authenticated]
    waiting.sort(key=lambda one: one.since)
    for number, one in enumerate(waiting):
        if one.overdue or number < len(waiting) - _MAX_UNAUTHENTICATED:
            one.close()


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
