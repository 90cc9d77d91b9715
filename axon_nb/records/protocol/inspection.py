"""What a rank is doing: its state, its stack, what it waits for, its job, its spans, its debuggers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from axon_nb.records.placement import MeshInfo
from axon_nb.records.protocol.messages import Event, RankCall, Request
from axon_nb.records.protocol.wire import Packed
from axon_nb.records.stacks import StackFrame
from axon_nb.records.telemetry import RankState
from axon_nb.records.training.comparison import Comparison
from axon_nb.records.training.job import JobReport
from axon_nb.records.waits.calls import PendingCall, RankWaits
from axon_nb.records.waits.silent_ranks import PeerCall


@dataclass(frozen=True, slots=True)
class StatusRequest(Request[RankState]):
    """Sample what the main thread does."""


@dataclass(frozen=True, slots=True)
class TakePeak(RankCall[int]):
    """Return the most memory that the rank has used since the last such call, in bytes: of its GPU, else resident."""

    target = "axon_nb.engine.inspection.sampler:take_peak"


@dataclass(frozen=True, slots=True)
class WatchRequest(Request[None]):
    """Send samples for some time; a new request replaces the last one."""

    hz: float
    """Samples per second."""
    seconds: float
    """For how long; 0 stops it."""


@dataclass(frozen=True, slots=True)
class TelemetryEvent(Event):
    """The samples of one tick."""

    rank: int
    states: tuple[RankState, ...]


@dataclass(frozen=True, slots=True)
class WaitsReply:
    """What a rank waits for."""

    waits: RankWaits
    collectives: int
    """Collectives that the cell started, over all groups."""
    peers: tuple[PeerCall, ...] = ()
    """What shared memory shows of the ranks that it waits for."""
    overdue: str = ""
    """On NCCL: an operation that has exceeded the timeout of its group; reads after the rank and a colon."""
    started: tuple[PendingCall, ...] = ()
    """On NCCL: the oldest collectives in progress, wherever the main thread is."""


@dataclass(frozen=True, slots=True)
class WaitsRequest(Request[WaitsReply]):
    """Request the communication calls in progress."""


@dataclass(frozen=True, slots=True)
class StacksReply:
    """The location of a rank."""

    state: RankState
    frames: tuple[StackFrame, ...]
    """Outermost first; empty if no cell runs."""


@dataclass(frozen=True, slots=True)
class StacksRequest(Request[StacksReply]):
    """Request the Python stack of the cell."""


@dataclass(frozen=True, slots=True)
class SpansReply:
    """The spans since the last request."""

    spans: Packed
    """Rows of `Span`."""
    next: int
    """Number of the next span."""
    lost: int
    """Spans that were overwritten before they were read."""
    groups: Mapping[str, tuple[int, ...]]
    """Global ranks of their groups, by name."""
    now_ns: int
    """The rank's clock, nanoseconds."""
    process: int
    """The rank's pid: a new process restarts the numbering."""


@dataclass(frozen=True, slots=True)
class SpansRequest(Request[SpansReply]):
    """Fetch spans."""

    since: int
    """Number of the first span wanted; 0: the oldest available."""
    watch: float
    """For how many more seconds to record forwards, backwards and optimizer steps; 0: unchanged."""


@dataclass(frozen=True, slots=True)
class JobReply:
    """A rank's running job."""

    report: JobReport
    waits: RankWaits
    spent_s: float = 0.0
    """CPU seconds that the reply cost the rank."""


@dataclass(frozen=True, slots=True)
class JobRequest(Request[JobReply]):
    """Request a report on the job, from where the last one ended."""

    pid: int = 0
    """The process that the positions refer to; another process starts reading at the beginning."""
    position: int = 0
    """Where to continue reading metrics."""
    span_position: int = 0
    """Where to continue reading spans."""
    since_ns: int = 0
    """Time of this watcher's last request, on the rank's clock; 0: this is the first."""


@dataclass(frozen=True, slots=True)
class MeshReply:
    """The device mesh among a rank's variables."""

    mesh: MeshInfo | None
    """None if there is none."""


