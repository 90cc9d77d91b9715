"""What a rank is doing and what its variables hold: state, stack, waits, job, spans, debuggers, shards, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from axon_nb.records.memory import MemorySetup, MemoryUse
from axon_nb.records.protocol.wire import Event, Expression, Packed, RankCall, Request
from axon_nb.records.stacks import StackFrame
from axon_nb.records.telemetry import MeshInfo, RankState, Shard
from axon_nb.records.training.digests import Comparison, NonFinite, StepNumbers
from axon_nb.records.training.job import JobReport
from axon_nb.records.waits import PeerCall, PendingCall, RankWaits

NOT_COMPUTED = -1.0
"""The norm of a place that has no value at a position."""


@dataclass(frozen=True, slots=True)
class StatusRequest(Request[RankState]):
    """Sample what the main thread does."""


@dataclass(frozen=True, slots=True)
class TakePeak(RankCall[int]):
    """Return the most memory that the rank has used since the last such call, in bytes: of its GPU, else resident."""

    target = "axon_nb.engine.inspection.telemetry:take_peak"


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
class RecordedPlace:
    """What one place of a recording holds, of the first text of the batch."""

    name: str
    shape: tuple[int, ...]
    """Of the first call's value."""
    calls: int
    ranks: tuple[int, ...] = ()
    """Those that share the work; empty: each does all of it."""
    split: str = ""
    """What of it they split, such as ``heads``."""
    norms: tuple[float, ...] = ()
    """By position, of all calls; `NOT_COMPUTED` where the place has no value."""
    maps: Packed = b""
    """Attention maps of the first call, one byte for each share: (heads, positions, positions)."""
    map_shape: tuple[int, ...] = ()
    lens: tuple[tuple[str, float], ...] = ()
    """Words that a logit lens reads, by position, each with its share."""


@dataclass(frozen=True, slots=True)
class RecordingFacts:
    """What `%inside` shows of a recording."""

    refused: str = ""
    """Instead of all else: why there is nothing to show; reads after its name."""
    key: int = 0
    """Tells recordings of a rank apart."""
    words: tuple[str, ...] = ()
    """The text, by position."""
    starts: tuple[int, ...] = ()
    """The positions at which calls begin."""
    places: tuple[RecordedPlace, ...] = ()
    omitted: tuple[str, ...] = ()
    """What is left out, as sentences."""


@dataclass(frozen=True, slots=True)
class DescribeRecording(RankCall[RecordingFacts]):
    """Describe a recording of `axon_nb.inside`; nothing if it is still the known one."""

    target = "axon_nb.engine.inspection.recordings:recording_facts"
    name: str
    known: int = 0


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

    target = "axon_nb.engine.debugger:start_post_mortem"


@dataclass(frozen=True, slots=True)
class DebuggerCommand(RankCall[tuple[str, bool]]):
    """Run one command of the debugger; returns its output, and whether the session is over."""

    target = "axon_nb.engine.debugger:post_mortem_command"
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

    target = "axon_nb.engine.parity.comparer:prepare"
    code: str
    plain: str


@dataclass(frozen=True, slots=True)
class BeginComparison(RankCall[None]):
    """Observe the cell."""

    target = "axon_nb.engine.parity.comparer:begin"


@dataclass(frozen=True, slots=True)
class EndComparison(RankCall[None]):
    """Send what was observed to rank 0; collective."""

    target = "axon_nb.engine.parity.comparer:end"


@dataclass(frozen=True, slots=True)
class CompareRanks(RankCall[Comparison]):
    """Run the reference on this rank."""

    target = "axon_nb.engine.parity.comparer:compare"


@dataclass(frozen=True, slots=True)
class LayoutsReply:
    """The shards of tensors on a rank."""

    key: str
    """A key that changes with the shards."""
    shards: tuple[Shard, ...] | None
    """None if they are the same as for the key that the notebook sent."""
    spent_s: float = 0.0
    """CPU seconds that the reply cost the rank."""


@dataclass(frozen=True, slots=True)
class LayoutsRequest(Request[LayoutsReply]):
    """Request shards; refused if a variable does not exist or holds no tensor."""

    names: tuple[str, ...]
    """Variables: modules, optimizers, tensors, collections of tensors."""
    gradients: bool = False
    known: str = ""
    """Key of the last reply to the same request."""


@dataclass(frozen=True, slots=True)
class MemoryReply:
    """The memory of a rank."""

    measured: MemoryUse
    estimated: MemoryUse | None
    """None without a formula."""
    notes: tuple[str, ...]
    """Sentences about what is unknown."""
    is_pending: bool
    """Whether the formula is still being imported."""
    model: str
    """A key that changes if the one named model is replaced or called differently; empty without one."""
    spent_s: float = 0.0
    """CPU seconds that the reply cost the rank."""


