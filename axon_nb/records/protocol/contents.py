"""What the variables of a rank hold: shards, memory, a model for a planner, and the numbers of training steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from axon_nb.records.memory import MemorySetup, MemoryUse
from axon_nb.records.placement import Shard
from axon_nb.records.protocol.messages import Expression, RankCall, Request
from axon_nb.records.protocol.wire import Packed
from axon_nb.records.training.numbers import NonFinite, StepNumbers


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
