"""What a rank is doing and what its variables hold: state, stack, waits, job, spans, debuggers, shards, memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from axon_nb.records.memory import MemorySetup, MemoryUse
from axon_nb.records.protocol.wire import Event, Expression, Packed, RankCall, Request
from axon_nb.records.stacks import StackFrame
from axon_nb.records.telemetry import MeshInfo, RankState, Shard
from axon_nb.records.training.digests import Comparison, NonFinite, StepNumbers
from axon_nb.records.training.job import JobReport
from axon_nb.records.waits import PeerCall, PendingCall, RankWaits

NOT_COMPUTED = -1.0
"""The norm of a place that has no value at a position."""


class StatusRequest(Request[RankState], frozen=True):
    """Sample what the main thread does."""


class TakePeak(RankCall[int], frozen=True):
    """Return the most memory that the rank has used since the last such call, in bytes: of its GPU, else resident."""

    target = "axon_nb.engine.inspection.telemetry:take_peak"


class WatchRequest(Request[None], frozen=True):
    """Send samples for some time; a new request replaces the last one."""

    hz: float
    """Samples per second."""
    seconds: float
    """For how long; 0 stops it."""


class TelemetryEvent(Event, frozen=True):
    """The samples of one tick."""

    rank: int
    states: tuple[RankState, ...]


class WaitsReply(Struct, frozen=True):
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


class WaitsRequest(Request[WaitsReply], frozen=True):
    """Request the communication calls in progress."""


class StacksReply(Struct, frozen=True):
    """The location of a rank."""

    state: RankState
    frames: tuple[StackFrame, ...]
    """Outermost first; empty if no cell runs."""


class StacksRequest(Request[StacksReply], frozen=True):
    """Request the Python stack of the cell."""


class SpansReply(Struct, frozen=True):
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


class SpansRequest(Request[SpansReply], frozen=True):
    """Fetch spans."""

    since: int
    """Number of the first span wanted; 0: the oldest available."""
    watch: float
    """For how many more seconds to record forwards, backwards and optimizer steps; 0: unchanged."""


class JobReply(Struct, frozen=True):
    """A rank's running job."""

    report: JobReport
    waits: RankWaits
    spent_s: float = 0.0
    """CPU seconds that the reply cost the rank."""


class JobRequest(Request[JobReply], frozen=True):
    """Request a report on the job, from where the last one ended."""

    pid: int = 0
    """The process that the positions refer to; another process starts reading at the beginning."""
    position: int = 0
    """Where to continue reading metrics."""
    span_position: int = 0
    """Where to continue reading spans."""
    since_ns: int = 0
    """Time of this watcher's last request, on the rank's clock; 0: this is the first."""


class MeshReply(Struct, frozen=True):
    """The device mesh among a rank's variables."""

    mesh: MeshInfo | None
    """None if there is none."""


class MeshRequest(Request[MeshReply], frozen=True):
    """Request the device mesh."""


class VariableFacts(Struct, frozen=True):
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


class DescribeVariables(RankCall[list[VariableFacts]], frozen=True):
    """Describe each of the user's variables."""

    target = "axon_nb.engine.inspection.variables:variable_facts"


class RecordedPlace(Struct, frozen=True):
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


class RecordingFacts(Struct, frozen=True):
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


class DescribeRecording(RankCall[RecordingFacts], frozen=True):
    """Describe a recording of `axon_nb.inside`; nothing if it is still the known one."""

    target = "axon_nb.engine.inspection.recordings:recording_facts"
    name: str
    known: int = 0


class VariableTree(Struct, frozen=True):
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


class GetVariableTree(RankCall[VariableTree], frozen=True):
    """Return the digests of one variable, for a comparison."""

    target = "axon_nb.engine.inspection.variables:variable_tree"
    name: str


class VariablePart(Struct, frozen=True):
    """A part of a variable that differs."""

    path: str
    """An expression such as ``d["w"]``."""
    kind: str
    """Its type, and for arrays shape and dtype."""
    text: str
    """Itself as text, or its kind."""
    array: Packed = None
    """A NumPy array, for numbers; None if it is too large."""


class GetVariableParts(RankCall[Mapping[int, VariablePart]], frozen=True):
    """Return some parts of one variable, by their numbers in its tree."""

    target = "axon_nb.engine.inspection.variables:variable_parts"
    name: str
    nodes: tuple[int, ...]


class FailureReply(Struct, frozen=True):
    """The failure that a rank has saved for the debugger."""

    failure: str
    """The error in one line; empty if there is none."""


