"""Rebuild groups after a failure, find what is lost with a rank, and take cells back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from axon_nb.records.protocol.messages import RankCall


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A process group of a rank, besides the default one."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks, sorted."""
    desc: str
    """Its description; may be empty."""
    backend: str
    timeout_s: float = 0.0
    """Timeout of its operations; 0: that of the default group."""


@dataclass(frozen=True, slots=True)
class OptimizerReport:
    """How many steps one optimizer of a rank has made."""

    number: int
    """In the order of the first steps; -1: no step yet."""
    name: str
    """Its variable; may be empty."""
    before: int
    """Steps when the last cell began."""
    steps: int
    """Steps now."""
    shapes: str
    """A digest, equal if the same model is trained."""
    not_replicated: str
    """Why it is not a replica of other ranks' optimizer; reads after a name. Empty if it may be one."""
    communicated: bool
    """Whether the last cell communicated."""


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What a rebuild did on one rank."""

    groups: int
    """Groups that were rebuilt."""
    wrappers: int
    """Wrappers, such as DDP, that were reset."""
    abandoned: int
    """Aborted groups that this process still holds, with their threads."""
    not_reset: tuple[str, ...]
    """A sentence for each kind of wrapper that could not be reset."""
    lost_device: str = ""
    """On NCCL: what to do about this rank's device, which it cannot use any more. No rank has then rebuilt a group."""


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """A rebuild after a cell, and the steps of each optimizer."""

    rebuilt: RebuildReport
    steps: tuple[OptimizerReport, ...]


@dataclass(frozen=True, slots=True)
class Recover(RankCall[RecoveryReport]):
    """Rebuild all groups after an aborted cell; collective over all ranks."""

    target = "axon_nb.engine.kernel.optimizer_steps:recover"
    epoch: int
    """Number of this rebuild, the same on all ranks and higher than any before."""


@dataclass(frozen=True, slots=True)
class RecoverAfterRepair(RankCall[RebuildReport]):
    """Rebuild all groups together with the replacement ranks, which are in `Join`."""

    target = "axon_nb.engine.groups.recovery:recover"
    epoch: int
    """As for `Recover`."""
    replaced: bool = True


@dataclass(frozen=True, slots=True)
class DisableGroups(RankCall[None]):
    """Refuse communication, because the groups cannot be rebuilt; cells still run."""

    target = "axon_nb.engine.groups.recovery:disable_groups"
    reason: str
    """Reads after "communication is not possible:"."""


@dataclass(frozen=True, slots=True)
class ListGroups(RankCall[list[GroupRecord]]):
    """List the groups of a rank besides the default one."""

    target = "axon_nb.engine.groups.recovery:list_groups"


@dataclass(frozen=True, slots=True)
class LostShards:
    """A variable of which certain ranks hold shards that no other rank has."""

    name: str
    kind: str
    """``module``, ``optimizer``, ``tensor`` or ``stage``."""
    parts: int | tuple[int, ...]
    """How many of its tensors are affected; for a stage, the indices of the lost stages."""
    of: int
    """How many it has in all."""
    bytes: int
    """Size of the lost shards."""


@dataclass(frozen=True, slots=True)
class FindLostShards(RankCall[list[LostShards]]):
    """Find the shards that only these ranks hold."""

    target = "axon_nb.engine.sharding.sharded:only_on_ranks"
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProtectedStep:
    """A state of a rank that outlives the rank."""

    run: str
    """Id of the run of a cell, the same on all its ranks."""
    fence: tuple[int, int]
    """Which state in that cell, the same on all its ranks."""
    step: int
    """Steps of the optimizer that has made most."""


@dataclass(frozen=True, slots=True)
class ProtectedSteps:
    """What is protected of a rank; a replacement reports what its predecessor left."""

    held: tuple[ProtectedStep, ...]
    """The latest first."""
    now: int
    """Steps of the optimizer that has made most, until now."""


@dataclass(frozen=True, slots=True)
class ListProtected(RankCall[ProtectedSteps]):
    """List the states that outlive a rank."""

    target = "axon_nb.engine.protection.calls:list_protected"


@dataclass(frozen=True, slots=True)
class ListKeptGroups(RankCall[list[GroupRecord]]):
    """List the groups that a rank's predecessor had, besides the default one, before the rank joins."""

    target = "axon_nb.engine.protection.content:kept_groups"
    rank: int


@dataclass(frozen=True, slots=True)
class RestoreProtected(RankCall[list[str]]):
    """Return to such a state; returns a line for each object that refused its part."""

    target = "axon_nb.engine.protection.calls:restore"
    run: str
    fence: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ForgetProtected(RankCall[None]):
    """Give up what `KeepSnapshot` has kept, unless a protected step has taken its place."""

    target = "axon_nb.engine.protection.calls:forget"
    key: str


@dataclass(frozen=True, slots=True)
class UndoableCell:
    """A cell of which a rank remembers that it ran."""

    run: str
    """Id of its run, the same on all its ranks."""
    cell: int
    """Number of the notebook's cell."""
    ranks: tuple[int, ...]
    """The ranks that ran it."""
    started: float
    """Seconds since the epoch."""
    missing: str = ""
    """Why the rank has no snapshot of the time before; reads after its name. Empty if it has one."""
    obstacles: Mapping[str, str] = field(default_factory=dict)
    """By variable, what it is or contains that cannot be restored, such as ``a generator``."""


@dataclass(frozen=True, slots=True)
class Undoable:
    """What a rank can undo."""

    since: float
    """When it began to remember cells, in seconds since the epoch; a replaced rank begins again."""
    cells: tuple[UndoableCell, ...]
    """Oldest first."""


@dataclass(frozen=True, slots=True)
class ListUndoable(RankCall[Undoable]):
    """List the cells that a rank can undo."""

    target = "axon_nb.engine.snapshot.calls:list_undoable"


@dataclass(frozen=True, slots=True)
class UndoCell(RankCall[list[str]]):
    """Restore the state before a cell; returns a line for each object that refused its state."""

    target = "axon_nb.engine.snapshot.calls:undo"
    run: str


@dataclass(frozen=True, slots=True)
class HoldSnapshot(RankCall[UndoableCell]):
    """Take a snapshot and keep it under a name, until the next one of that name."""

    target = "axon_nb.engine.snapshot.calls:hold"
    key: str
    limit: int
    """Bytes that it may always take; more, up to half of the memory that is free."""


@dataclass(frozen=True, slots=True)
class KeepSnapshot(RankCall[UndoableCell]):
    """Do the same in memory that outlives the rank, as a protected step: the name is the run, the fence ``(0, 0)``."""

    target = "axon_nb.engine.protection.calls:keep"
    key: str
    limit: int
    """As for `HoldSnapshot`."""


@dataclass(frozen=True, slots=True)
class RestoreHeld(RankCall[list[str]]):
    """Restore a held snapshot, and forget it; returns a line for each object that refused its state."""

    target = "axon_nb.engine.snapshot.calls:restore_held"
    key: str
