"""Launchers that ipyparallel knows as ``axon``: the controller and the engines of the host agent.

`ipyparallel.Cluster(engines="axon")` works by itself too: without an agent in the profile's parent folder the engine
launcher starts one of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ipyparallel.cluster.launcher import ControllerLauncher, EngineLauncher
from traitlets import Any as AnyTrait
from traitlets import Dict, Float, Unicode

from axon_nb.cluster.rpc.client import tell_controller
from axon_nb.host.client import AgentClient, outcome, spawn_agent
from axon_nb.host.run_dir import RunDir
from axon_nb.records.protocol.agent import AgentEvent, Closed, Exit, Fork, SetInfo, Signal
from axon_nb.records.protocol.joining import ENGINE_ENTRY

__all__ = ["AgentControllerLauncher", "ForkedEngineSetLauncher", "controller_command", "fork_request"]

# Set by the kernel, by pytest or by ipyparallel for this very process; a rank must not believe them.
_NOT_INHERITED = ("IPP_CLUSTER_ID", "IPP_CONNECTION_INFO", "IPP_PROFILE_DIR", "JPY_PARENT_PID", "PYTEST_CURRENT_TEST")


def controller_command(run_dir: RunDir, *, ip: str = "127.0.0.1") -> list[str]:
    """The command line of an ipyparallel controller in one process, listening on `ip` alone."""
    return [
        sys.executable,
        "-P",
        "-m",
        "ipyparallel.controller",
        f"--profile-dir={run_dir.profile}",
        f"--ip={ip}",
        f"--location={ip}",
        "--log-level=30",
        "--nodb",
        # One process with threads: the default's eight scheduler processes survive a killed controller.
        "--IPController.use_threads=True",
        # An engine is registered at its first heartbeat: the default of 3000 ms is most of a start's time.
        "--HeartMonitor.period=100",
        "--HeartMonitor.max_heartmonitor_misses=600",
        # A rank whose heart does not beat in the default of 30 s would not be told of any more, and wait for ever.
        "--IPController.registration_timeout=600",
    ]


def fork_request(
    rank: int, connection_file: Path, extra_env: Mapping[str, str], folder: str, engine_args: Sequence[str] = ()
) -> Fork:
    """What the agent needs to fork the engine of `rank`: environment and path are this process's as of now.

    Args:
        rank: The engine's id.
        connection_file: The controller's file for engines, in the profile's `security` folder.
        extra_env: Environment variables besides this process's.
        folder: Working directory.
        engine_args: More arguments of the engine.
    """
    profile = connection_file.parent.parent
    log_dir = profile / "log"
    log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    env = {**os.environ, **RunDir(profile.parent).ipython_env(), **extra_env}
    return Fork(
        rank=rank,
        env={name: value for name, value in env.items() if name not in _NOT_INHERITED},
        cwd=folder,
        path=tuple(sys.path),
        umask=_umask(),
        log=str(log_dir / f"rank{rank}.log"),
        argv=(
            f"--file={connection_file}",
            f"--profile-dir={profile}",
            f"--IPEngine.id={rank}",
            f"--work-dir={folder}",  # its default is the folder in which the agent imported it
            "--IPEngine.enable_nanny=False",
            "--IPEngine.max_heartbeat_misses=0",
            "--IPEngine.timeout=60",  # its default is 5 s, which a controller may need on a busy machine
            "--log-level=30",
            *engine_args,
        ),
    )


class AgentControllerLauncher(ControllerLauncher):
    """The controller that the host agent has started already."""

    running_agent = AnyTrait(help="The notebook's connection to the host agent.")

    def find_args(self) -> list[str]:
        """What ipyparallel logs."""
        return ["axon_nb host agent"]

    async def start(self) -> None:
        """Nothing to do: the agent started the controller as its first act."""
        self.notify_start({})

    async def stop(self) -> None:
        """Nothing to do: the controller ends with its agent."""
        self.notify_stop({})

    def poll(self) -> int | None:
        """None: while its agent lives, so does the controller."""
        return None


class ForkedEngineSetLauncher(EngineLauncher):
    """Engines forked from the host agent, ids pinned: the engine of index i gets id i."""

    agent = AnyTrait(help="The notebook's connection to the host agent; None: found or started.")
    rank_env = Dict(help="Environment variables of the ranks besides the notebook's own.")
    fork_timeout = Float(120.0, config=True, help="Limit in seconds for the agent to get ready and fork.")
    work_dir = Unicode(".")

    _own_run_dir: RunDir | None = None
    _stopping = False

    def find_args(self) -> list[str]:
        """What ipyparallel logs."""
        return ["axon_nb forked engines"]

    async def start(self, n: int) -> list[int]:
        """Fork `n` engines; returns their pids."""
        self.n = n
        agent = self.agent or await asyncio.to_thread(self._find_agent)
        self.agent = agent
        agent.on_event(self._on_event)
        self._living = set(range(n))
        self._main_loop = self.loop
        futures = [agent.send(self._request(rank)) for rank in range(n)]
        replies = await asyncio.gather(*(asyncio.wait_for(asyncio.wrap_future(f), self.fork_timeout) for f in futures))
        pids = [outcome(Fork, reply).pid for reply in replies]
        self.notify_start(pids)
        return pids

    def _request(self, rank: int) -> Fork:
        folder = os.path.abspath(self.work_dir)
        env = {**self.environment, **self.rank_env}
        return fork_request(rank, Path(self.connection_files["engine"]), env, folder, self.engine_args)

    def _find_agent(self) -> AgentClient:
        run_dir = RunDir(Path(self.profile_dir).parent)
        pid = None
        if not run_dir.agent_socket.exists():
            run_dir = self._own_run_dir = RunDir.create()
            pid = spawn_agent(run_dir, controller=[], entry=ENGINE_ENTRY)
        client = AgentClient(run_dir, owner=f"pid-{os.getpid()}", agent_pid=pid)
        client.call(SetInfo({"world_size": self.n, "name": self.identifier, "keep_alive_s": 0.0}))
        return client

    def _on_event(self, event: AgentEvent) -> None:
        if isinstance(event, Closed):
            self._living = set[int]()
        elif isinstance(event, Exit):
            self._living = self._living - {event.rank}
            if self._own_run_dir is not None and not self._stopping:
                tell_controller(Path(self.connection_files["client"]), event.rank)
        if not self._living and self.state == "running":
            self._main_loop.add_callback(self.notify_stop, {"exit_code": getattr(event, "code", None)})

    def signal(self, sig: int) -> None:
        """Send a signal to every engine."""
        for rank in sorted(self._living):
            self.agent.send(Signal(rank, int(sig)))

    async def stop(self) -> None:
        """End the engines; an agent of our own ends with them."""
        self._stopping = True
        if self._own_run_dir is not None:
            self.agent.stop()  # in place: at the end of the interpreter no thread can be started
            return
        self.signal(signal.SIGTERM)
        end = time.monotonic() + 5.0
        while self._living and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if self._living:
            self.signal(signal.SIGKILL)

    async def join(self, timeout: float | None = None) -> None:
        """Wait for all engines to end."""
        end = None if timeout is None else time.monotonic() + timeout
        while self._living:
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"engines {sorted(self._living)} did not end in {timeout} s")
            await asyncio.sleep(0.05)


def _umask() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    except OSError:
        pass
    return 0o022
