"""How an engine becomes a rank: it describes itself, then joins the world; and how a world changes its size."""

from __future__ import annotations

from dataclasses import dataclass

from axon_nb.records.protocol.cluster import EngineInfo
from axon_nb.records.protocol.messages import RankCall, Request
from axon_nb.records.protocol.recovery import GroupRecord

ENGINE_ENTRY = "axon_nb.engine.bootstrap:run_engine"
"""Entry point of a forked rank, as ``module:function``."""


@dataclass(frozen=True, slots=True)
class DirectRequest(Request[None]):
    """Take cells and calls also from a socket of the notebook, if it is on the same host."""

    path: str
    """Of the Unix socket."""
    host: str
    """Name of the notebook's host."""
    identity: str
    """The engine's, in ipyparallel."""


@dataclass(frozen=True, slots=True)
class JoinConfig:
    """How a rank joins its world; created in the notebook."""

    rank: int
    world_size: int
    local_rank: int
    """Index among the ranks of this host."""
    local_world_size: int
    """Number of ranks on this host."""
    node_rank: int
    """Index of this host."""
    backend: str
    """``shm``, ``gloo`` or ``nccl``. torch calls the groups of the first two ``gloo``."""
    store: str
    """Address of the rendezvous store: the path of a Unix socket, or ``tcp:<ip>:<port>``."""
    device: str
    """``cpu`` or ``cuda:<index>``."""
    threads: int
    """Number of torch's intra-op threads."""
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


@dataclass(frozen=True, slots=True)
class Describe(RankCall[EngineInfo]):
    """Have an engine describe itself, before it joins."""

    target = "axon_nb.engine.bootstrap:describe"


@dataclass(frozen=True, slots=True)
class Join(RankCall[EngineInfo]):
    """Join the world; collective over all ranks. Returns the description, with device and seed."""

    target = "axon_nb.engine.bootstrap:join"
    config: JoinConfig
    epoch: int = 0
    """Number of the last rebuild of the groups; above 0, this rank replaces one that died."""
    groups: tuple[GroupRecord, ...] = ()
    """Groups besides the default one that the replaced rank was in."""


@dataclass(frozen=True, slots=True)
class FindObstacles(RankCall[dict[str, str]]):
    """Find variables that cannot be resharded; return the reason and the fix by name."""

    target = "axon_nb.engine.elastic.obstacles:find"
    new_size: int


@dataclass(frozen=True, slots=True)
class SetWorld(RankCall[None]):
    """Make this rank one of a world of another size; its groups must be rebuilt afterwards."""

    target = "axon_nb.engine.elastic.world:set_world"
    config: JoinConfig


@dataclass(frozen=True, slots=True)
class StageStates(RankCall[int]):
    """Send shards to where they belong in the new world, beside the old ones; return this rank's bytes.

    Collective over the ranks of both worlds.
    """

    target = "axon_nb.engine.elastic.states:stage"
    old_size: int
    new_size: int


@dataclass(frozen=True, slots=True)
class Committed:
    """What was adapted to the new world on one rank."""

    models: int
    """DDP, FSDP2 and ZeRO models."""
    samplers: int
    groups_left: tuple[str, ...]
    """Variables of process groups that are gone, because some of their ranks have left."""
    functions: int
    """Functions registered with `axon_nb.on_resize`."""


@dataclass(frozen=True, slots=True)
class CommitResize(RankCall[Committed]):
    """Use the staged shards instead of the old ones, and adapt the rest; does not communicate."""

    target = "axon_nb.engine.elastic.states:commit"
    old_size: int


@dataclass(frozen=True, slots=True)
class SettleResize(RankCall[None]):
    """End a resize that lost its notebook in the world that the host agent knows; does not communicate."""

    target = "axon_nb.engine.elastic.states:settle"
    config: JoinConfig
    old_size: int
    """Number of ranks before; 0: this is the old world."""


@dataclass(frozen=True, slots=True)
class CallResizeFunctions(RankCall[None]):
    """In a cell: call the functions registered with `axon_nb.on_resize`."""

    target = "axon_nb.engine.elastic.functions:call_functions"
    old_size: int
    new_size: int
