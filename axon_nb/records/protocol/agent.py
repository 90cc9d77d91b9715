"""The host agent: commands to it, what it reports, and what it stores of a cluster for a notebook that attaches.

A command is one JSON object per line, with the fields of a record beside its name. `hello`, `get_info` and `stop` keep
their names and fields in all versions: `axon-nb list` and `axon-nb stop` use them on clusters that another version
started.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from msgspec import Struct, field

from axon_nb.records.hooks import Verdict
from axon_nb.records.protocol.wire import Packed, Version, decode, encode
from axon_nb.records.slowness import Slowness
from axon_nb.records.spans import HostClock
from axon_nb.records.telemetry import GpuReport

R_co = TypeVar("R_co", covariant=True)
_REFUSED, _FAILED = "refused", "error"


class Command(Struct, Generic[R_co], frozen=True, forbid_unknown_fields=True):
    """A command of a notebook to the host agent."""


class AgentState(Struct, frozen=True):
    """An agent and its processes."""

    pid: int
    ready: bool
    """Whether it can fork ranks."""
    idle: bool
    """Whether it has finished its imports."""
    ranks: Mapping[int, int]
    """Pid of each live rank."""
    controller: int | None
    """Pid of the ipyparallel controller."""
    stopped: tuple[int, ...]
    """Live ranks that are stopped, as by SIGSTOP."""
    controller_stopped: bool
    """Whether the controller is stopped."""
    deaths: Mapping[int, Exit]
    """By rank, for dead ranks that were not replaced."""
    left_ns: int
    """When the last notebook disconnected, on the host's monotonic clock; 0 if none has."""
    attached: bool
    """Whether a notebook is connected."""
    info: ClusterFacts | None = None
    """What a notebook has stored; None until it has."""
    hosts: Mapping[str, HostFacts] = field(default_factory=dict)
    """The other hosts that are connected, by name."""
    hosts_refused: tuple[str, ...] = ()
    """Why hosts could not join, one sentence each."""
    hosts_lost: Mapping[str, str] = field(default_factory=dict)
    """When each host that was lost joined and was lost, by name; also of those that have joined again."""
    clocks: Mapping[str, HostClock] = field(default_factory=dict)
    """The clocks of the other hosts, by name."""
    received_ns: int = 0
    """When the request arrived, on the agent's monotonic clock; 0: unknown. Only for the agents of other hosts."""
    sent_ns: int = 0
    """When the reply was sent, on the same clock."""


class Hello(Command[AgentState], frozen=True):
    """The first command of a connection."""

    owner: str
    """Id of the notebook, which keeps the cluster alive while it is connected; empty for an observer."""
    exclusive: bool = False
    """Whether to be refused if a notebook is connected: of two that attach at once, one gets the cluster."""


class GetInfo(Command[AgentState], frozen=True):
    """Request the state."""


class SetInfo(Command[None], frozen=True):
    """Replace what the agent stores about the cluster."""

    info: ClusterFacts


class ReportActivity(Command[None], frozen=True):
    """A cell has started or ended: a cluster without cells may stop itself."""

    busy: bool
    """Whether a cell runs now."""


class Forked(Struct, frozen=True):
    """A new rank."""

    pid: int


class Fork(Command[Forked], frozen=True):
    """Fork a rank; the agent replies once it has."""

    rank: int
    env: Mapping[str, str]
    """The complete environment."""
    cwd: str
    path: tuple[str, ...]
    """`sys.path`."""
    umask: int
    log: str
    """Path of its log."""
    argv: tuple[str, ...]
    """The engine's arguments."""
    host: str = ""
    """The host; empty: the agent's own. On another, `env`, `cwd` and `path` are added to those of its agent."""


class Signalled(Struct, frozen=True):
    """Whether a signal was sent; False if there is no such rank."""

    sent: bool


class Signal(Command[Signalled], frozen=True):
    """Send a signal to a rank."""

    rank: int
    signal: int


