"""What a cluster consists of, as the host agent stores it for a notebook that attaches; and what the agent reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from axon_nb.records.compatibility import Verdict
from axon_nb.records.performance.slowness import Slowness
from axon_nb.records.protocol.errors import ProtocolError
from axon_nb.records.protocol.version import Version
from axon_nb.records.protocol.wire import Packed, decode, encode


@dataclass(frozen=True, slots=True)
class EngineInfo:
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


@dataclass(frozen=True, slots=True)
class HostFacts:
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


@dataclass(frozen=True, slots=True)
class ClusterFacts:
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
    idle_stop_s: float = 0.0
    """The cluster stops itself when no cell has run for so many seconds; 0: never."""
    slowness: Slowness = field(default_factory=Slowness)
    """What is slowed while cells run."""
    owner: str = ""
    """The notebook that connected last; the agent fills it in."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The notebook's agent accepts the agent of another host."""

    name: str
    """The name of the host in this cluster."""
    engine_file: Packed
    """The controller's connection file for engines, without its key, and with that of CURVE encrypted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit(ProcessExit):
    """A rank exited."""

    rank: int
    host_lost: str = ""
    """Why its host is no longer connected, reads after the host's name; empty if the rank itself exited."""
    host: str = ""
    """The rank's host; empty: the agent's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerExit(ProcessExit):
    """The ipyparallel controller exited."""


@dataclass(frozen=True, slots=True)
class IdleStop:
    """The cluster stops itself: no cell ran for too long."""

    idle_s: float
    """For how long, in seconds."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The cluster stops because a program asked for it."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The connection is closed, which the client itself reports: the agent is gone."""


AgentEvent = Exit | ControllerExit | IdleStop | Stopped | Closed

_EVENTS: dict[str, type[AgentEvent]] = {
    "exit": Exit,
    "controller_exit": ControllerExit,
    "idle_stop": IdleStop,
    "stopped": Stopped,
    "closed": Closed,
}
_NAMES = {kind: name for name, kind in _EVENTS.items()}


def encode_event(event: AgentEvent) -> dict[str, Any]:
    """Encode an event as the agent sends it."""
    return {"event": _NAMES[type(event)], **encode(event)}


def decode_event(message: Mapping[str, Any]) -> AgentEvent:
    """Decode what `encode_event` made.

    Raises:
        ProtocolError: there is no such event, or a field of it does not fit.
    """
    fields = dict(message)
    if (kind := _EVENTS.get(name := fields.pop("event"))) is None:
        raise ProtocolError(f"The host agent sent an unknown event {name!r}.")
    event: AgentEvent = decode(kind, fields)
    return event
