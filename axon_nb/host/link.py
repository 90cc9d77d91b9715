"""Joins the agents of several hosts: both ends of their link.

On the first host, other hosts join, get commands for their ranks, and are missed when they do not respond. An agent
that joins serves the same commands as a notebook's own agent. The first host's end passes the notebook's commands on,
and what the other agent reports back to the notebook.

A joining host's agent connects to the notebook's agent, and connects again when the link was cut. The cluster's key
never crosses the network. Whoever starts this agent gives it the key.
"""

from __future__ import annotations

import itertools
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from axon_nb.errors import StartError
from axon_nb.host import connections
from axon_nb.host.resources import usable_cores
from axon_nb.host.run_dir import FolderCopy, RunDir
from axon_nb.host.store import encode as encode_parts
from axon_nb.host.store import receive
from axon_nb.records.environment import HOST_NAME
from axon_nb.records.protocol import agent as messages
from axon_nb.records.protocol.wire import decode, encode, own_version, read_version, refuse_host
from axon_nb.records.spans import ClockEstimate, HostClock

_ASK_INTERVAL_S = 0.5
_HOST_SILENCE_S = 2.9
"""A host that has ranks and has not responded for this long is lost; after a cut of 2 s it has: `Member`."""
_BUSY_SILENCE_S = 180.0
"""An agent does not respond while it imports torch: a second, or a minute on a busy machine."""
_STOP_TIMEOUT_S = 8.0
Reply = Callable[[Mapping[str, Any]], None]
_CONNECT_TIMEOUT_S = 5.0
_RECONNECT_TIMEOUT_S = 1.0
_HANDSHAKE_TIMEOUT_S = 60.0
_RETRY_INTERVAL_S = 0.5
_NOTEBOOK_SILENCE_S = 30.0
"""The notebook's agent may be stopped or swapped out for a while; after this long, the ranks here are killed."""
_GIVE_UP_S = 300.0
_QUIET_S = 1.0
"""The notebook's agent asks twice per second; when it has not for this long, this one sends something by itself."""
_UNREACHED_MS = 8000
"""What the system of the notebook's host has not received for this long says that the link is cut, not that the agent
is stopped. The notebook's agent has given this host up by then."""
Link = tuple[socket.socket, connections.MessageSigner]
"""A connection that has been authenticated."""


