"""Commands to the host agent: one JSON object per line, with the fields of a record beside its name.

`hello`, `get_info` and `stop` keep their names and fields in all versions: `axon-nb list` and `axon-nb stop` use them
on clusters that another version started.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from axon_nb.records.clocks import HostClock
from axon_nb.records.protocol.cluster import ClusterFacts, Exit, HostFacts
from axon_nb.records.protocol.wire import decode, encode
from axon_nb.records.telemetry import GpuReport

R_co = TypeVar("R_co", covariant=True)
_REFUSED, _FAILED = "refused", "error"


class Command(Generic[R_co]):
    """A command of a notebook to the host agent."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class AgentState:
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
    clocks: Mapping[str, HostClock] = field(default_factory=dict)
    """The clocks of the other hosts, by name."""
    received_ns: int = 0
    """When the request arrived, on the agent's monotonic clock; 0: unknown. Only for the agents of other hosts."""
    sent_ns: int = 0
    """When the reply was sent, on the same clock."""


@dataclass(frozen=True, slots=True)
class Hello(Command[AgentState]):
    """The first command of a connection."""

    owner: str
    """Id of the notebook, which keeps the cluster alive while it is connected; empty for an observer."""
    exclusive: bool = False
    """Whether to be refused if a notebook is connected: of two that attach at once, one gets the cluster."""


@dataclass(frozen=True, slots=True)
class GetInfo(Command[AgentState]):
    """Request the state."""


@dataclass(frozen=True, slots=True)
class SetInfo(Command[None]):
    """Replace what the agent stores about the cluster."""

    info: ClusterFacts


@dataclass(frozen=True, slots=True)
class ReportActivity(Command[None]):
    """A cell has started or ended: a cluster without cells may stop itself."""

    busy: bool
    """Whether a cell runs now."""


@dataclass(frozen=True, slots=True)
class Forked:
    """A new rank."""

    pid: int


@dataclass(frozen=True, slots=True)
class Fork(Command[Forked]):
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


@dataclass(frozen=True, slots=True)
class Signalled:
    """Whether a signal was sent; False if there is no such rank."""

    sent: bool


@dataclass(frozen=True, slots=True)
class Signal(Command[Signalled]):
    """Send a signal to a rank."""

    rank: int
    signal: int


@dataclass(frozen=True, slots=True)
class StorePort:
    """Where the agent listens."""

    port: int


@dataclass(frozen=True, slots=True)
class ServeStore(Command[StorePort]):
    """Serve the rendezvous store over TCP, too."""

    ip: str
    """The only address to listen on."""
    key: str
    """The key that clients must know, in hexadecimal."""


@dataclass(frozen=True, slots=True)
class ServeHosts(Command[StorePort]):
    """Let the agents of other hosts join over TCP."""

    ip: str
    """The only address to listen on."""
    key: str
    """The key that they must know, in hexadecimal."""


@dataclass(frozen=True, slots=True)
class ReadGpus(Command[GpuReport]):
    """Ask the driver about its GPUs, not a rank: a rank may hang in CUDA."""


@dataclass(frozen=True, slots=True)
class TakenGpus:
    """The GPUs that could not be reserved."""

    owners: Mapping[str, str]
    """By GPU, the cluster that has it, as a message names it."""


@dataclass(frozen=True, slots=True)
class ReserveGpus(Command[TakenGpus]):
    """Reserve GPUs for the cluster as long as its agent lives."""

    gpus: tuple[str, ...]
    """UUIDs of cards, or names of MIG instances."""
    owner: str
    """Name of the cluster."""


@dataclass(frozen=True, slots=True)
class Stop(Command[None]):
    """Stop ranks, controller and agent."""


def command_name(kind: type[Command[Any]]) -> str:
    """The name of a command: ``get_info`` for `GetInfo`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


_COMMANDS: dict[str, type[Command[Any]]] = {
    command_name(kind): kind
    for kind in (
        Hello,
        GetInfo,
        SetInfo,
        ReportActivity,
        Fork,
        Signal,
        ServeStore,
        ServeHosts,
        ReadGpus,
        ReserveGpus,
        Stop,
    )
}


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