class StorePort(Struct, frozen=True):
    """Where the agent listens."""

    port: int


class ServeStore(Command[StorePort], frozen=True):
    """Serve the rendezvous store over TCP, too."""

    ip: str
    """The only address to listen on."""
    key: str
    """The key that clients must know, in hexadecimal."""


class ServeHosts(Command[StorePort], frozen=True):
    """Let the agents of other hosts join over TCP."""

    ip: str
    """The only address to listen on."""
    key: str
    """The key that they must know, in hexadecimal."""


class MissingFiles(Struct, frozen=True):
    """What a host lacks of a folder."""

    names: tuple[str, ...]


class CompareFiles(Command[MissingFiles], frozen=True):
    """Compare a host's copy of a folder with the original: delete files that are gone, name those that are missing."""

    host: str
    """Empty: the agent's own."""
    folder: str
    """Path of the original on the notebook's host."""
    path: tuple[str, ...]
    """Where in the folder the notebook looks for modules."""
    files: Mapping[str, tuple[int, int]]
    """By name relative to the folder, time of change in nanoseconds, and size."""


class WriteFile(Command[None], frozen=True):
    """Write a part of a file of the copy; the last one puts it in place."""

    host: str
    """Empty: the agent's own."""
    name: str
    content: bytes
    offset: int
    time_ns: int
    """When the original was changed."""
    is_last: bool


class ReadGpus(Command[GpuReport], frozen=True):
    """Ask the driver about its GPUs, not a rank: a rank may hang in CUDA."""


class TakenGpus(Struct, frozen=True):
    """The GPUs that could not be reserved."""

    owners: Mapping[str, str]
    """By GPU, the cluster that has it, as a message names it."""


class ReserveGpus(Command[TakenGpus], frozen=True):
    """Reserve GPUs for the cluster as long as its agent lives."""

    gpus: tuple[str, ...]
    """UUIDs of cards, or names of MIG instances."""
    owner: str
    """Name of the cluster."""


class Stop(Command[None], frozen=True):
    """Stop ranks, controller and agent."""


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def command_name(kind: type[Command[Any]]) -> str:
    """The name of a command: ``get_info`` for `GetInfo`."""
    return _snake_case(kind.__name__)


_COMMANDS: dict[str, type[Command[Any]]] = {command_name(kind): kind for kind in Command.__subclasses__()}


def command_kind(name: object) -> type[Command[Any]] | None:
    """The command of that name; None if there is none."""
    return _COMMANDS.get(name) if isinstance(name, str) else None


def command_message(number: int, command: Command[Any]) -> dict[str, Any]:
    """The message that sends a command; the reply has the same number."""
    return {"id": number, "cmd": command_name(type(command)), **encode(command)}


def refusal(reason: str) -> dict[str, Any]:
    """The fields of a reply that refuses a command; the reason is a sentence for the user."""
    return {_REFUSED: reason}


def failure(problem: str) -> dict[str, Any]:
    """The fields of a reply to a command that could not be performed."""
    return {_FAILED: problem}


def rejection(kind: type[Command[Any]], reply: Mapping[str, Any]) -> str:
    """Why a command of `kind` was not performed, as a sentence; empty if it was."""
    if _FAILED in reply:
        return f"The host agent could not {command_name(kind)}: {reply[_FAILED]}"
    return str(reply.get(_REFUSED, ""))


def decode_outcome(kind: type[Command[R_co]], fields: Mapping[str, Any]) -> R_co:
    """Decode the agent's reply to a command of `kind`.

    Raises:
        ProtocolError: it is not what the command declares.
    """
    declared = typing.get_args(kind.__orig_bases__[0])[0]  # type: ignore[attr-defined]
    return decode(declared, None if declared is type(None) else fields)  # type: ignore[no-any-return]


