"""What a host agent reports by itself to those that are connected: processes that exited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from axon_nb.records.protocol.errors import ProtocolError
from axon_nb.records.protocol.wire import decode, encode

__all__ = [
    "AgentEvent",
    "Closed",
    "ControllerExit",
    "Exit",
    "IdleStop",
    "ProcessExit",
    "decode_event",
    "encode_event",
]


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
class Closed:
    """The connection is closed, which the client itself reports: the agent is gone."""


AgentEvent = Exit | ControllerExit | IdleStop | Closed

_EVENTS: dict[str, type[AgentEvent]] = {
    "exit": Exit,
    "controller_exit": ControllerExit,
    "idle_stop": IdleStop,
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
