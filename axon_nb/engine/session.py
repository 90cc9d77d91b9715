"""The session of this rank: its configuration, its run-time state, and the namespace of its cells; set when it joins.

The namespace: the names predefined in every cell, torchrun's environment variables, and lookup of variables by name. A
lookup follows attributes and indices; it calls nothing.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from axon_nb.comm.world import World
from axon_nb.engine.groups.state import GroupsState
from axon_nb.engine.groups.store import AgentStore
from axon_nb.errors import UsageError
from axon_nb.host.shared_memory import SharedBlock
from axon_nb.records.protocol.cells import CellFacts
from axon_nb.records.protocol.recovery import JoinConfig

if TYPE_CHECKING:
    from axon_nb.engine.debugger import PostMortem
    from axon_nb.engine.divergence import NumberWatch
    from axon_nb.engine.kernel.cells import CellRunner
    from axon_nb.engine.kernel.interrupts import OptimizerSteps
    from axon_nb.engine.parity.comparer import Comparer
    from axon_nb.engine.protection.protection import Protection
    from axon_nb.engine.snapshot.history import History

PREDEFINED_NAMES = ("rank", "local_rank", "world_size", "device", "world", "dist", "torch")
"""Names that axon_nb defines on every rank."""
_session: list[RankSession] = []


def inject_names(namespace: dict[str, Any], config: JoinConfig, device: torch.device) -> None:
    """Put `rank, local_rank, world_size, device, world, mesh, dist, torch` into `namespace`."""
    namespace.update(
        rank=config.rank,
        local_rank=config.local_rank,
        world_size=config.world_size,
        device=device,
        world=World.init(),
        mesh=None,
        dist=dist,
        torch=torch,
    )


def user_variables(shell: Any) -> dict[str, Any]:
    """Variables that the user's cells defined in an IPython shell; names that start with an underscore are left out."""
    hidden = {*shell.user_ns_hidden, *PREDEFINED_NAMES}
    namespace = list(shell.user_ns.items())  # a copy: another thread may read while a cell runs
    return {name: value for name, value in namespace if name not in hidden and not name.startswith("_")}


def set_environment(config: JoinConfig) -> None:
    """Set the variables that torchrun sets, so that unmodified scripts run in a cell."""
    sys.argv = [""]  # as at a prompt: a script's argparse must not see the arguments of this process
    set_world_environment(config)


