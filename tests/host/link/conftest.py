"""A cluster's agent, and agents of other hosts that join it over TCP on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from axon_nb.host.connections import link_key
from axon_nb.records.environment import JOIN_KEY
from axon_nb.records.protocol.agent import Fork, Forked, GetInfo, HostFacts, ServeHosts
from axon_nb.records.protocol.wire import decode
from tests.support.agents import ENTRY, ROOT, Served, fork_request, serve
from tests.support.processes import until

KEY = "the key of the cluster"
IP = "127.0.0.2"
FAR = "far-host"
_MAIN = """
import sys
from axon_nb.errors import StartError
from axon_nb.host.agent import join_cluster
try:
    join_cluster(sys.argv[1], name=sys.argv[2], entry=sys.argv[3], read_key=sys.argv[4] == "True")
except StartError as error:
    sys.exit(str(error))
"""


@dataclass
class Joining:
    """A cluster's agent that hosts can join, and the processes that did."""

    first: Served
    address: str
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self,
        name: str = FAR,
        *,
        key: str = KEY,
        address: str = "",
        behind: Sequence[str] = (),
        by_launcher: bool = False,
    ) -> subprocess.Popen[str]:
        """Start the agent of another host, `behind` a command that runs it; a launcher passes the key as its input."""
        process = subprocess.Popen(
            [*behind, sys.executable, "-c", _MAIN, address or self.address, name, ENTRY, str(by_launcher)],
            env={**os.environ, "PYTHONPATH": str(ROOT), JOIN_KEY.name: key},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(f"{key}\n" * by_launcher)
        process.stdin = None  # `communicate` would flush it
        self.started.append(process)
        return process

    def hosts(self) -> dict[str, HostFacts]:
        """The hosts that are connected."""
        return dict(self.first.client.call(GetInfo()).hosts)

    def join(self, name: str = FAR) -> tuple[subprocess.Popen[str], HostFacts]:
        """Have another host join; its process, and what it said about itself."""
        before = set(self.hosts())
        process = self.start(name)
        assert until(lambda: set(self.hosts()) - before), process.communicate(timeout=60)
        (new,) = set(self.hosts()) - before
        return process, self.hosts()[new]

    def fork(self, facts: HostFacts, *argv: str, **changes: Any) -> tuple[int, int]:
        """Fork a rank on another host: its number and pid."""
        log = f"{facts.folder}/log/rank.err"  # where the agent looks for the last output
        command = fork_request(self.first.run_dir, *argv, env={}, host=facts.name, log=log, **changes)
        forked: Forked = self.first.client.call(decode(Fork, command))
        return command["rank"], forked.pid

    def end(self) -> None:
        """Stop everything; nothing may be left."""
        self.first.end()
        for process in self.started:
            process.wait(60)
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def joining() -> Iterator[Joining]:
    """A cluster's agent that hosts can join."""
    first = serve(entry="", controller=[], owner="the tests")
    port = first.client.call(ServeHosts(IP, link_key(KEY.encode()).hex())).port
    joining = Joining(first, f"{IP}:{port}")
    yield joining
    joining.end()


class Wiretap:
    """Stands before an address, hands on both ways and keeps what it has seen."""

    def __init__(self, target: str) -> None:
        self.seen = b""
        self._target = target.partition(":")[0], int(target.partition(":")[2])
        self._listener = socket.create_server((IP, 0))
        self.address = f"{IP}:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Wiretap:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            near, far = self._listener.accept()[0], socket.create_connection(self._target)
            self._open += [near, far]
            threading.Thread(target=self._copy, args=(near, far), daemon=True).start()
            self._copy(far, near)

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.seen += data
                sink.sendall(data)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a killed one whose parent has not asked for its status does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def gone(pid: int, folder: str) -> bool:
    """Whether a process and its folder are gone."""
    return not is_alive(pid) and not Path(folder).exists()