@dataclass(frozen=True, slots=True)
class MemoryRequest(Request[MemoryReply]):
    """Request what memory holds; refused if there is no such module or optimizer."""

    names: tuple[str, ...] = ()
    """Modules and optimizers; empty: all variables."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """How a model is trained, for the planner."""

    setup: MemorySetup
    is_trained_so: bool
    """Whether `setup` is how the model is trained; False: it cannot be inferred, and `setup` is a proposal."""
    optimizer_options: Mapping[str, Any]
    units: tuple[str, ...] | None
    """Classes that FSDP gathers as units, except the model's own; None without units."""
    blocks: tuple[str, ...]
    """Classes that use activation checkpointing."""
    inputs: list[Any] | None
    """Inputs of the model: shape and dtype of a tensor, other values as they are. None: no call was recorded."""
    loss: str
    """``tokens``: next-token cross-entropy; ``mean``: unknown, the mean of the output stands for it."""
    notes: tuple[str, ...]
    schedule: str = "1F1B"
    """Name of a pipeline's schedule."""
    tp_plan: Any = "auto"
    """How layers are sharded, if they are: styles by name pattern."""
    device: str = "cpu"
    """Type of the rank's device."""


@dataclass(frozen=True, slots=True)
class PlanReply:
    """What a planner needs; which fields are set depends on the model."""

    is_pending: bool = False
    """Whether the planner is still being imported; no other field is set then."""
    refused: str = ""
    """Why there is no plan; `facts` is set if another what-if scenario may have one."""
    facts: ModelFacts | None = None
    key: str = ""
    """A key that changes with the model and its inputs."""
    setup: MemorySetup | None = None
    """What is planned for."""
    states: Mapping[str, int] | None = None
    """Bytes by role, by formula, on the rank that holds most."""
    host: int = 0
    """Bytes of them in host memory."""
    model: bytes | None = None
    """The model skeleton, pickled; None if the notebook has it."""
    first_rank: int | None = None
    """For a pipeline: the rank with its first stage, to ask instead of this one."""
    ranks: Mapping[int, int] | None = None
    """For a pipeline: the rank of each stage, instead of a model and its states."""
    stages: Mapping[int, bytes] | None = None
    """The skeletons of this rank's stages, pickled, if they were requested."""


@dataclass(frozen=True, slots=True)
class PlanRequest(Request[PlanReply]):
    """Request what a planner needs about one model."""

    names: tuple[str, ...]
    """The model, and its optimizers if they are named."""
    what_if: Mapping[str, Any] | None = None
    """Fields of `MemorySetup` to change; None: the current setup."""
    known: str = ""
    """Key of the model that the notebook already has."""
    stages: bool = False
    """For a pipeline: request only this rank's stages."""


@dataclass(frozen=True, slots=True)
class CaptureModel(RankCall[Packed]):
    """In a cell: capture a model for a plan; returns a `CapturedModel`, or why there is none."""

    target = "axon_nb.plan.skeleton:capture_or_reason"
    look: Expression
    """A function without arguments that returns the model."""
    name: str
    """Its name in messages."""


@dataclass(frozen=True, slots=True)
class Calibrate(RankCall[Packed]):
    """In a cell: measure the ranks' hardware; collective. Returns a `Calibration`."""

    target = "axon_nb.plan.calibration.calibrate:calibrate_on_rank"
    mesh: Expression | None
    """A mesh on the ranks."""
    sent: str
    """The options, pickled, in base 85."""


@dataclass(frozen=True, slots=True)
class NumbersReply:
    """The digests of a cell's steps since the last request."""

    rows: Packed
    """For each: number of the optimizer, of the step, and two digests for each set of ranks: weights, gradients."""
    sets: Packed
    """By number of the optimizer, the sets of ranks that hold the same, as `records.ranks.pack_ranks` packs them."""
    next: int
    """Number of the next row."""
    lost: int
    """Rows that were dropped before they were read."""
    non_finite: NonFinite | None = None
    """The first number that is not finite; None: there is none."""
    details: StepNumbers | None = None
    """Of the step that was asked for; None: it was dropped, or never made."""
    waiting: str = ""
    """``ready``: the rank waits at that number, and could repeat the forward, which communicates, with all others;
    ``repeated``: it waits, and knows all; empty: it does not wait."""


@dataclass(frozen=True, slots=True)
class NumbersRequest(Request[NumbersReply]):
    """Fetch what `config watch_numbers` has seen of a cell."""

    run: str
    """Id of the cell's run."""
    since: int
    """Number of the first row wanted."""
    details: tuple[int, int] | None = None
    """The optimizer and the step of which the digests of all parameters are wanted."""
    repeat: bool = False
    """Whether all ranks are ``ready``, and repeat the forward now."""
