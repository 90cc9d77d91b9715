"""The snapshots of a rank: one before each of the last cells, within a limit of memory, and those that are held.

The notebook asks to list them, to undo a cell, to hold one and to restore it.
"""

from __future__ import annotations

import ast
import os
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, Protocol

import torch
from msgspec import Struct, field

from axon_nb.engine.frames import gc_paused
from axon_nb.engine.session import current
from axon_nb.engine.snapshot.data_kinds import ArrayState, TensorState, plain, set_gradient
from axon_nb.engine.snapshot.kinds import NotRestorableError, describe_type
from axon_nb.engine.snapshot.memory import (
    Allocator,
    Copy,
    HostMemory,
    StorageFacts,
    default_limit,
    storage_key,
    write_back,
)
from axon_nb.engine.snapshot.state import State, StateFinder, is_bound_by_user
from axon_nb.random_states import random_states, set_random_states
from axon_nb.records.protocol.recovery import Undoable, UndoableCell
from axon_nb.records.units import format_bytes

_MAX_CELLS = 20
"""Most cells that can be undone, however small their states are: snapshots keep alive what cells delete."""
_MAX_INERT = 200
"""Most characters of code that are worth looking whether it can change anything."""


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(saved: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(saved[0], warn_only=saved[1])


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return ""


def _set_folder(saved: str) -> None:
    if saved:
        os.chdir(saved)


def _device() -> torch.device:
    return torch.empty(0, device=None).device  # torch.get_default_device imports a module


def _set_device(saved: torch.device) -> None:
    torch.set_default_device(None if saved == torch.device("cpu") else saved)


_MODES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (_device, _set_device),
    "the mode of gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's precision of float32": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch's deterministic algorithms": (_deterministic, _set_deterministic),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the working directory": (_folder, _set_folder),
}


def modes() -> list[Any]:
    """Return what is set for the whole process; on the main thread, as the mode of gradients belongs to a thread."""
    return [get() for get, _ in _MODES.values()]


def _set_modes(saved: list[Any]) -> Iterator[str]:
    """Set what `modes` returned; yield a line for what refuses it."""
    for (name, (get, restore)), before in zip(_MODES.items(), saved, strict=True):
        try:
            if get() != before:
                restore(before)
        except Exception as error:
            yield f"{name} ({type(error).__name__}: {error})"