class HostConnection(connections.AcceptedConnection):
    """The connection of another host's agent."""

    facts: messages.HostFacts | None = None
    """What it said about itself; None until it has."""
    ranks: dict[int, int]
    """Pid of each of its live ranks."""
    state: messages.AgentState | None = None
    """What it replied last."""

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        on_close: Callable[[connections.Connection], None],
        on_message: Callable[[HostConnection, dict[str, Any]], None],
        key: bytes,
    ) -> None:
        self.ranks = {}
        self._numbers = itertools.count(1)
        self._replies: dict[int, Reply] = {}
        self.clock = ClockEstimate()
        self._asked_at = 0.0
        self._asked_ns = 0
        self._owes_reply = False
        super().__init__(sock, selector, on_close, lambda parts, _: on_message(self, json.loads(parts[0])), key)

    def command(self, command: messages.Command[Any], reply: Reply) -> None:
        """Send a command; `reply` gets the fields of the answer."""
        number = next(self._numbers)
        self._replies[number] = reply
        self.send_message(messages.command_message(number, command))

    def on_reply(self, message: dict[str, Any]) -> None:
        """Pass on the answer to a command."""
        if (reply := self._replies.pop(message.pop("id", 0), None)) is not None:
            reply(message)

    def fail(self, reason: str) -> None:
        """Answer the commands that will get no answer."""
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            reply(messages.refusal(reason))

    def ask(self, now: float) -> float:
        """Ask for the state, unless a reply is due; return when to ask next."""
        # One question at a time: with few unacknowledged packets, TCP sends lost ones again after a constant time.
        if not self._owes_reply and now >= self._asked_at + _ASK_INTERVAL_S:
            self._asked_at, self._owes_reply, self._asked_ns = now, True, time.monotonic_ns()
            self.command(messages.GetInfo(), self._on_state)
        return self._asked_at + _ASK_INTERVAL_S if not self._owes_reply else now + _ASK_INTERVAL_S

    def _on_state(self, fields: Mapping[str, Any]) -> None:
        self._owes_reply = False
        if not messages.rejection(messages.GetInfo, fields):  # the connection is closed: `fail`
            self.state = messages.decode_outcome(messages.GetInfo, fields)
            self.clock.add(self._asked_ns, self.state.received_ns, self.state.sent_ns, self.received_ns)

    def has_unread(self) -> bool:
        """Whether something has arrived, or the connection was closed, since this agent last read."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    @property
    def lost_at(self) -> float:
        """When it is lost, unless it responds before; monotonic time in seconds."""
        return self.received_at + (_HOST_SILENCE_S if self.ranks else _BUSY_SILENCE_S)


class Hosts:
    """The other hosts of the cluster.

    Args:
        selector: The agent's selector.
        peers: The agent's connections; those of hosts are added and removed.
        engine_file: The controller's connection file for engines. Hosts get it without its key, and with that of CURVE
            encrypted.
        report: Called with the exit of a rank, or of all ranks of a host that is lost.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        peers: set[connections.Connection],
        engine_file: Path,
        report: Callable[[messages.Exit], None],
    ) -> None:
        self._selector = selector
        self._peers = peers
        self._engine_file = engine_file
        self._report = report
        self._by_name: dict[str, HostConnection] = {}
        self._lost: dict[str, str] = {}
        self.listener: connections.TcpListener | None = None
        """Where agents join; None: they cannot."""
        self._key = b""
        self._stopped_at: float | None = None
        self._checked_at = time.monotonic()
        self.refused: list[str] = []
        """Why hosts could not join."""

    def listen(self, ip: str, key: bytes) -> messages.StorePort:
        """Let agents join on this address; return the same port if they can already."""

        def accept(sock: socket.socket) -> None:
            connections.close_unauthenticated(list(self._peers))
            connections.resend_soon(sock)
            self._peers.add(HostConnection(sock, self._selector, self._closed, self._on_message, key))

        self._key = key
        self.listener = self.listener or connections.TcpListener(ip, self._selector, accept)
        return messages.StorePort(self.listener.port)

    @property
    def facts(self) -> dict[str, messages.HostFacts]:
        """The hosts that are connected, by name."""
        return {name: link.facts for name, link in self._by_name.items() if link.facts is not None}

    @property
    def clocks(self) -> dict[str, HostClock]:
        """The clocks of these hosts, by name; not of one that has just joined."""
        now = time.monotonic_ns()
        found = {name: link.clock.at(now) for name, link in self._by_name.items()}
        return {name: clock for name, clock in found.items() if clock is not None}

    @property
    def ranks(self) -> dict[int, int]:
        """Pid of each live rank on its host, by rank."""
        return {rank: pid for link in self._by_name.values() for rank, pid in link.ranks.items()}

    @property
    def stopped(self) -> tuple[int, ...]:
        """The ranks on other hosts that are stopped, as by SIGSTOP."""
        states = [link.state for link in self._by_name.values() if link.state is not None]
        return tuple(rank for state in states for rank in state.stopped)

    def _on_message(self, link: HostConnection, message: dict[str, Any]) -> None:
        if link.facts is None:
            self._welcome(link, message)
        elif "event" in message:
            event = decode(messages.AgentEvent, message)
            if isinstance(event, messages.Exit) and link.ranks.pop(event.rank, None) is not None:
                self._report(msgspec.structs.replace(event, time_ns=time.monotonic_ns(), host=link.facts.name))
        else:
            link.on_reply(message)

    def _welcome(self, link: HostConnection, message: dict[str, Any]) -> None:
        version = read_version(message.get("version"))
        if reason := refuse_host(str(message.get("name")), version):
            self.refused.append(reason)
            link.send_message(messages.refusal(reason))
            return
        facts = decode(messages.HostFacts, message)
        for other in list(self._by_name.values()):
            if other.facts is not None and other.facts.folder == facts.folder:  # it is back before it was missed
                other.close()
        if facts.is_only and facts.name in self._by_name:
            # After a cut, the agent that was there joins again, and a repair may have started another one meanwhile.
            link.send_message(
                messages.refusal(f"Another agent serves the host {facts.name!r} by now, so this one exits.")
            )
            return
        names, number = {socket.gethostname(), *self._by_name}, 1
        while (name := facts.name if number == 1 else f"{facts.name}-{number}") in names:
            number += 1
        link.facts = msgspec.structs.replace(facts, name=name)
        self._by_name[name] = link
        link.send_message(encode(messages.Welcome(name, self._read_engine_file())))

    def _read_engine_file(self) -> dict[str, Any]:
        try:
            content = json.loads(self._engine_file.read_text())
        except (OSError, ValueError):
            return {}
        if server_key := content.get("curve_serverkey"):
            content["curve_serverkey"] = connections.mask_server_key(self._key, server_key.encode()).hex()
        return {name: value for name, value in content.items() if name != "key"}

    def fork(self, command: messages.Fork, reply: Reply) -> None:
        """Fork a rank on `command.host`; `reply` gets the fields of the answer.

        Raises:
            StartError: it is not connected.
        """
        link = self._link(command.host)

        def on_reply(fields: Mapping[str, Any]) -> None:
            if "pid" in fields:
                link.ranks[command.rank] = fields["pid"]
            reply(fields)

        link.command(msgspec.structs.replace(command, host=""), on_reply)

    def pass_on(self, command: messages.CompareFiles | messages.WriteFile, reply: Reply) -> None:
        """Have the agent of `command.host` perform it; `reply` gets the fields of the answer.

        Raises:
            StartError: it is not connected.
        """
        self._link(command.host).command(msgspec.structs.replace(command, host=""), reply)

    def _link(self, host: str) -> HostConnection:
        if (link := self._by_name.get(host)) is None:
            known = ", ".join(sorted(self._by_name)) or "none"
            raise StartError(f"The host {host!r} is not connected; connected: {known}.")
        return link

    def signal(self, command: messages.Signal, reply: Reply) -> bool:
        """Send a signal to a rank; return whether it is on one of these hosts."""
        link = next((one for one in self._by_name.values() if command.rank in one.ranks), None)
        if link is not None:
            link.command(command, reply)
        return link is not None

    def step(self, now: float) -> float | None:
        """Ask each host for its state, and give up those that do not respond; return when to call this again."""
        if now - self._checked_at > 2 * _ASK_INTERVAL_S:  # this agent itself was busy: what they sent is still unread
            for link in self._by_name.values():
                link.received_at = now
        self._checked_at = now
        due = None
        for name, link in list(self._by_name.items()):
            if self._stopped_at is None and now >= link.lost_at and not link.has_unread():
                self._lost[name] = f"its agent has not responded for {now - link.received_at:.1f} s"
                link.close()
                continue
            due = min(link.ask(now), due or now + _ASK_INTERVAL_S)
            if self._stopped_at is None:
                due = min(due, max(now, link.lost_at))
        return due

    def _closed(self, connection: connections.Connection) -> None:
        self._peers.discard(connection)
        if not isinstance(connection, HostConnection) or connection.facts is None:
            return
        name = connection.facts.name
        self._by_name.pop(name, None)
        reason = self._lost.pop(name, "its agent closed the connection")
        connection.fail(f"The host {name!r} is no longer connected: {reason}.")
        if self._stopped_at is not None:
            return
        for rank, pid in connection.ranks.items():
            self._report(
                messages.Exit(rank=rank, pid=pid, code=0, time_ns=time.monotonic_ns(), host=name, host_lost=reason)
            )

    def stop(self) -> None:
        """Stop the agents and all their ranks."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            for link in self._by_name.values():
                link.command(messages.Stop(), lambda _: None)

    @property
    def stopping(self) -> bool:
        """Whether `stop` still waits for an agent to exit."""
        waited = time.monotonic() - (self._stopped_at or 0.0)
        return bool(self._by_name) and waited < _STOP_TIMEOUT_S


class UnreachableError(StartError):
    """The notebook's host cannot be reached now."""


