"""How engines join the world and it changes its size; groups rebuilt after a failure, lost shards, cells taken back."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from axon_nb.records.protocol.agent import EngineInfo
from axon_nb.records.protocol.wire import RankCall, Request
from axon_nb.records.ranks import format_ranks
from axon_nb.records.units import format_bytes

ENGINE_ENTRY = "axon_nb.engine.bootstrap:run_engine"
"""Entry point of a forked rank, as ``module:function``."""


class DirectRequest(Request[None], frozen=True):
    """Take cells and calls also from a socket of the notebook, if it is on the same host."""

    path: str
    """Of the Unix socket."""
    host: str
    """Name of the notebook's host."""
    identity: str
    """The engine's, in ipyparallel."""


class Placement(Struct, frozen=True):
    """Where one rank runs."""

    local_rank: int
    """Index among the ranks of its host."""
    local_world_size: int
    """Number of ranks on its host."""
    node_rank: int
    """Index of its host, in the order of the lowest rank there."""
    device: str
    """``cpu`` or ``cuda:<index>``."""
    threads: int
    """Intra-op threads of torch."""


class JoinConfig(Placement, frozen=True, kw_only=True):
    """How a rank joins its world; created in the notebook."""

    rank: int
    world_size: int
    backend: str
    """``shm``, ``gloo`` or ``nccl``. torch calls the groups of the first two ``gloo``."""
    store: str
    """Address of the rendezvous store: the path of a Unix socket, or ``tcp:<ip>:<port>``."""
    timeout_s: float
    """Timeout of every collective, in seconds."""
    recoverable: bool
    """Whether groups can be rebuilt after a failure, according to the self-test."""
    output_limit: int
    """Bytes of text that a cell may print on this rank; excess lines are dropped and counted. Cells can override it."""
    group_memory: int = 0
    """Maximum size in bytes of the memory that one process group shares; 0: the usual size."""
    master_addr: str = "127.0.0.1"
    """The MASTER_ADDR that scripts see; nothing listens there."""
    master_port: int = 29500
    """The MASTER_PORT that scripts see; nothing listens there."""


class Describe(RankCall[EngineInfo], frozen=True):
    """Have an engine describe itself, before it joins."""

    target = "axon_nb.engine.bootstrap:describe"


class Join(RankCall[EngineInfo], frozen=True):
    """Join the world; collective over all ranks. Returns the description, with device and seed."""

    target = "axon_nb.engine.bootstrap:join"
    config: JoinConfig
    epoch: int = 0
    """Number of the last rebuild of the groups; above 0, this rank replaces one that died."""
    groups: tuple[GroupRecord, ...] = ()
    """Groups besides the default one that the replaced rank was in."""


class FindObstacles(RankCall[dict[str, str]], frozen=True):
    """Find variables that cannot be resharded; return the reason and the fix by name."""

    target = "axon_nb.engine.elastic.resize:find_obstacles"
    new_size: int


class SetWorld(RankCall[None], frozen=True):
    """Make this rank one of a world of another size; its groups must be rebuilt afterwards."""

    target = "axon_nb.engine.elastic.resize:set_world"
    config: JoinConfig


class StageStates(RankCall[int], frozen=True):
    """Send shards to where they belong in the new world, beside the old ones; return this rank's bytes.

    Collective over the ranks of both worlds.
    """

    target = "axon_nb.engine.elastic.resize:stage"
    old_size: int
    new_size: int


class Committed(Struct, frozen=True):
    """What was adapted to the new world on one rank."""

    models: int
    """DDP, FSDP2 and ZeRO models."""
    samplers: int
    groups_left: tuple[str, ...]
    """Variables of process groups that are gone, because some of their ranks have left."""
    functions: int
    """Functions registered with `axon_nb.on_resize`."""


class CommitResize(RankCall[Committed], frozen=True):
    """Use the staged shards instead of the old ones, and adapt the rest; does not communicate."""

    target = "axon_nb.engine.elastic.resize:commit"
    old_size: int


class SettleResize(RankCall[None], frozen=True):
    """End a resize that lost its notebook in the world that the host agent knows; does not communicate."""

    target = "axon_nb.engine.elastic.resize:settle"
    config: JoinConfig
    old_size: int
    """Number of ranks before; 0: this is the old world."""


class CallResizeFunctions(RankCall[None], frozen=True):
    """In a cell: call the functions registered with `axon_nb.on_resize`."""

    target = "axon_nb.engine.elastic.resize:call_functions"
    old_size: int
    new_size: int


class GroupRecord(Struct, frozen=True):
    """A process group of a rank, besides the default one."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks, sorted."""
    desc: str
    """Its description; may be empty."""
    backend: str
    timeout_s: float = 0.0
    """Timeout of its operations; 0: that of the default group."""


class OptimizerReport(Struct, frozen=True):
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


class RebuildReport(Struct, frozen=True):
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


class RecoveryReport(Struct, frozen=True):
    """A rebuild after a cell, and the steps of each optimizer."""

    rebuilt: RebuildReport
    steps: tuple[OptimizerReport, ...]