class StepCounts(Protocol):
    """The number of steps that each optimizer has made, which messages after a failed cell compare between ranks."""

    def of(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of steps of this optimizer."""

    def set(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        """Set it."""


class Snapshot(Struct):
    """The state of a session at one time; `save` completes it, and `release` must be called in the end."""

    state: State
    steps: list[int] = field(default_factory=list)
    random: dict[str, Any] = field(default_factory=dict)
    """The states of the shared generators."""
    modes: list[Any] = field(default_factory=list)
    """What is set for the process; empty: unknown, as within an optimizer's step, where gradients are off."""

    @property
    def facts(self) -> list[StorageFacts]:
        """The storages with content."""
        return list(self.state.storages.values())

    def changed_since(self, earlier: Snapshot | None) -> list[StorageFacts]:
        """Share what is still equal with an earlier snapshot; return the storages that must be copied."""
        changed = []
        for key, facts in self.state.storages.items():
            before = earlier.state.storages.get(key) if earlier is not None else None
            if before is not None and before.copy is not None and facts.is_unchanged(before.copy):
                facts.copy = before.copy
                facts.copy.users += 1
            else:
                changed.append(facts)
        return changed

    def save(self, changed: list[StorageFacts], allocator: Allocator, counts: StepCounts) -> None:
        """Copy these storages, and note the rest."""
        for facts in changed:
            facts.save(allocator)
        if torch.cuda.is_initialized() and any(facts.storage.device.type == "cuda" for facts in changed):
            torch.cuda.synchronize()
        self.steps = [counts.of(optimizer) for optimizer in self.state.optimizers]
        self.random = random_states()

    def copy_of(self, storage: torch.UntypedStorage, allocator: Allocator) -> Copy:
        """Return the copy of a storage; one that the walk has not found, such as that of a temporary, is added."""
        facts = StorageFacts(storage, storage.nbytes(), set())
        facts = self.state.storages.setdefault(facts.key, facts)
        return facts.copy or facts.save(allocator)

    def release(self, allocator: Allocator) -> None:
        """Give the memory back, except what other snapshots share."""
        for facts in self.facts:
            copy, facts.copy = facts.copy, None
            if copy is not None:
                copy.users -= 1
                if not copy.users:
                    allocator.release(copy.buffer)

    def restore(self, namespace: MutableMapping[str, Any], counts: StepCounts) -> list[str]:
        """Make the session what it was, in place.

        Args:
            namespace: The variables; names of IPython are left alone.
            counts: The steps of optimizers.

        Returns:
            A line for each object that refused its state.
        """
        refused = []
        moved: set[tuple[str, int, int]] = set()
        """Memory of arrays that NumPy has replaced: nothing must be written there."""
        with gc_paused(on_main=True), plain(), torch.no_grad():
            nodes = self.state.nodes
            todo = [(index, kind.restore, value, saved) for index, (kind, value, saved) in enumerate(nodes)]
            todo += [
                (index, set_gradient, value, saved) for index, _, value, saved in todo if type(saved) is TensorState
            ]
            for index, restore, value, saved in todo:
                try:
                    restore(value, saved)
                except Exception as error:
                    why = str(error) if isinstance(error, NotRestorableError) else f"{type(error).__name__}: {error}"
                    refused.append(f"`{self.state.name_of(index)}` ({describe_type(type(value))}: {why})")
                    if isinstance(saved, ArrayState) and saved.memory is not None and saved.has_moved(value):
                        moved.add(storage_key(saved.memory.untyped_storage()))
            refused += write_back(facts for facts in [*self.state.empty, *self.facts] if facts.key not in moved)
        known = self.state.names.keys() | self.state.left_out.keys() | self.state.not_held
        for name in [name for name in namespace if is_bound_by_user(name) and name not in known]:
            del namespace[name]
        namespace.update(self.state.names)
        for optimizer, steps in zip(self.state.optimizers, self.steps, strict=True):
            counts.set(optimizer, steps)
        set_random_states(self.random)
        return [*refused, *(_set_modes(self.modes) if self.modes else ())]


class TooLargeError(Exception):
    """The state needs more memory than the limit."""


def is_inert(code: str) -> bool:
    """Whether code runs nothing that could change a state: it is empty, comments, constants or `pass`."""
    if len(code) > _MAX_INERT:
        return False
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError):  # such as a magic
        return False
    return all(isinstance(node.value if isinstance(node, ast.Expr) else node, ast.Constant | ast.Pass) for node in body)


class CellSnapshot(Struct, eq=False):
    """What is kept of the time before one cell."""

    run: str
    """Id of the cell's run, the same on all its ranks."""
    cell: int
    """Number of the notebook's cell."""
    ranks: tuple[int, ...]
    """The ranks that ran it."""
    started: float
    """Seconds since the epoch."""
    snapshot: Snapshot | None
    missing: str = ""
    """Why there is no snapshot; reads after "Rank 0"."""

    @property
    def is_inert(self) -> bool:
        """Whether it needs none: the state before it is that before the next cell."""
        return self.snapshot is None and not self.missing


