"""What a rank does now: its state, its stack, what it waits for, its job, its spans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from axon_nb.records.placement import MeshInfo
from axon_nb.records.protocol.messages import Event, RankCall, Request
from axon_nb.records.protocol.wire import Packed
from axon_nb.records.stacks import StackFrame
from axon_nb.records.telemetry import RankState
from axon_nb.records.training.job import JobReport
from axon_nb.records.waits import RankWaits

__all__ = [
    "DescribeVariables",
    "GetVariableParts",
    "JobReply",
    "JobRequest",
    "MeshReply",
    "MeshRequest",
    "SpansReply",
    "SpansRequest",
    "StacksReply",
    "StacksRequest",
    "StatusRequest",
    "TelemetryEvent",
    "VariableFacts",
    "VariableParts",
    "WaitsReply",
    "WaitsRequest",
    "WatchRequest",
]


@dataclass(frozen=True, slots=True)
class StatusRequest(Request[RankState]):
    """Sample what the main thread does."""


@dataclass(frozen=True, slots=True)
class WatchRequest(Request[None]):
    """Send samples for a while; a new request replaces the last one."""

    hz: float
    """Samples per second."""
    seconds: float
    """For how long; 0 ends it."""


@dataclass(frozen=True, slots=True)
class TelemetryEvent(Event):
    """The samples of a beat."""

    rank: int
    states: tuple[RankState, ...]


@dataclass(frozen=True, slots=True)
class WaitsReply:
    """What a rank waits for."""

    waits: RankWaits
    collectives: int
    """Collectives begun in this cell, in all groups together."""


@dataclass(frozen=True, slots=True)
class WaitsRequest(Request[WaitsReply]):
    """Ask which communication calls are in progress."""


@dataclass(frozen=True, slots=True)
class StacksReply:
    """Where a rank is."""

    state: RankState
    frames: tuple[StackFrame, ...]
    """Outermost first; empty when no cell runs."""


@dataclass(frozen=True, slots=True)
class StacksRequest(Request[StacksReply]):
    """Ask for the Python stack of the cell."""


@dataclass(frozen=True, slots=True)
class SpansReply:
    """The spans since the last request."""

    spans: Packed
    """Rows of `Span`."""
    next: int
    """Number of the next span."""
    lost: int
    """Spans that were dropped before they were read."""
    groups: Mapping[str, tuple[int, ...]]
    """Global ranks of the groups in them, by name."""
    now_ns: int
    """The rank's clock, nanoseconds."""
    process: int
    """The rank's pid: another process counts from 0."""


@dataclass(frozen=True, slots=True)
class SpansRequest(Request[SpansReply]):
    """Fetch spans."""

    since: int
    """Number of the first span wanted; 0: the oldest one that is kept."""
    watch: float
    """For how many seconds to record forwards, backwards and optimizer steps as well; 0: no change."""


@dataclass(frozen=True, slots=True)
class JobReply:
    """A rank's running job."""

    report: JobReport
    waits: RankWaits
    spent_s: float = 0.0
    """Processor time that the answer cost the rank, in seconds."""


@dataclass(frozen=True, slots=True)
class JobRequest(Request[JobReply]):
    """Ask about the job, from where the last report ended."""

    pid: int = 0
    """The process that the other numbers are from; of another one they start at 0."""
    position: int = 0
    """Where to continue reading metrics."""
    span_position: int = 0
    """Where to continue reading spans."""
    since_ns: int = 0
    """When this watcher asked last, on the rank's clock; 0: never."""


@dataclass(frozen=True, slots=True)
class MeshReply:
    """The device mesh among a rank's variables; None if there is none."""

    mesh: MeshInfo | None


@dataclass(frozen=True, slots=True)
class MeshRequest(Request[MeshReply]):
    """Ask for the device mesh."""


@dataclass(frozen=True, slots=True)
class VariableFacts:
    """One variable of a rank, for a table."""

    name: str
    type: str
    shape: str = ""
    dtype: str = ""
    device: str = ""
    where: str = ""
    """Placements on the mesh."""
    bytes: int = 0
    """On this rank."""
    digest: str = ""
    """Equal where values are; empty if it is sharded or cannot be compared."""


@dataclass(frozen=True, slots=True)
class DescribeVariables(RankCall[list[VariableFacts]]):
    """Describe each variable of the user's."""

    target = "axon_nb.engine.inspection.variables:variable_facts"


@dataclass(frozen=True, slots=True)
class VariableParts:
    """A variable as something that can be compared without torch."""

    parts: Mapping[str, Packed]
    """NumPy arrays by name."""
    text: str | None = None
    """Instead of arrays: what it prints."""
    refused: str = ""
    """Instead of both: why it cannot be compared; reads after its name."""


@dataclass(frozen=True, slots=True)
class GetVariableParts(RankCall[VariableParts]):
    """Take one variable apart for a comparison."""

    target = "axon_nb.engine.inspection.variables:variable_parts"
    name: str