class Recover(RankCall[RecoveryReport], frozen=True):
    """Rebuild all groups after an aborted cell; collective over all ranks."""

    target = "axon_nb.engine.kernel.interrupts:recover"
    epoch: int
    """Number of this rebuild, the same on all ranks and higher than any before."""


class RecoverAfterRepair(RankCall[RebuildReport], frozen=True):
    """Rebuild all groups together with the replacement ranks, which are in `Join`."""

    target = "axon_nb.engine.groups.recovery:recover"
    epoch: int
    """As for `Recover`."""
    replaced: bool = True


class DisableGroups(RankCall[None], frozen=True):
    """Refuse communication, because the groups cannot be rebuilt; cells still run."""

    target = "axon_nb.engine.groups.recovery:disable_groups"
    reason: str
    """Reads after "communication is not possible:"."""


class Pause(RankCall[tuple[int, int, str]], frozen=True):
    """In a cell on all ranks: give back what is kept on the GPU for later.

    Returns what is free before and after, and why NCCL keeps its part.
    """

    target = "axon_nb.engine.groups.recovery:pause"


class Resume(RankCall[None], frozen=True):
    """In a cell on all ranks: let NCCL take again what `Pause` made it give back."""

    target = "axon_nb.engine.groups.recovery:resume"


class ListGroups(RankCall[list[GroupRecord]], frozen=True):
    """List the groups of a rank besides the default one."""

    target = "axon_nb.engine.groups.recovery:list_groups"


class LostShards(Struct, frozen=True):
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

    def __str__(self) -> str:
        if isinstance(self.parts, tuple):
            return f"stage {format_ranks(self.parts)} of {self.of} (`{self.name}`)"
        what = {"module": "parameters", "optimizer": "state tensors"}.get(self.kind)
        count = f"{self.parts} of {self.of} {what}, " if what else ""
        return f"its part of `{self.name}` ({count}{format_bytes(self.bytes)})"


class FindLostShards(RankCall[list[LostShards]], frozen=True):
    """Find the shards that only these ranks hold."""

    target = "axon_nb.engine.sharding:only_on_ranks"
    ranks: tuple[int, ...]


class ProtectedStep(Struct, frozen=True):
    """A state of a rank that outlives the rank."""

    run: str
    """Id of the run of a cell, the same on all its ranks."""
    fence: tuple[int, int]
    """Which state in that cell, the same on all its ranks."""
    step: int
    """Steps of the optimizer that has made most."""


class ProtectedSteps(Struct, frozen=True):
    """What is protected of a rank; a replacement reports what its predecessor left."""

    held: tuple[ProtectedStep, ...]
    """The latest first."""
    now: int
    """Steps of the optimizer that has made most, until now."""


class ListProtected(RankCall[ProtectedSteps], frozen=True):
    """List the states that outlive a rank."""

    target = "axon_nb.engine.protection.protection:list_protected"


class ListKeptGroups(RankCall[list[GroupRecord]], frozen=True):
    """List the groups that a rank's predecessor had, besides the default one, before the rank joins."""

    target = "axon_nb.engine.protection.slots:kept_groups"
    rank: int


class RestoreProtected(RankCall[list[str]], frozen=True):
    """Return to such a state; returns a line for each object that refused its part."""

    target = "axon_nb.engine.protection.protection:restore"
    run: str
    fence: tuple[int, int]


class ForgetProtected(RankCall[None], frozen=True):
    """Give up what `KeepSnapshot` has kept, unless a protected step has taken its place."""

    target = "axon_nb.engine.protection.protection:forget"
    key: str


class UndoableCell(Struct, frozen=True):
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


class Undoable(Struct, frozen=True):
    """What a rank can undo."""

    since: float
    """When it began to remember cells, in seconds since the epoch; a replaced rank begins again."""
    cells: tuple[UndoableCell, ...]
    """Oldest first."""


class ListUndoable(RankCall[Undoable], frozen=True):
    """List the cells that a rank can undo."""

    target = "axon_nb.engine.snapshot.history:list_undoable"


class UndoCell(RankCall[list[str]], frozen=True):
    """Restore the state before a cell; returns a line for each object that refused its state."""

    target = "axon_nb.engine.snapshot.history:undo"
    run: str


class HoldSnapshot(RankCall[UndoableCell], frozen=True):
    """Take a snapshot and keep it under a name, until the next one of that name."""

    target = "axon_nb.engine.snapshot.history:hold"
    key: str
    limit: int
    """Bytes that it may always take; more, up to half of the memory that is free."""


class KeepSnapshot(RankCall[UndoableCell], frozen=True):
    """Do the same in memory that outlives the rank, as a protected step: the name is the run, the fence ``(0, 0)``."""

    target = "axon_nb.engine.protection.protection:keep"
    key: str
    limit: int
    """As for `HoldSnapshot`."""


class RestoreHeld(RankCall[list[str]], frozen=True):
    """Restore a held snapshot, and forget it; returns a line for each object that refused its state."""

    target = "axon_nb.engine.snapshot.history:restore_held"
    key: str