class History:
    """Owns the snapshots of a rank.

    Args:
        namespace: The variables of the rank.
        counts: The steps of its optimizers.
        memory: Supplies the memory of the copies.
    """

    def __init__(self, namespace: MutableMapping[str, object], counts: StepCounts, memory: HostMemory) -> None:
        self._namespace = namespace
        self._finder = StateFinder(namespace)
        self._counts = counts
        self._memory = memory
        self._held: dict[str, Snapshot] = {}
        self._users: dict[tuple[str, int, int], int] = {}
        """By the key of a storage, how many snapshots have it."""
        self._known_size = 0
        """Bytes of these storages."""
        self.since = time.time()
        """When it began, in seconds since the epoch."""
        self.cells: list[CellSnapshot] = []
        """Oldest first."""

    def _snapshots(self) -> list[Snapshot]:
        return [cell.snapshot for cell in list(self.cells) if cell.snapshot is not None] + list(self._held.values())

    def copies(self) -> list[torch.Tensor]:
        """Return the memory of all copies; any thread may ask."""
        found = [facts.copy for snapshot in self._snapshots() for facts in snapshot.facts]
        return [copy.buffer for copy in found if copy is not None]

    @property
    def size(self) -> int:
        """Bytes of all copies, and of the storages that only snapshots keep alive."""
        snapshots = self._snapshots()
        return self._memory.used + self._known_size - (snapshots[-1].state.size if snapshots else 0)

    def _add(self, snapshot: Snapshot) -> None:
        """Count the storages of a snapshot that is taken."""
        for key in snapshot.state.storages:
            count = self._users.get(key, 0)
            self._users[key] = count + 1
            self._known_size += key[2] * (not count)

    def _release(self, snapshot: Snapshot) -> None:
        """Give back the memory of a snapshot."""
        for key in snapshot.state.storages:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._known_size -= key[2]
        snapshot.release(self._memory)

    def before_cell(self, run: str, cell: int, ranks: tuple[int, ...], limit: int, code: str | None = None) -> None:
        """Take a snapshot before a cell; the oldest ones go if the memory does not suffice.

        Args:
            run: Id of its run.
            cell: Its number.
            ranks: The ranks that run it.
            limit: Bytes of memory for all snapshots; 0: none are taken, and those that exist are dropped.
            code: Its code. A cell that can change nothing needs no snapshot. None: it can change anything.
        """
        if not limit:
            self.forget_cells()
            return
        entry = CellSnapshot(run, cell, ranks, time.time(), None)
        if code is not None and is_inert(code):
            while len(self.cells) >= _MAX_CELLS:
                self._drop(self.cells.pop(0))
            self.cells.append(entry)
            return
        try:
            entry.snapshot = self._take_within(limit)
        except Exception as error:  # no memory for the copy, or an odd object: the cell must run
            entry.missing = f"could not copy its state ({type(error).__name__}: {error})"
        self.cells.append(entry)
        self._memory.trim(max(0, limit - self._used))

    def hold(self, key: str, limit: int) -> dict[str, str]:
        """Take a snapshot and keep it until `restore_held` or `release`.

        Args:
            key: A name for it.
            limit: Bytes that it may take.

        Returns:
            By variable, what in it cannot be restored.

        Raises:
            TooLargeError: it needs more.
        """
        self.release(key)
        snapshot = Snapshot(self._finder.find())
        if snapshot.state.size > limit:
            needs = format_bytes(snapshot.state.size)
            raise TooLargeError(f"has a state of {needs}, more than {format_bytes(limit)}")
        snapshot.save(snapshot.changed_since(self._latest()), self._memory, self._counts)
        snapshot.modes = modes()
        self._held[key] = snapshot
        self._add(snapshot)
        return dict(snapshot.state.obstacles)

    def _take_within(self, limit: int) -> Snapshot:
        latest = self._latest()
        bound = set(map(id, list(self._namespace.values())))
        held = {id(value): value for cell in self.cells for value in _values(cell) if id(value) not in bound}
        snapshot = Snapshot(self._finder.find_within(limit, held.values(), latest.state if latest else None))
        del held
        if too_large := snapshot.state.too_large:  # an earlier snapshot must not keep alive what has grown since
            for cell in [cell for cell in self.cells if any(id(value) in too_large for value in _values(cell))]:
                first = last = self.cells.index(cell)
                while first and self.cells[first - 1].is_inert:
                    first -= 1
                del self.cells[first : last + 1]
                self._drop(cell)
        changed = snapshot.changed_since(self._latest())
        needed = snapshot.state.structure + sum(facts.size for facts in changed)
        while self.cells and (len(self.cells) >= _MAX_CELLS or self._used + needed > limit):
            self._drop(self.cells.pop(0))
        snapshot.save(changed, self._memory, self._counts)
        snapshot.modes = modes()
        self._add(snapshot)
        return snapshot

    @property
    def _used(self) -> int:
        return self.size + sum(snapshot.state.structure for snapshot in self._snapshots())

    def state_before(self, cell: CellSnapshot) -> CellSnapshot | None:
        """Return the first cell from this one on that could change something, with the state before it; None: none."""
        return next((one for one in self.cells[self.cells.index(cell) :] if not one.is_inert), None)

    def changed_above_limit(self, cell: CellSnapshot) -> list[str]:
        """Return the variables that did not fit into the limit before a cell, and are known to have changed since."""
        before = self.state_before(cell)
        left_out = before.snapshot.state.left_out if before is not None and before.snapshot is not None else {}
        return [name for name, one in left_out.items() if one.has_changed(name, self._namespace)]

    def _latest(self) -> Snapshot | None:
        for cell in reversed(self.cells):
            if cell.snapshot is not None:
                return cell.snapshot
        return next(reversed(self._held.values()), None)

    def undo(self, run: str) -> list[str]:
        """Restore the state before the cell with this run, and forget that cell and all later ones.

        Returns:
            A line for each object that refused its state.
        """
        index = next(index for index, cell in enumerate(self.cells) if cell.run == run)
        refused = list[str]()
        if (before := self.state_before(self.cells[index])) is not None:
            assert before.snapshot is not None
            refused = self._restore(before.snapshot)
        for cell in self.cells[index:]:
            self._drop(cell)
        del self.cells[index:]
        return refused

    def restore_held(self, key: str) -> list[str]:
        """Restore a held snapshot, which stays; return a line for each object that refused its state."""
        snapshot = self._held.get(key)
        return ["no snapshot is held, as the rank was replaced"] if snapshot is None else self._restore(snapshot)

    def _restore(self, snapshot: Snapshot) -> list[str]:
        return snapshot.restore(self._namespace, self._counts)

    def release(self, key: str) -> None:
        """Forget a held snapshot, if there is one."""
        if (snapshot := self._held.pop(key, None)) is not None:
            self._release(snapshot)

    def forget_cells(self) -> None:
        """Drop the snapshots before cells, as their state would not fit any more."""
        while self.cells:
            self._drop(self.cells.pop())
        self._memory.trim(0)

    def _drop(self, cell: CellSnapshot) -> None:
        if cell.snapshot is not None:
            self._release(cell.snapshot)
            cell.snapshot = None


