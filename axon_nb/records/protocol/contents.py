"""What the variables of a rank hold: parts of tensors, memory, and what a planner needs to know of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from axon_nb.records.memory import MemorySetup, MemoryUse
from axon_nb.records.placement import Shard
from axon_nb.records.protocol.messages import Expression, RankCall, Request
from axon_nb.records.protocol.wire import Packed

__all__ = [
    "Calibrate",
    "CaptureModel",
    "LayoutsReply",
    "LayoutsRequest",
    "MemoryReply",
    "MemoryRequest",
    "ModelFacts",
    "PlanReply",
    "PlanRequest",
]


@dataclass(frozen=True, slots=True)
class LayoutsReply:
    """The parts of tensors on a rank."""

    key: str
    """Changes with the parts."""
    shards: tuple[Shard, ...] | None
    """None if they are those of the key that the notebook knows."""
    spent_s: float = 0.0
    """Processor time that the answer cost the rank, in seconds."""


@dataclass(frozen=True, slots=True)
class LayoutsRequest(Request[LayoutsReply]):
    """Ask for parts of tensors; refused if there is no such variable, or no tensor in it."""

    names: tuple[str, ...]
    """Variables: modules, optimizers, tensors, collections of tensors."""
    gradients: bool = False
    known: str = ""
    """Key of the last answer to the same question."""


@dataclass(frozen=True, slots=True)
class MemoryReply:
    """The memory of a rank."""

    measured: MemoryUse
    estimated: MemoryUse | None
    """None without a formula."""
    notes: tuple[str, ...]
    """Sentences: what is not known."""
    is_pending: bool
    """Whether the formula is still being loaded."""
    model: str
    """Changes when the one model that was named is another, or is called in another way; empty without one."""
    spent_s: float = 0.0
    """Processor time that the answer cost the rank, in seconds."""


@dataclass(frozen=True, slots=True)
class MemoryRequest(Request[MemoryReply]):
    """Ask what memory holds; refused if there is no such module or optimizer."""

    names: tuple[str, ...] = ()
    """Modules and optimizers; empty: all variables."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """How a model is trained, for a planner."""

    setup: MemorySetup
    is_trained_so: bool
    """Whether `setup` is how it is trained; False: nothing shows that, and it is a proposal."""
    optimizer_options: Mapping[str, Any]
    units: tuple[str, ...] | None
    """Classes that FSDP gathers as units, without the model; None: it has no units."""
    blocks: tuple[str, ...]
    """Classes that are recomputed in backward."""
    inputs: list[Any] | None
    """What the model is called with: shape and dtype of a tensor, other values as they are. None: not seen yet."""
    loss: str
    """``tokens``: the next token's cross-entropy; ``mean``: unknown, the mean of the output stands for it."""
    notes: tuple[str, ...]
    schedule: str = "1F1B"
    """Name of a pipeline's schedule."""
    tp_plan: Any = "auto"
    """How layers are split: styles by patterns of names."""
    device: str = "cpu"
    """Type of the rank's device."""


@dataclass(frozen=True, slots=True)
class PlanReply:
    """What a planner needs; which fields there are depends on the model."""

    is_pending: bool = False
    """Whether the planner is still being loaded; nothing else is there then."""
    refused: str = ""
    """Why there is no plan; `facts` are there if another question can have one."""
    facts: ModelFacts | None = None
    key: str = ""
    """Changes with the model."""
    setup: MemorySetup | None = None
    """What is planned for."""
    states: Mapping[str, int] | None = None
    """Bytes by role on the rank that has most of them, by formula."""
    host: int = 0
    """Those in the host's memory."""
    model: bytes | None = None
    """The model without its data, pickled; None if the notebook has it."""
    first_rank: int | None = None
    """For a pipeline: the rank with its first stage, to ask instead of this one."""
    ranks: Mapping[int, int] | None = None
    """Of a pipeline: the rank of each stage, instead of a model and its states."""
    stages: Mapping[int, bytes] | None = None
    """This rank's stages without their data, pickled, if they were asked for."""


@dataclass(frozen=True, slots=True)
class PlanRequest(Request[PlanReply]):
    """Ask about one model."""

    names: tuple[str, ...]
    """The model, and its optimizers if they are named."""
    what_if: Mapping[str, Any] | None = None
    """Fields of `MemorySetup` to change; None: the current setup."""
    known: str = ""
    """Key of the model that the notebook has."""
    stages: bool = False
    """Whether only this rank's stages of a pipeline are wanted."""


@dataclass(frozen=True, slots=True)
class CaptureModel(RankCall[Packed]):
    """In a cell: capture a model for a plan; returns a `CapturedModel`, or why there is none."""

    target = "axon_nb.plan.skeleton:capture_or_reason"
    look: Expression
    """A function without arguments that returns the model."""
    name: str
    """What messages call it."""


@dataclass(frozen=True, slots=True)
class Calibrate(RankCall[Packed]):
    """In a cell: measure the ranks' hardware; collective. Returns a `Calibration`."""

    target = "axon_nb.plan.calibration.calibrate:calibrate_on_rank"
    mesh: Expression | None
    """A mesh on the ranks."""
    sent: str
    """The options, pickled, in base 85."""