class EngineInfo(Struct, frozen=True):
    """An engine's host, process and devices, as it reports them."""

    host: str
    pid: int
    """Process id on that host."""
    cores: int
    """Usable cores of the host."""
    gpus: int
    """GPUs that the process sees."""
    version: Version
    """The version that it runs."""
    self_test: Verdict
    """What does not work with the versions installed there."""
    device: str = ""
    """torch device; empty before it has joined."""
    seed: int | None = None
    """Initial seed of torch; None before it has joined."""


class HostFacts(Struct, frozen=True):
    """A host besides the notebook's, as its agent describes it when it joins."""

    name: str
    """Its host name; with a number if another host of the cluster has the same."""
    folder: str
    """The agent's private folder there."""
    cores: int
    """Usable cores."""
    version: Version
    """The version that its agent runs."""
    is_only: bool = False
    """Whether it joins only if no other agent has its name: the notebook had it started, or it has joined before."""


class ClusterFacts(Struct, frozen=True):
    """What the host agent stores about a cluster, for a notebook that attaches."""

    name: str
    world_size: int
    """Number of ranks, or of engines that have not joined a world."""
    keep_alive_s: float
    """How long ranks stay without a notebook, in seconds."""
    version: Version
    """The version of the notebook and the ranks when they started."""
    engines: str = ""
    """Name of the ipyparallel launcher that runs the ranks."""
    ip: str = "127.0.0.1"
    """The address on which the cluster listens."""
    settings: Mapping[str, bool | int | float] = field(default_factory=dict)
    """The cluster's settings, by name."""
    layout: Packed = None
    """Fields of `cluster.launch.placement.Layout`; None: the engines of a program, which no notebook can attach to."""
    rank_info: tuple[EngineInfo, ...] = ()
    """What each rank reported when it joined."""
    hosts: str = ""
    """The `--hosts` option that it was started with; empty: all ranks are on the notebook's host."""
    sync: str = ""
    """The `--sync` option: the folder that other hosts have a copy of; empty: none."""
    idle_stop_s: float = 0.0
    """The cluster stops itself when no cell has run for so many seconds; 0: never."""
    slowness: Slowness = field(default_factory=Slowness)
    """What is slowed while cells run."""
    owner: str = ""
    """The notebook that connected last; the agent fills it in."""


class Welcome(Struct, frozen=True):
    """The notebook's agent accepts the agent of another host."""

    name: str
    """The name of the host in this cluster."""
    engine_file: Packed
    """The controller's connection file for engines, without its key, and with that of CURVE encrypted."""


class _Event(Struct, frozen=True, tag_field="event", tag=_snake_case):
    pass


class ProcessExit(_Event, frozen=True, kw_only=True):
    """A process exited."""

    pid: int
    code: int
    """Exit code, or minus the signal number."""
    time_ns: int
    """When the agent noticed, on the host's monotonic clock."""
    out_of_memory: bool | None = None
    """Whether Linux killed a process for lack of memory; None if unknown."""
    last_output: str = ""
    """What it wrote just before; may be empty."""
    crash: str = ""
    """Python's report of a crash; only of ranks, may be empty."""


class Exit(ProcessExit, frozen=True, kw_only=True):
    """A rank exited."""

    rank: int
    host_lost: str = ""
    """Why its host is no longer connected, reads after the host's name; empty if the rank itself exited."""
    host: str = ""
    """The rank's host; empty: the agent's own."""


class ControllerExit(ProcessExit, frozen=True, kw_only=True):
    """The ipyparallel controller exited."""


class IdleStop(_Event, frozen=True):
    """The cluster stops itself: no cell ran for too long."""

    idle_s: float
    """For how long, in seconds."""


class Stopped(_Event, frozen=True):
    """The cluster stops because a program asked for it."""


class Closed(_Event, frozen=True):
    """The connection is closed, which the client itself reports: the agent is gone."""


AgentEvent = Exit | ControllerExit | IdleStop | Stopped | Closed