class FailureRequest(Request[FailureReply], frozen=True):
    """Ask whether there is a failure to debug."""


class DebuggerStart(RankCall[str], frozen=True):
    """Open the debugger on the saved failure; returns its location."""

    target = "axon_nb.engine.debugger:start_post_mortem"


class DebuggerCommand(RankCall[tuple[str, bool]], frozen=True):
    """Run one command of the debugger; returns its output, and whether the session is over."""

    target = "axon_nb.engine.debugger:post_mortem_command"
    line: str


class PausedEvent(Event, frozen=True):
    """Within a cell, the debugger on a rank's main thread waits for a command."""

    number: int
    """How often it has waited in this cell, with this time."""
    place: str
    """Where the cell is: ``line 3``, or ``train.py line 40``."""


class DebuggerLine(Request[None], frozen=True):
    """Send a command to the debugger in a running cell."""

    run: str
    """Id of the cell's run; the line is dropped if that is over."""
    number: int
    """The pause that it answers, see `PausedEvent`; the line is dropped if that is over."""
    line: str


class PrepareComparison(RankCall[str], frozen=True):
    """Gather what the reference of a cell needs; returns why it cannot be compared. Collective."""

    target = "axon_nb.engine.parity.comparer:prepare"
    code: str
    plain: str


class BeginComparison(RankCall[None], frozen=True):
    """Observe the cell."""

    target = "axon_nb.engine.parity.comparer:begin"


class EndComparison(RankCall[None], frozen=True):
    """Send what was observed to rank 0; collective."""

    target = "axon_nb.engine.parity.comparer:end"


class CompareRanks(RankCall[Comparison], frozen=True):
    """Run the reference on this rank."""

    target = "axon_nb.engine.parity.comparer:compare"


class LayoutsReply(Struct, frozen=True):
    """The shards of tensors on a rank."""

    key: str
    """A key that changes with the shards."""
    shards: tuple[Shard, ...] | None
    """None if they are the same as for the key that the notebook sent."""
    spent_s: float = 0.0
    """CPU seconds that the reply cost the rank."""


class LayoutsRequest(Request[LayoutsReply], frozen=True):
    """Request shards; refused if a variable does not exist or holds no tensor."""

    names: tuple[str, ...]
    """Variables: modules, optimizers, tensors, collections of tensors."""
    gradients: bool = False
    known: str = ""
    """Key of the last reply to the same request."""


class MemoryReply(Struct, frozen=True):
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


class MemoryRequest(Request[MemoryReply], frozen=True):
    """Request what memory holds; refused if there is no such module or optimizer."""

    names: tuple[str, ...] = ()
    """Modules and optimizers; empty: all variables."""


class ModelFacts(Struct, frozen=True):
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
    axes: tuple[str, ...] = ()
    """``ep`` if the model has experts; ``cp`` if its inputs are tokens, whose first dimensions are samples and
    positions."""


class PlanReply(Struct, frozen=True):
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


class PlanRequest(Request[PlanReply], frozen=True):
    """Request what a planner needs about one model."""

    names: tuple[str, ...]
    """The model, and its optimizers if they are named."""
    what_if: Mapping[str, Any] | None = None
    """Fields of `MemorySetup` to change; None: the current setup."""
    known: str = ""
    """Key of the model that the notebook already has."""
    stages: bool = False
    """For a pipeline: request only this rank's stages."""


class CaptureModel(RankCall[Packed], frozen=True):
    """In a cell: capture a model for a plan; returns a `CapturedModel`, or why there is none."""

    target = "axon_nb.plan.skeleton:capture_or_reason"
    look: Expression
    """A function without arguments that returns the model."""
    name: str
    """Its name in messages."""


class Calibrate(RankCall[Packed], frozen=True):
    """In a cell: measure the ranks' hardware; collective. Returns a `Calibration`."""

    target = "axon_nb.plan.calibration.calibrate:calibrate_on_rank"
    mesh: Expression | None
    """A mesh on the ranks."""
    sent: str
    """The options, pickled, in base 85."""


class NumbersReply(Struct, frozen=True):
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


class NumbersRequest(Request[NumbersReply], frozen=True):
    """Fetch what `config watch_numbers` has seen of a cell."""

    run: str
    """Id of the cell's run."""
    since: int
    """Number of the first row wanted."""
    details: tuple[int, int] | None = None
    """The optimizer and the step of which the digests of all parameters are wanted."""
    repeat: bool = False
    """Whether all ranks are ``ready``, and repeat the forward now."""
