"""The notebook's connection to one cluster: its folder, the host agent and the ipyparallel client.

It also identifies the kernel, so that a notebook finds its own cluster after a kernel restart. `Prewarm` starts the
host agent and the controller in the background, before ranks are needed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from axon_nb.cluster.launch.launchers import controller_command
from axon_nb.cluster.launch.placement import LOOPBACK
from axon_nb.cluster.rpc import RankClient, connect
from axon_nb.errors import StartError
from axon_nb.host.client import AgentClient, spawn_agent
from axon_nb.host.run_dir import RunDir
from axon_nb.records.environment import SESSION_NAME
from axon_nb.records.protocol.agent import GetInfo
from axon_nb.records.protocol.recovery import ENGINE_ENTRY

if TYPE_CHECKING:
    from axon_nb.cluster.launch.folder_sync import FolderSync

# ipyparallel and tornado log what happens at a stop; keep that out of the notebook, also if it logs everything.
_ipyparallel_log = logging.getLogger("axon_nb.ipyparallel")
_ipyparallel_log.addHandler(logging.NullHandler())
_ipyparallel_log.propagate = False
_CONTROLLER_TIMEOUT_S = 120.0
"""A controller that exits is noticed at once; one that runs may be slow on a busy machine."""
_PORT_TAKEN = "Address already in use"
"""ipyparallel finds free ports and opens them a moment later: another process may take one in between."""


def _kernel_file() -> str:
    app = sys.modules.get("ipykernel.kernelapp")
    if app is not None and app.IPKernelApp.initialized():
        return Path(app.IPKernelApp.instance().connection_file).stem
    return ""


def in_kernel() -> bool:
    """Whether this process is a notebook's kernel."""
    return bool(_kernel_file())


def kernel_id() -> str:
    """Return an id that survives a kernel restart: the name of its connection file; in a script, one from the pid."""
    return _kernel_file() or f"pid-{os.getpid()}"


def default_name() -> str:
    """Return the default name of a cluster: the notebook's name if the server provides it."""
    session = SESSION_NAME.get()
    stem = Path(session).stem if session.endswith(".ipynb") else ""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", stem)[:32].strip("._-") or "default"


class Connection(Struct):
    """Open connections to the agent and the controller of one cluster."""

    run_dir: RunDir
    agent: AgentClient
    client: RankClient
    ip: str = LOOPBACK
    """Address on which ranks on other hosts reach the controller and the rendezvous store; loopback: there are none."""
    folder: FolderSync | None = None
    """What `--sync` brings to other hosts."""

    def connect_directly(self, ranks: Iterable[int]) -> None:
        """Have ranks that have joined take cells and calls without the controller, if they are on this host."""
        path = self.run_dir.path / f"direct-{os.getpid()}-{id(self.client):x}"
        self.client.connect_directly(path, socket.gethostname(), ranks)

    def sync(self, folder: str) -> FolderSync:
        """Bring a folder to the other hosts before each cell."""
        from axon_nb.cluster.launch.folder_sync import FolderSync

        self.folder = FolderSync(self.agent, folder)
        return self.folder

    def close(self) -> None:
        """Disconnect, and leave the cluster running."""
        with contextlib.suppress(Exception):
            self.client.close(linger=0)
        self.agent.close()

    def stop(self) -> bool:
        """Stop the cluster; return whether the agent has exited."""
        with contextlib.suppress(Exception):
            self.client.close(linger=0)
        return self.agent.stop()


def open_new(*, ip: str | None = None, ranks_here: bool = True) -> Connection:
    """Start a host agent and a controller, and connect to both; the agent imports torch meanwhile.

    Args:
        ip: Address on which the controller listens; None: on Unix sockets in the cluster's private folder.
        ranks_here: Whether the agent is to fork ranks; if not, it imports torch once it has to.

    Raises:
        StartError: one of them failed to start.
    """
    try:
        return _open_new(ip, ranks_here=ranks_here)
    except StartError as error:
        if _PORT_TAKEN not in str(error):
            raise
    return _open_new(ip, ranks_here=ranks_here)


def _open_new(ip: str | None, *, ranks_here: bool) -> Connection:
    run_dir = RunDir.create()
    try:
        controller = controller_command(run_dir, ip=ip)
        pid = spawn_agent(run_dir, controller=controller, entry=ENGINE_ENTRY, imports_later=not ranks_here)
        agent = AgentClient(run_dir, owner=kernel_id(), agent_pid=pid)
    except BaseException:
        run_dir.remove()
        raise
    return _with_client(run_dir, agent, ip or LOOPBACK)


def open_existing(run_dir: RunDir) -> Connection:
    """Connect to a running cluster, and become its owner.

    Raises:
        StartError: another notebook is connected to it.
    """
    agent = AgentClient(run_dir, owner=kernel_id(), exclusive=True)
    facts = agent.hello_reply.info
    return _with_client(run_dir, agent, LOOPBACK if facts is None else facts.ip)


def _with_client(run_dir: RunDir, agent: AgentClient, ip: str) -> Connection:
    try:
        client = connect(run_dir.client_file, timeout_s=_CONTROLLER_TIMEOUT_S, alive=lambda: not agent.closed.is_set())
    except Exception:
        reason = agent.end_reason  # read it first: stopping the agent also stops a controller that was only slow
        agent.stop()
        if reason:
            raise StartError(reason) from None
        raise
    except BaseException:
        agent.stop()
        raise
    return Connection(run_dir, agent, client, ip)


class Prewarm:
    """The warm connection of one notebook: to a host agent that no cluster uses yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: Future[Connection] | None = None

    def start(self) -> None:
        """Start the warm-up, unless there is one."""
        future: Future[Connection] = Future()
        with self._lock:
            if self._pending is not None:
                return
            self._pending = future

        def work() -> None:
            try:
                future.set_result(open_new())
            except BaseException as error:
                future.set_exception(error)

        atexit.register(self.discard)
        threading.Thread(target=work, name="axon_nb-warm-up", daemon=True).start()

    def take(self, timeout_s: float) -> Connection:
        """Wait for the warm connection and return it; open a new one if there is none or it failed.

        Args:
            timeout_s: How long to wait for the warm one, in seconds.

        Raises:
            StartError: the new one failed, too.
        """
        future = self._pop()
        if future is not None:
            try:
                connection = future.result(timeout_s)
                if not connection.agent.closed.is_set():
                    return connection
                connection.close()
            except Exception:  # if the cause persists, the new start reports it
                pass
        return open_new()

    def discard(self) -> None:
        """Stop a warm-up that was not used."""
        future = self._pop()
        if future is not None:
            with contextlib.suppress(Exception):  # it failed to start, or is gone already
                future.result(30.0).stop()

    def _pop(self) -> Future[Connection] | None:
        with self._lock:
            future, self._pending = self._pending, None
        return future

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until the agent has finished its imports; False if there is none, or after `timeout_s` seconds."""
        with self._lock:
            future = self._pending
        end = time.monotonic() + timeout_s
        while future is not None and time.monotonic() < end:
            if future.result(timeout_s).agent.call(GetInfo()).idle:
                return True
            time.sleep(0.05)
        return False