@dataclass(frozen=True, slots=True)
class MeshRequest(Request[MeshReply]):
    """Request the device mesh."""


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
    """Equal if what was compared is; empty if nothing was."""
    unchecked: str = ""
    """What was not compared, and why."""


@dataclass(frozen=True, slots=True)
class DescribeVariables(RankCall[list[VariableFacts]]):
    """Describe each of the user's variables."""

    target = "axon_nb.engine.inspection.variables:variable_facts"


@dataclass(frozen=True, slots=True)
class VariableTree:
    """Digests of a variable and of its parts, each of which is followed by what it holds."""

    digests: Packed = b""
    """16 bytes for each part: equal if the part is."""
    heads: Packed = b""
    """8 bytes for each: equal if it is of the same kind, whatever it holds."""
    labels: Packed = b""
    """8 bytes for each: equal if it is reached in the same way."""
    ends: Packed = b""
    """8 bytes for each: the number of the part that follows all it holds."""
    skipped: Mapping[int, str] = field(default_factory=dict)
    """Why a part was not compared, by number."""
    paths: Mapping[int, str] = field(default_factory=dict)
    """What leads to such a part, by number."""
    refused: str = ""
    """Instead of all that: why there is nothing to compare; reads after its name."""


@dataclass(frozen=True, slots=True)
class GetVariableTree(RankCall[VariableTree]):
    """Return the digests of one variable, for a comparison."""

    target = "axon_nb.engine.inspection.variables:variable_tree"
    name: str


@dataclass(frozen=True, slots=True)
class VariablePart:
    """A part of a variable that differs."""

    path: str
    """An expression such as ``d["w"]``."""
    kind: str
    """Its type, and for arrays shape and dtype."""
    text: str
    """Itself as text, or its kind."""
    array: Packed = None
    """A NumPy array, for numbers; None if it is too large."""


@dataclass(frozen=True, slots=True)
class GetVariableParts(RankCall[Mapping[int, VariablePart]]):
    """Return some parts of one variable, by their numbers in its tree."""

    target = "axon_nb.engine.inspection.variables:variable_parts"
    name: str
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FailureReply:
    """The failure that a rank has saved for the debugger."""

    failure: str
    """The error in one line; empty if there is none."""


@dataclass(frozen=True, slots=True)
class FailureRequest(Request[FailureReply]):
    """Ask whether there is a failure to debug."""


@dataclass(frozen=True, slots=True)
class DebuggerStart(RankCall[str]):
    """Open the debugger on the saved failure; returns its location."""

    target = "axon_nb.engine.debugger.post_mortem:start"


@dataclass(frozen=True, slots=True)
class DebuggerCommand(RankCall[tuple[str, bool]]):
    """Run one command of the debugger; returns its output, and whether the session is over."""

    target = "axon_nb.engine.debugger.post_mortem:command"
    line: str


@dataclass(frozen=True, slots=True)
class PausedEvent(Event):
    """Within a cell, the debugger on a rank's main thread waits for a command."""

    number: int
    """How often it has waited in this cell, with this time."""
    place: str
    """Where the cell is: ``line 3``, or ``train.py line 40``."""


@dataclass(frozen=True, slots=True)
class DebuggerLine(Request[None]):
    """Send a command to the debugger in a running cell."""

    run: str
    """Id of the cell's run; the line is dropped if that is over."""
    number: int
    """The pause that it answers, see `PausedEvent`; the line is dropped if that is over."""
    line: str


@dataclass(frozen=True, slots=True)
class PrepareComparison(RankCall[str]):
    """Gather what the reference of a cell needs; returns why it cannot be compared. Collective."""

    target = "axon_nb.engine.parity.calls:prepare"
    code: str
    plain: str


@dataclass(frozen=True, slots=True)
class BeginComparison(RankCall[None]):
    """Observe the cell."""

    target = "axon_nb.engine.parity.calls:begin"


@dataclass(frozen=True, slots=True)
class EndComparison(RankCall[None]):
    """Send what was observed to rank 0; collective."""

    target = "axon_nb.engine.parity.calls:end"


@dataclass(frozen=True, slots=True)
class CompareRanks(RankCall[Comparison]):
    """Run the reference on this rank."""

    target = "axon_nb.engine.parity.calls:compare"
