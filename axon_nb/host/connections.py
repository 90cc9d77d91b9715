"""Connections of the agent's event loop: JSON commands and store messages over private Unix sockets."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from axon_nb.host.children import child_pids, signal_group
from axon_nb.host.store import Decoder, encode

_MAX_LINE = 16 << 20


class Connection:
    """An accepted connection; reads and writes never block the event loop."""

    def __init__(
        self, sock: socket.socket, selector: selectors.BaseSelector, on_close: Callable[[Connection], None]
    ) -> None:
        self.sock = sock
        self._selector = selector
        self._on_close = on_close
        self._outgoing = bytearray()
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
    """Connection of a notebook: one JSON object per line in each direction."""

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        on_close: Callable[[Connection], None],
        handle: Callable[[CommandConnection, dict[str, Any]], None],
    ) -> None:
        self._lines = bytearray()
        self._handle = handle
        self.owner = ""
        super().__init__(sock, selector, on_close)

    def received(self, data: bytes) -> None:
        """Execute each complete line."""
        self._lines += data
        while (end := self._lines.find(b"\n")) >= 0:
            line = bytes(self._lines[:end])
            del self._lines[: end + 1]
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("a command must be a JSON object")
            self._handle(self, message)
        if len(self._lines) > _MAX_LINE:
            raise ValueError(f"command exceeds {_MAX_LINE} bytes")

    def send_message(self, message: dict[str, Any]) -> None:
        """Send one reply or event."""
        self.send(json.dumps(message).encode() + b"\n")


class StoreConnection(Connection):
    """Connection of a rank's store client."""

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        on_close: Callable[[Connection], None],
        handle: Callable[[list[bytes], Callable[[list[bytes]], None]], None],
    ) -> None:
        self._decoder = Decoder()
        self._handle = handle
        super().__init__(sock, selector, on_close)

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
            if _peer_uid(connection) in (os.getuid(), None):
                self._accept(connection)
            else:
                connection.close()


def _peer_uid(sock: socket.socket) -> int | None:
    credentials = _peer_credentials(sock)
    return None if credentials is None else credentials[1]


def _peer_credentials(sock: socket.socket) -> tuple[int, int] | None:
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
        pid, uid = _peer_credentials(sock) or (0, -1)
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
