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
from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from axon_nb.errors import StartError
from axon_nb.host import connections, membership
from axon_nb.host.membership import QUESTION, Entry, Membership, Roster, follow, tell, transition
from axon_nb.host.resources import usable_cores
from axon_nb.host.run_dir import FolderCopy, RunDir
from axon_nb.host.store import encode as encode_parts
from axon_nb.host.store import receive
from axon_nb.records.environment import HOST_NAME
from axon_nb.records.protocol import agent as messages
from axon_nb.records.protocol.wire import decode, encode, own_version
from axon_nb.records.spans import ClockEstimate, HostClock

_STORY_LENGTH = 50
Reply = Callable[[Mapping[str, Any]], None]
_CONNECT_TIMEOUT_S = 5.0
_RECONNECT_TIMEOUT_S = 1.0
_HANDSHAKE_TIMEOUT_S = 60.0
_UNREACHED_MS = 8000
"""What the system of the notebook's host has not received for this long says that the link is cut, not that the agent
is stopped. The notebook's agent has given this host up by then."""
Link = tuple[socket.socket, connections.MessageSigner]
"""A connection that has been authenticated."""


class HostConnection(connections.AcceptedConnection):
    """The connection of another host's agent."""

    state: messages.AgentState | None = None
    """What it replied last."""
    _asked_ns = 0

    @cached_property
    def clock(self) -> ClockEstimate:
        """Its host's clock."""
        return ClockEstimate()

    def ask(self) -> None:
        """Ask for the state."""
        self._asked_ns = time.monotonic_ns()
        self.send_message(messages.command_message(QUESTION, messages.GetInfo()))

    def learn(self, fields: Mapping[str, Any]) -> None:
        """Take over the state that it replied."""
        if not messages.rejection(messages.GetInfo, fields):
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


class Hosts:
    """The other hosts of the cluster; `membership.transition` decides about them.

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
        self.roster = Roster(socket.gethostname())
        self._story: deque[Entry] = deque(maxlen=_STORY_LENGTH)
        self._links: dict[int, HostConnection] = {}
        self._numbers = itertools.count(QUESTION + 1)
        self._wanted: dict[int, tuple[messages.Command[Any], Reply]] = {}
        self.listener: connections.TcpListener | None = None
        """Where agents join; None: they cannot."""
        self._key = b""

    def listen(self, ip: str, key: bytes) -> messages.StorePort:
        """Let agents join on this address; return the same port if they can already."""

        def accept(sock: socket.socket) -> None:
            connections.close_unauthenticated(list(self._peers))
            connections.resend_soon(sock)
            number = next(self._numbers)
            closed, handle = partial(self._closed, number), partial(self._on_message, number)
            self._links[number] = link = HostConnection(sock, self._selector, closed, handle, key)
            self._peers.add(link)

        self._key = key
        self.listener = self.listener or connections.TcpListener(ip, self._selector, accept)
        return messages.StorePort(self.listener.port)

    @property
    def facts(self) -> dict[str, messages.HostFacts]:
        """The hosts that are connected, by name."""
        return {host.facts.name: host.facts for host in self.roster.hosts.values()}

    @property
    def clocks(self) -> dict[str, HostClock]:
        """The clocks of these hosts, by name; not of one that has just joined."""
        now = time.monotonic_ns()
        found = {name: self._links[link].clock.at(now) for name, link in self.roster.links.items()}
        return {name: clock for name, clock in found.items() if clock is not None}

    @property
    def ranks(self) -> dict[int, int]:
        """Pid of each live rank on its host, by rank."""
        return {rank: pid for host in self.roster.hosts.values() for rank, pid in host.ranks.items()}

    @property
    def stopped(self) -> tuple[int, ...]:
        """The ranks on other hosts that are stopped, as by SIGSTOP."""
        states = [state for link in self.roster.hosts if (state := self._links[link].state) is not None]
        return tuple(rank for state in states for rank in state.stopped)

    @property
    def lost(self) -> dict[str, str]:
        """By name of each host that was lost, when it joined and was lost."""
        return tell(self._story)

    def _feed(self, event: membership.Event) -> None:
        before = self.roster
        self.roster, effects = transition(before, event)
        if any(isinstance(effect, membership.NOTED) for effect in effects):
            self._story.append(Entry(time.time(), before, event, self.roster, effects))
        for effect in effects:
            match effect:
                case membership.Report(left):
                    story = self.lost[left.host] if left.host_lost else ""
                    reason = f"{left.host_lost} ({story})" if " again " in story else left.host_lost
                    self._report(replace(left, time_ns=time.monotonic_ns(), host_lost=reason))
                case membership.Reply(number, fields):
                    self._wanted.pop(number)[1](fields)
                case _ if effect.link not in self._links:  # closed by what could not be sent
                    pass
                case membership.Admit(link, name):
                    self._links[link].send_message(encode(messages.Welcome(name, self._read_engine_file())))
                case membership.Tell(link, message):
                    self._links[link].send_message(message)
                case membership.Close(link):
                    self._links[link].close()
                case membership.Ask(link):
                    self._links[link].ask()
                case membership.Learn(link, fields):
                    self._links[link].learn(fields)
                case membership.Send(link, number):
                    self._links[link].send_message(messages.command_message(number, self._wanted[number][0]))

    def _on_message(self, link: int, parts: list[bytes], _: connections.Send) -> None:
        message = json.loads(parts[0])
        if link not in self._links:  # closed while an earlier message of it was handled
            return
        if link not in self.roster.hosts:
            self._feed(membership.Introduced(link, message))
        elif "event" not in message:
            self._feed(membership.Answered(link, message.pop("id", None), message))
        elif isinstance(event := decode(messages.AgentEvent, message), messages.Exit):
            self._feed(membership.Exited(link, event))

    def _read_engine_file(self) -> dict[str, Any]:
        try:
            content = json.loads(self._engine_file.read_text())
        except (OSError, ValueError):
            return {}
        if server_key := content.get("curve_serverkey"):
            content["curve_serverkey"] = connections.mask_server_key(self._key, server_key.encode()).hex()
        return {name: value for name, value in content.items() if name != "key"}

    def take(self, command: messages.Command[Any], reply: Reply) -> bool:
        """Pass on a command that is for another host; return whether it is. `reply` gets the fields of the answer."""
        host, forks = "", None
        if isinstance(command, messages.Signal):
            host = next((one.facts.name for one in self.roster.hosts.values() if command.rank in one.ranks), "")
        elif isinstance(command, messages.Fork | messages.CompareFiles | messages.WriteFile):
            forks = command.rank if isinstance(command, messages.Fork) else None
            host, command = command.host, replace(command, host="")
        if host:
            self._wanted[number := next(self._numbers)] = command, reply
            self._feed(membership.Wanted(number, host, forks))
        return bool(host)

    def step(self, now: float) -> float | None:
        """Ask each host for its state, and give up those that do not respond; return when to call this again."""
        if not self.roster.hosts:
            return None
        heard = {link: self._links[link].received_at for link in self.roster.hosts}
        overdue = [link for link in heard if now >= self.roster.lost_at(link, heard)]
        self._feed(membership.Look(now, heard, {link for link in overdue if self._links[link].has_unread()}))
        return self.roster.due(now, heard)

    def _closed(self, number: int, link: connections.Connection) -> None:
        self._peers.discard(link)
        self._links.pop(number, None)
        self._feed(membership.Closed(number))

    def stop(self) -> None:
        """Stop the agents and all their ranks."""
        self._feed(membership.Stop(time.monotonic()))

    @property
    def stopping(self) -> bool:
        """Whether `stop` still waits for an agent to exit."""
        return self.roster.is_stopping(time.monotonic())


class UnreachableError(StartError):
    """The notebook's host cannot be reached now."""


