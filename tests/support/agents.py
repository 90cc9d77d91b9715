"""Agent processes for tests: start them, talk to them over raw sockets, stop them."""

from __future__ import annotations

import itertools
import json
import os
import queue
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from axon_nb.host.client import AgentClient, spawn_agent
from axon_nb.host.run_dir import RunDir
from axon_nb.host.store import encode, receive
from axon_nb.records.protocol import wire
from axon_nb.records.protocol.agent import ClusterFacts, Fork
from axon_nb.records.protocol.wire import decode, own_version
from tests.support.processes import ended, until

ENTRY = "tests.host.entries:run"
ROOT = Path(__file__).resolve().parents[2]
_ranks = itertools.count(1)


def facts(name: str = "test", *, keep_alive_s: float = 300.0, owner: str = "") -> ClusterFacts:
    """What an agent stores about a cluster of one rank."""
    return ClusterFacts(name, 1, keep_alive_s=keep_alive_s, version=own_version(), owner=owner)


@dataclass
class Served:
    """One agent, and this process's connection to it."""

    run_dir: RunDir
    client: AgentClient
    process: psutil.Process
    events: queue.SimpleQueue[dict[str, Any]]

    def event(self, **expected: Any) -> dict[str, Any]:
        """Return the next event with these items; drop earlier ones.

        Raises:
            queue.Empty: none arrived within 60 seconds.
        """
        while True:
            event = self.events.get(timeout=60.0)
            if expected.items() <= event.items():
                return event

    def fork(self, *argv: str, **changes: Any) -> tuple[int, int]:
        """Fork a rank that runs `tests.host.entries` with these arguments: (rank, pid)."""
        request = fork_request(self.run_dir, *argv, **changes)
        return request["rank"], self.client.call(decode(Fork, request)).pid

    def gone(self) -> bool:
        """Whether process and folder are gone."""
        return not self.run_dir.path.exists() and ended(self.process)

    def end(self) -> None:
        """Stop it and check that nothing is left, unless a test killed it."""
        if not ended(self.process):
            self.client.stop(60.0)
            assert until(self.gone), "the agent is still there"
        self.client.close()
        self.run_dir.remove()


def serve(*, entry: str, controller: list[str], owner: str) -> Served:
    """Start an agent and connect to it as `owner`."""
    run_dir = RunDir.create()
    pid = spawn_agent(run_dir, controller=controller, entry=entry)
    process = psutil.Process(pid)
    client = AgentClient(run_dir, owner=owner, agent_pid=pid)
    events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    client.on_event(lambda event: events.put(wire.encode(event)))
    return Served(run_dir, client, process, events)


class Shared:
    """One agent per entry point, started on first use and again after a test broke it."""

    def __init__(self) -> None:
        self._agents: dict[str, Served] = {}

    def get(self, entry: str) -> Served:
        """Return a live agent whose ranks run `entry`; with an empty `entry` it forks none."""
        served = self._agents.get(entry)
        if served is None or served.client.closed.is_set():
            if served is not None:
                served.client.close()
            served = self._agents[entry] = serve(entry=entry, controller=[], owner="the tests")
        return served

    def end(self) -> None:
        """Stop all live agents."""
        for served in self._agents.values():
            served.end()


def fork_request(run_dir: RunDir, *argv: str, **changes: Any) -> dict[str, Any]:
    """Build a complete `fork` command for the next free rank number."""
    rank = next(_ranks)
    return {
        "rank": rank,
        "env": dict(os.environ),
        "cwd": "/",
        "path": [str(ROOT), *sys.path],
        "umask": 0o077,
        "log": str(run_dir.path / "log" / f"rank{rank}.log"),
        "argv": list(argv),
        **changes,
    }


class RawPeer:
    """A connection that can send what our own clients never would."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60.0)
        self.sock.connect(str(path))
        self._lines = self._read_lines()

    def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.sock.sendall(data)

    def command(self, **message: Any) -> dict[str, Any]:
        """Send one command and read the next line."""
        self.send(json.dumps(message).encode() + b"\n")
        return self.line()

    def ask_store(self, *parts: bytes) -> list[bytes]:
        """Send one message to the store and read the answer."""
        self.send(encode(list(parts)))
        return receive(self.sock)

    def line(self) -> dict[str, Any]:
        """The next line that the agent sends."""
        return dict(json.loads(next(self._lines)))

    def closed_by_agent(self) -> bool:
        """Wait until the agent has closed the connection; whatever it sent before is skipped."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        return True

    def _read_lines(self) -> Iterator[bytes]:
        with self.sock.makefile("rb") as lines:
            yield from lines

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._lines.close()  # type: ignore[attr-defined]
        self.sock.close()