class MemberConnection(connections.SignedConnection):
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
        self.copy = FolderCopy(run_dir.path / "sync")
        """What `--sync` brings."""
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
            connections.resend_soon(sock)
            if sys.platform == "linux":
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREACHED_MS)
            sock.settimeout(_HANDSHAKE_TIMEOUT_S)
            signer = connections.authenticate(sock, connections.link_key(self._cluster_key))
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
        if reason := messages.rejection(messages.Hello, reply):
            sock.close()
            raise StartError(reason)
        welcome = decode(messages.Welcome, reply)
        self.name = welcome.name
        self._write_engine_file(welcome.engine_file)
        self._joined, self._is_only = (sock, signer), True

    def _introduce(self, sock: socket.socket, signer: connections.MessageSigner) -> dict[str, Any]:
        facts = messages.HostFacts(self.name, str(self._run_dir.path), usable_cores(), own_version(), self._is_only)
        sock.sendall(encode_parts(signer.sign([json.dumps(encode(facts)).encode()])))
        return dict(json.loads(signer.verify(receive(sock))[0]))

    def _write_engine_file(self, content: Mapping[str, Any]) -> None:
        file = self._run_dir.engine_file
        file.parent.mkdir(mode=0o700, exist_ok=True)
        (self._run_dir.profile / "log").mkdir(mode=0o700, exist_ok=True)
        file.touch(mode=0o600)
        secrets = {"key": self._cluster_key.decode()}
        if masked := content.get("curve_serverkey"):
            key = connections.link_key(self._cluster_key)
            secrets["curve_serverkey"] = connections.mask_server_key(key, bytes.fromhex(masked)).decode()
        file.write_text(json.dumps({**content, **secrets}))

    def serve(
        self,
        link: Link,
        selector: selectors.BaseSelector,
        on_close: Callable[[connections.Connection], None],
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
            if now - self._connection.received_at > (_NOTEBOOK_SILENCE_S if serving else _BUSY_SILENCE_S):
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

    def localized(self, command: messages.Fork) -> messages.Fork:
        """Return the command with what only this host knows: its environment, folders and modules."""
        folder = str(self.copy.of(command.cwd) or (command.cwd if Path(command.cwd).is_dir() else Path.home()))
        return msgspec.structs.replace(
            command,
            env={**os.environ, **self._run_dir.ipython_env(), **command.env, HOST_NAME.name: self.name},
            cwd=folder,
            path=command.path or ("", *self.copy.import_path, *sys.path),
            argv=tuple(f"--work-dir={folder}" if one.startswith("--work-dir=") else one for one in command.argv),
        )
