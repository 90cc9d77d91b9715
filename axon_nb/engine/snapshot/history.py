"""The snapshots of a rank: one before each of the last cells, within a limit of memory, and those that are held."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass

import torch

from axon_nb.engine.snapshot.memory import HostMemory
from axon_nb.engine.snapshot.snapshot import Snapshot, StepCounts
from axon_nb.engine.snapshot.state import StateFinder
from axon_nb.records.units import format_bytes

_MAX_CELLS = 20
"""Most cells that can be undone, however small their states are: snapshots keep alive what cells delete."""


_MAX_INERT = 200
"""Most characters of code that are worth looking whether it can change anything."""


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


@dataclass(slots=True, eq=False)
class CellSnapshot:
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
