"""A joining host's side: its agent connects to the notebook's agent, and connects again when the link was cut.

The cluster's key never crosses the network. Whoever starts this agent gives it the key.
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from axon_nb.errors import StartError
from axon_nb.host.connections import Connection
from axon_nb.host.link.tcp import MessageSigner, SignedConnection, authenticate, link_key, mask_server_key, resend_soon
from axon_nb.host.resources.cgroups import usable_cores
from axon_nb.host.run_dir import RunDir
from axon_nb.host.store import encode as encode_parts
from axon_nb.host.store import receive
from axon_nb.records.environment import HOST_NAME
from axon_nb.records.protocol.agent import Fork, Hello, rejection
from axon_nb.records.protocol.cluster import HostFacts, Welcome
from axon_nb.records.protocol.version import own_version
from axon_nb.records.protocol.wire import decode, encode

_CONNECT_TIMEOUT_S = 5.0
_RECONNECT_TIMEOUT_S = 1.0
_HANDSHAKE_TIMEOUT_S = 60.0
_RETRY_INTERVAL_S = 0.5
_SILENCE_S = 30.0
"""The notebook's agent may be stopped or swapped out for a while; after this long, the ranks here are killed."""
_BUSY_SILENCE_S = 180.0
"""Without ranks: it does not respond while it imports torch, a second, or a minute on a busy machine."""
_GIVE_UP_S = 300.0
_QUIET_S = 1.0
"""The notebook's agent asks twice per second; when it has not for this long, this one sends something by itself."""
_UNREACHED_MS = 8000
"""What the system of the notebook's host has not received for this long says that the link is cut, not that the agent
is stopped. The notebook's agent has given this host up by then."""
Link = tuple[socket.socket, MessageSigner]
"""A connection that has been authenticated."""


class UnreachableError(StartError):
    """The notebook's host cannot be reached now."""


class MemberConnection(SignedConnection):
    """The connection to the notebook's agent, which sends commands like a notebook."""

    owner = "the cluster"
    _greeted_at = 0.0

    def greet(self, now: float) -> float:
        """Send an empty message if the notebook's agent is quiet; return when to call this again.

        TCP sends what was lost on a cut link again after longer and longer times, which begin with the first of them.
        What is sent one second into the cut therefore arrives sooner after it than what was lost at its beginning. And
        it fails for good where the other end has given up this connection.
        """
        if now < self.received_at + _QUIET_S:
            return self.received_at + _QUIET_S
        if self._greeted_at < self.received_at:
            self._greeted_at = now
            self.send_message({})
        return now + _QUIET_S