def set_world_environment(config: JoinConfig) -> None:
    """Set those variables alone, as when the world changes its size."""
    os.environ.update(
        RANK=str(config.rank),
        LOCAL_RANK=str(config.local_rank),
        WORLD_SIZE=str(config.world_size),
        LOCAL_WORLD_SIZE=str(config.local_world_size),
        GROUP_RANK=str(config.node_rank),
        GROUP_WORLD_SIZE=str(-(-config.world_size // max(config.local_world_size, 1))),
        ROLE_RANK=str(config.rank),
        ROLE_WORLD_SIZE=str(config.world_size),
        ROLE_NAME="default",
        MASTER_ADDR=config.master_addr,
        MASTER_PORT=str(config.master_port),
        TORCHELASTIC_RUN_ID="axon_nb",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
    )


def overwritten_variables(config: JoinConfig) -> dict[str, str]:
    """Return those variables that the user's code has set otherwise, as a recipe for one process does."""
    own = {"RANK": config.rank, "LOCAL_RANK": config.local_rank, "WORLD_SIZE": config.world_size}
    found = {name: os.environ.get(name, "") for name in own}
    return {name: text for name, text in found.items() if text != str(own[name])}


def resolve_variable(name: str, space: dict[str, Any]) -> Any:
    """Look up a variable, optionally followed by ``.attributes`` and constant ``[indices]``.

    Args:
        name: An expression such as ``model.layers[0]``.
        space: Variables by name.

    Raises:
        UsageError: the variable does not exist, or `name` is another kind of expression.
    """
    try:
        node = ast.parse(name, mode="eval").body
    except SyntaxError:
        raise UsageError(f"{name!r} is not the name of a variable.") from None
    steps: list[tuple[bool, Any]] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            steps.append((True, node.attr))
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            steps.append((False, node.slice.value))
        else:
            raise UsageError(f"{name!r} must be a variable, optionally with .attributes and [indices].")
        node = node.value
    if node.id not in space:
        raise UsageError(f"variable {node.id!r} does not exist.")
    value = space[node.id]
    for is_attribute, key in reversed(steps):
        try:
            value = getattr(value, key) if is_attribute else value[key]
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise UsageError(f"{name!r}: {type(error).__name__}: {error}") from None
    return value


class CellFeature(Protocol):
    """Something that surrounds cells while it is switched on; made with the session when it is first wanted."""

    @property
    def is_on(self) -> bool:
        """Whether it must hear of the next cell, even if that does not ask for it."""

    def begin_cell(self, facts: CellFacts) -> None:
        """Prepare for a cell, as its facts say."""

    def end_cell(self, *, is_ok: bool) -> None:
        """Finish with it; what is printed still belongs to the cell."""


@dataclass
class RankSession:
    """The rank of this process."""

    config: JoinConfig
    kernel: Any
    """ipyparallel's kernel, which has no types."""
    device: torch.device
    groups: GroupsState = field(default_factory=GroupsState)
    """Abort flag, call log and the rest that the process groups share."""
    cell: int | None = None
    """Number of the running notebook cell; None while idle."""
    store: AgentStore | None = None
    """The rendezvous store, held here because torch holds only its C++ half."""
    steps: OptimizerSteps = field(init=False)
    """Counts this rank's optimizer steps."""
    runner: CellRunner = field(init=False)
    """Runs cells, and keeps their values until the notebook fetches them."""
    snapshots: History = field(init=False)
    """The states before the last cells, for `%distributed undo`."""
    making: threading.RLock = field(default_factory=threading.RLock)
    """Held while a part is made."""
    parts: dict[str, Any] = field(default_factory=dict)
    """What was made of this rank so far besides, by `module:Class`; see `part`."""
    comparer: Comparer | None = None
    """Compares the running cell with one rank (`%%distributed --compare`)."""
    post_mortem: PostMortem = field(init=False)
    """Keeps the error of the last failed cell."""
    protected_step: int | None = None
    """Optimizer steps in the latest state that outlives this rank; None: there is none."""
    subgroup: dist.ProcessGroup | None = None
    """The process group that `subgroup` was last bound to."""
    num_subgroups: Counter[str] = field(default_factory=Counter)
    """How many groups this rank has created per set of ranks: the name of a destroyed one is not reused."""
    namespace_payload: bytearray = field(default_factory=bytearray)
    """Packed variables to send to a replacement rank."""
    resize_functions: dict[str, Callable[[int, int], object]] = field(default_factory=dict)
    """What `axon_nb.on_resize` registered, by name."""
    staged: dict[tuple[str, str, str], Any] = field(default_factory=dict)
    """During a resize, this rank's shards for the new world; see `engine.elastic.sharded_states`."""
    staged_size: int = 0
    """The number of ranks for which they were staged; 0: nothing is."""
    resized_from: int = 0
    """During a resize, the number of ranks before; 0: there is none."""
    is_paused: bool = False
    """Whether the cell has stopped at a breakpoint."""
    pending_value: bytes | bytearray = b""
    """A packed value that a notebook on another host will fetch."""
    held_block: SharedBlock | None = None
    """Variables for the ranks of this host, which came from a notebook on another one."""

    def part(self, kind: str) -> Any:
        """Return the part of this rank of a class, ``module:Class``; it is imported and made on first use."""
        with self.making:
            if kind not in self.parts:
                module, _, name = kind.partition(":")
                self.parts[kind] = getattr(importlib.import_module(module), name)(self)
            return self.parts[kind]

    def is_on(self, kind: str) -> bool:
        """Whether a `CellFeature` was made and is on."""
        return kind in self.parts and self.parts[kind].is_on

    @property
    def protection(self) -> Protection:
        """The states after the last steps, for `%distributed repair`."""
        return self.part("axon_nb.engine.protection.protection:Protection")  # type: ignore[no-any-return]

    @property
    def numbers(self) -> NumberWatch:
        """What watches weights, gradients and losses (`config watch_numbers`)."""
        return self.part("axon_nb.engine.divergence:NumberWatch")  # type: ignore[no-any-return]


def current() -> RankSession:
    """The rank of this process.

    Raises:
        RuntimeError: the process has not joined a world.
    """
    if not _session:
        raise RuntimeError("this process is not a rank of an axon_nb cluster")
    return _session[0]


def own_rank() -> int | None:
    """This process's rank; None if it is not a rank."""
    return _session[0].config.rank if _session else None


def set_current(session: RankSession) -> None:
    """Make `session` the rank of this process."""
    _session[:] = [session]