def _values(cell: CellSnapshot) -> Iterable[object]:
    return cell.snapshot.state.names.values() if cell.snapshot is not None else ()


def list_undoable() -> Undoable:
    """List the cells that this rank can undo, and those that it cannot undo with the reason."""
    history = current().snapshots
    return Undoable(history.since, tuple(_record(history, cell) for cell in history.cells))


def _record(history: History, cell: CellSnapshot) -> UndoableCell:
    before = history.state_before(cell)
    obstacles = dict(before.snapshot.state.obstacles) if before is not None and before.snapshot is not None else {}
    missing = before.missing if before is not None else ""
    if changed := history.changed_above_limit(cell):
        variables = " and ".join(f"`{name}`" for name in changed[:2]) + " and more" * (len(changed) > 2)
        raise_it = "`%distributed config undo_memory=SIZE` sets it for later cells"
        missing = f"has changed {variables}, which {obstacles[changed[0]]}; {raise_it}"
    return UndoableCell(cell.run, cell.cell, cell.ranks, cell.started, missing, obstacles)


def undo(run: str) -> list[str]:
    """Restore the state before the cell with this run; return a line for each object that refused its state."""
    current().protection.forget()  # a death before the next cell must not bring back what is undone
    return current().snapshots.undo(run)


def hold(key: str, limit: int) -> UndoableCell:
    """Hold a snapshot; the record says what in it cannot be restored, or why there is none.

    Args:
        key: A name for it.
        limit: Bytes that it may always take; more, if it is at most half of the memory that is free.
    """
    try:
        obstacles = current().snapshots.hold(key, max(limit, default_limit()))
    except TooLargeError as error:
        return UndoableCell(key, 0, (), 0.0, missing=str(error))
    return UndoableCell(key, 0, (), 0.0, obstacles=obstacles)


def restore_held(key: str) -> list[str]:
    """Restore a held snapshot, and forget it; return a line for each object that refused its state."""
    history = current().snapshots
    refused = history.restore_held(key)
    history.release(key)
    return refused