class Member:
    """The membership of an agent in a cluster whose notebook is on another host.

    Args:
        address: Where that notebook's agent listens, ``ip:port``.
        cluster_key: The cluster's key.
        name: The name that this host suggests for itself.
        run_dir: The folder of this agent.
        is_only: Whether it joins only if no other agent has this name.
    """

    def __init__(self, address: str, cluster_key: bytes, name: str, run_dir: RunDir, *, is_only: bool) -> None:
        self.address = address
        self.name = name
        self._cluster_key = cluster_key
        self._run_dir = run_dir
        self._is_only = is_only
        self._joined: Link | None = None
        self._connection: MemberConnection | None = None
        self._retry_at: float | None = None
        self._give_up_at = 0.0
        self._checked_at = time.monotonic()
        self.over = False
        """Whether the cluster is gone, or unreachable for too long."""

    def join(self, *, timeout_s: float = _CONNECT_TIMEOUT_S) -> None:
        """Connect within `timeout_s` seconds, authenticate, and write the controller's connection file.

        Raises:
            StartError: nobody listens there, the key is another cluster's, or the versions differ.
        """
        ip, _, port = self.address.rpartition(":")
        try:
            sock = socket.create_connection((ip, int(port)), timeout_s)
        except ConnectionRefusedError:
            raise StartError(
                f"Nothing listens on {self.address}: the cluster is gone, or a firewall closes the port. Open it, or "
                "run `%distributed start --hosts` again."
            ) from None
        except (OSError, ValueError) as error:
            raise UnreachableError(
                f"Cannot reach {self.address} ({error}). Name an interface that this host reaches with "
                "`%distributed start --interface`."
            ) from None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            resend_soon(sock)
            if sys.platform == "linux":
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREACHED_MS)
            sock.settimeout(_HANDSHAKE_TIMEOUT_S)
            signer = authenticate(sock, link_key(self._cluster_key))
            reply = self._introduce(sock, signer)
        except TimeoutError:
            sock.close()
            raise UnreachableError(
                f"{self.address} did not respond within {_HANDSHAKE_TIMEOUT_S:.0f} s: the notebook's host is busy, or "
                "its port belongs to another program. Run this command again."
            ) from None
        except (OSError, EOFError, ValueError) as error:
            sock.close()
            raise StartError(
                f"{self.address} rejected this host ({error}). Use the command, with its key, that "
                "`%distributed start --hosts join` printed for this cluster."
            ) from None
        if reason := rejection(Hello, reply):
            sock.close()
            raise StartError(reason)
        welcome = decode(Welcome, reply)
        self.name = welcome.name
        self._write_engine_file(welcome.engine_file)
        self._joined, self._is_only = (sock, signer), True

    def _introduce(self, sock: socket.socket, signer: MessageSigner) -> dict[str, Any]:
        facts = HostFacts(self.name, str(self._run_dir.path), usable_cores(), own_version(), self._is_only)
        sock.sendall(encode_parts(signer.sign([json.dumps(encode(facts)).encode()])))
        return dict(json.loads(signer.verify(receive(sock))[0]))

    def _write_engine_file(self, content: Mapping[str, Any]) -> None:
        file = self._run_dir.engine_file
        file.parent.mkdir(mode=0o700, exist_ok=True)
        (self._run_dir.profile / "log").mkdir(mode=0o700, exist_ok=True)
        file.touch(mode=0o600)
        secrets = {"key": self._cluster_key.decode()}
        if masked := content.get("curve_serverkey"):
            key = link_key(self._cluster_key)
            secrets["curve_serverkey"] = mask_server_key(key, bytes.fromhex(masked)).decode()
        file.write_text(json.dumps({**content, **secrets}))

    def serve(
        self,
        link: Link,
        selector: selectors.BaseSelector,
        on_close: Callable[[Connection], None],
        handle: Callable[[MemberConnection, dict[str, Any]], None],
    ) -> MemberConnection:
        """Handle the commands that arrive on what `step` returned."""
        sock, signer = link
        connection = MemberConnection(
            sock, selector, on_close, lambda parts, _: handle(connection, json.loads(parts[0])), signer
        )
        self._connection, self._retry_at = connection, None
        return connection

    def lost(self, now: float) -> None:
        """Note that the connection is closed."""
        self._connection, self._retry_at, self._give_up_at = None, now, now + _GIVE_UP_S

    def step(self, now: float, *, serving: bool) -> tuple[float | None, Link | None]:
        """Give up a connection that is silent, or try to join again.

        Args:
            now: Monotonic time in seconds.
            serving: Whether there are ranks on this host.

        Returns:
            When to call this again, and the new connection if it has joined.
        """
        if self._joined is not None:
            link, self._joined = self._joined, None
            return now, link
        late, self._checked_at = now - self._checked_at > 2.0, now
        if self._connection is not None:
            if late:  # this agent itself was busy: what was sent is still unread
                self._connection.received_at = now
            if now - self._connection.received_at > (_SILENCE_S if serving else _BUSY_SILENCE_S):
                self._connection.close()
                return now, None
            return self._connection.greet(now), None
        if self._retry_at is None or now < self._retry_at:
            return self._retry_at, None
        self._retry_at = now + _RETRY_INTERVAL_S
        try:
            self.join(timeout_s=_RECONNECT_TIMEOUT_S)
        except StartError as error:
            # Refused: the notebook's agent has exited, or another one serves this host. Else the link may come back.
            self.over = not isinstance(error, UnreachableError) or now > self._give_up_at
        return self._retry_at, None

    def localized(self, command: Fork) -> Fork:
        """Return the command with what only this host knows: its environment, folders and modules."""
        folder = command.cwd if Path(command.cwd).is_dir() else str(Path.home())
        return dataclasses.replace(
            command,
            env={**os.environ, **self._run_dir.ipython_env(), **command.env, HOST_NAME.name: self.name},
            cwd=folder,
            path=command.path or ("", *sys.path),
            argv=tuple(f"--work-dir={folder}" if one.startswith("--work-dir=") else one for one in command.argv),
        )
