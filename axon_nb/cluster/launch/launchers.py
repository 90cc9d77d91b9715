"""The ipyparallel launchers called ``axon``, for the controller and the engines that the host agent runs.

`ipyparallel.Cluster(engines="axon")` also works by itself: if there is no agent in the profile's parent folder, the
engine launcher starts its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import zmq
from ipyparallel.cluster.launcher import ControllerLauncher, EngineLauncher
from traitlets import Float, Unicode

from axon_nb.cluster.launch.placement import LOOPBACK, Layout, rank_environment
from axon_nb.cluster.rpc import forget_engine
from axon_nb.errors import StartError
from axon_nb.host.client import AgentClient, outcome, spawn_agent
from axon_nb.host.run_dir import RunDir
from axon_nb.records.protocol.agent import (
    AgentEvent,
    Closed,
    ClusterFacts,
    Exit,
    Fork,
    GetInfo,
    HostFacts,
    SetInfo,
    Signal,
)
from axon_nb.records.protocol.recovery import ENGINE_ENTRY
from axon_nb.records.protocol.wire import own_version

# Set by the kernel, pytest or ipyparallel for this process only; a rank must not inherit them.
_NOT_INHERITED = ("IPP_CLUSTER_ID", "IPP_CONNECTION_INFO", "IPP_PROFILE_DIR", "JPY_PARENT_PID", "PYTEST_CURRENT_TEST")


_NUM_CHANNELS = 32
"""More than an ipyparallel controller opens; it would choose the names of others at random."""


def controller_command(run_dir: RunDir, *, ip: str | None = None) -> list[str]:
    """Return the command line of an ipyparallel controller in one process.

    Args:
        run_dir: The cluster's folder.
        ip: Address to listen on; None: Unix sockets in that folder.
    """
    if ip is None:
        _link_channels(run_dir)
        address = ["--transport=ipc", f"--ip={run_dir.channels}", f"--ports=1-{_NUM_CHANNELS}"]
        ip = LOOPBACK
    else:
        # Without it, whoever reaches a port can read output and make messages disappear.
        address = [f"--ip={ip}", f"--IPController.enable_curve={zmq.has('curve')}"]
    return [
        sys.executable,
        "-P",
        "-c",
        "from axon_nb.host.children import run_controller; run_controller()",
        f"--profile-dir={run_dir.profile}",
        *address,
        f"--location={ip}",
        "--log-level=30",
        "--nodb",
        # One process with threads: by default there are eight scheduler processes, which survive a killed controller.
        "--IPController.use_threads=True",
        # An engine is registered at its first heartbeat: the default of 3000 ms would be most of a start's time.
        "--HeartMonitor.period=100",
        "--HeartMonitor.max_heartmonitor_misses=600",
        # A rank without a heartbeat within the default of 30 s would never be reported, and wait forever.
        "--IPController.registration_timeout=600",
    ]


def _link_channels(run_dir: RunDir) -> None:
    # ipyparallel's controller puts a "-" between the path and the number of a Unix socket, its clients and engines a
    # ":". A link may be made before its socket.
    for number in range(1, _NUM_CHANNELS + 1):
        Path(f"{run_dir.channels}:{number}").symlink_to(f"{run_dir.channels.name}-{number}")


def fork_request(
    rank: int,
    connection_file: Path,
    extra_env: Mapping[str, str],
    folder: str,
    engine_args: Sequence[str] = (),
    *,
    host: HostFacts | None = None,
) -> Fork:
    """Return what the agent needs to fork the engine of `rank`, with this process's current environment and path.

    On another host it gets the environment and the path of the agent there.

    Args:
        rank: The engine's id.
        connection_file: The controller's file for engines, in the profile's `security` folder.
        extra_env: Environment variables besides this process's.
        folder: Working directory.
        engine_args: More arguments of the engine.
        host: Where to fork it; None: on this host.
    """
    profile = connection_file.parent.parent
    env = dict(extra_env)
    if host is None:
        (profile / "log").mkdir(mode=0o700, parents=True, exist_ok=True)
        env = {**os.environ, **RunDir(profile.parent).ipython_env(), **extra_env}
    else:
        profile = RunDir(Path(host.folder)).profile
        connection_file = RunDir(Path(host.folder)).engine_file
    return Fork(
        rank=rank,
        env={name: value for name, value in env.items() if name not in _NOT_INHERITED},
        cwd=folder,
        path=tuple(sys.path) if host is None else (),
        umask=_umask(),
        log=str(profile / "log" / f"rank{rank}.log"),
        host="" if host is None else host.name,
        argv=(
            f"--file={connection_file}",
            f"--profile-dir={profile}",
            f"--IPEngine.id={rank}",
            f"--work-dir={folder}",  # the default is the folder in which the agent imported it
            "--IPEngine.enable_nanny=False",
            "--IPEngine.max_heartbeat_misses=0",
            "--IPEngine.timeout=60",  # the default of 5 s is too short for the controller of a busy machine
            "--log-level=30",
            *engine_args,
        ),
    )


def rank_hosts(agent: AgentClient, layout: Layout) -> list[HostFacts | None]:
    """Return the host of each rank; None for the notebook's own.

    Raises:
        StartError: one is not connected.
    """
    if not any(layout.hosts):
        return [None] * layout.num_ranks
    state = agent.call(GetInfo())
    known = state.hosts
    for name in dict.fromkeys(layout.hosts):
        if name and name not in known:
            story = state.hosts_lost.get(name)
            raise StartError(
                f"The host {name!r} is not connected. Run `axon-nb host --join` there again, with the key and the "
                "address of the start, or run `%distributed restart`."
                + (f" What happened to it: {story}." if story else "")
            )
    return [known[name] if name else None for name in layout.hosts]


def fork_engines(agent: AgentClient, layout: Layout, ranks: Iterable[int]) -> None:
    """Fork the engines of ranks where the layout has them.

    Raises:
        StartError: the agent cannot, or a host is not connected.
        ClusterLostError: the agent is gone or does not reply.
    """
    hosts, file, folder = rank_hosts(agent, layout), agent.run_dir.engine_file, os.getcwd()
    commands = [fork_request(rank, file, rank_environment(layout, rank), folder, host=hosts[rank]) for rank in ranks]
    for reply in [agent.send(command) for command in commands]:
        agent.result(Fork, reply)


class AgentControllerLauncher(ControllerLauncher):
    """The controller, which the host agent has already started."""

    def find_args(self) -> list[str]:
        """Return what ipyparallel logs as the command."""
        return ["axon_nb host agent"]

    async def start(self) -> None:
        """Do nothing: the agent has started the controller."""
        self.notify_start({})

    async def stop(self) -> None:
        """Do nothing: the controller exits with its agent."""
        self.notify_stop({})

    def poll(self) -> int | None:
        """Return None, which means running: the controller runs as long as its agent."""
        return None


class ForkedEngineSetLauncher(EngineLauncher):
    """Engines forked from the host agent, with fixed ids: engine i gets id i."""

    fork_timeout = Float(120.0, config=True, help="Timeout in seconds for the agent to get ready and fork.")
    work_dir = Unicode(".")

    _own_run_dir: RunDir | None = None
    _stopping = False

    def find_args(self) -> list[str]:
        """Return what ipyparallel logs as the command."""
        return ["axon_nb forked engines"]

    async def start(self, n: int) -> list[int]:
        """Fork `n` engines; return their pids."""
        self.n = n
        self.agent = agent = await asyncio.to_thread(self._find_agent)
        agent.on_event(self._on_event)
        self._live = set(range(n))
        self._main_loop = self.loop
        futures = [agent.send(self._request(rank)) for rank in range(n)]
        replies = await asyncio.gather(*(asyncio.wait_for(asyncio.wrap_future(f), self.fork_timeout) for f in futures))
        pids = [outcome(Fork, reply).pid for reply in replies]
        self.notify_start(pids)
        return pids

    def _request(self, rank: int) -> Fork:
        folder = os.path.abspath(self.work_dir)
        return fork_request(rank, Path(self.connection_files["engine"]), self.environment, folder, self.engine_args)

    def _find_agent(self) -> AgentClient:
        run_dir = RunDir(Path(self.profile_dir).parent)
        pid = None
        if not run_dir.agent_socket.exists():
            run_dir = self._own_run_dir = RunDir.create()
            pid = spawn_agent(run_dir, controller=[], entry=ENGINE_ENTRY)
        client = AgentClient(run_dir, owner=f"pid-{os.getpid()}", agent_pid=pid)
        if client.hello_reply.info is None:
            client.call(SetInfo(ClusterFacts(self.identifier, self.n, keep_alive_s=0.0, version=own_version())))
        return client

    def _on_event(self, event: AgentEvent) -> None:
        if isinstance(event, Closed):
            self._live = set[int]()
        elif isinstance(event, Exit):
            self._live = self._live - {event.rank}
            if self._own_run_dir is not None and not self._stopping:
                forget_engine(Path(self.connection_files["client"]), event.rank)
        if not self._live and self.state == "running":
            self._main_loop.add_callback(self.notify_stop, {"exit_code": getattr(event, "code", None)})

    def signal(self, sig: int) -> None:
        """Send a signal to every engine."""
        for rank in sorted(self._live):
            self.agent.send(Signal(rank, int(sig)))

    async def stop(self) -> None:
        """Stop the engines; an agent that this launcher started exits with them."""
        self._stopping = True
        if self._own_run_dir is not None:
            self.agent.stop()  # in this thread: no thread can be started at interpreter exit
            return
        self.signal(signal.SIGTERM)
        end = time.monotonic() + 5.0
        while self._live and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if self._live:
            self.signal(signal.SIGKILL)

    async def join(self, timeout: float | None = None) -> None:
        """Wait for all engines to exit."""
        end = None if timeout is None else time.monotonic() + timeout
        while self._live:
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"engines {sorted(self._live)} did not exit within {timeout} s")
            await asyncio.sleep(0.05)


def _umask() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    except OSError:
        pass
    return 0o022