class RefusedError(StartError):
    """The notebook's agent does not admit this host."""


class MemberConnection(connections.SignedConnection):
    """The connection to the notebook's agent, which sends commands like a notebook."""

    owner = "the cluster"


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
        self.membership = Membership(looked_at=time.monotonic())
        self.refusal: RefusedError | None = None
        """Why it could not join again."""

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
        except (OSError, ValueError) as error:
            sock.close()
            raise StartError(
                f"{self.address} rejected this host ({error}). Use the command, with its key, that "
                "`%distributed start --hosts join` printed for this cluster."
            ) from None
        if reason := messages.rejection(messages.Hello, reply):
            sock.close()
            raise RefusedError(reason)
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
        self._connection = connection
        self._feed(membership.Linked())
        return connection

    def lost(self, now: float) -> None:
        """Note that the connection is closed."""
        self._connection = None
        self._feed(membership.Cut(now))

    def _feed(self, event: membership.MemberEvent) -> None:
        self.membership, effect = follow(self.membership, event)
        match effect:
            case membership.HangUp() if self._connection is not None:
                self._connection.close()
            case membership.Greet() if self._connection is not None:
                self._connection.send_message({})
            case membership.Join():
                try:
                    self.join(timeout_s=_RECONNECT_TIMEOUT_S)
                except StartError as error:
                    self.refusal = error if isinstance(error, RefusedError) else None
                    self._feed(membership.Missed(is_final=not isinstance(error, UnreachableError)))

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
        heard_at = self._connection.received_at if self._connection is not None else 0.0
        self._feed(membership.Glance(now, heard_at, serving))
        return self.membership.due(now, heard_at), None

    def localized(self, command: messages.Fork) -> messages.Fork:
        """Return the command with what only this host knows: its environment, folders and modules."""
        folder = str(self.copy.of(command.cwd) or (command.cwd if Path(command.cwd).is_dir() else Path.home()))
        return replace(
            command,
            env={**os.environ, **self._run_dir.ipython_env(), **command.env, HOST_NAME.name: self.name},
            cwd=folder,
            path=command.path or ("", *self.copy.import_path, *sys.path),
            argv=tuple(f"--work-dir={folder}" if one.startswith("--work-dir=") else one for one in command.argv),
        )
