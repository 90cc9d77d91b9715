"""The snapshots of a rank: one before each of the last cells, within a limit of memory, and those that are held."""

from __future__ import annotations

import time
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass

import torch

from axon_nb.engine.snapshot.memory import HostMemory
from axon_nb.engine.snapshot.snapshot import Snapshot, StepCounts
from axon_nb.engine.snapshot.state import StateFinder
from axon_nb.records.units import format_bytes

__all__ = ["CellSnapshot", "History", "TooLargeError"]

_MAX_CELLS = 20
"""Most cells that can be undone, however small their states are: snapshots keep alive what cells delete."""


class TooLargeError(Exception):
    """The state needs more memory than the limit."""


@dataclass(slots=True)
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
        copies = {id(facts.copy): facts.size for snapshot in snapshots for facts in snapshot.facts if facts.copy}
        newest = snapshots[-1].state.storages if snapshots else {}
        old = {key: facts.size for snapshot in snapshots for key, facts in snapshot.state.storages.items()}
        return sum(copies.values()) + sum(size for key, size in old.items() if key not in newest)

    def before_cell(self, run: str, cell: int, ranks: tuple[int, ...], limit: int) -> None:
        """Take a snapshot before a cell; the oldest ones go if the memory does not suffice.

        Args:
            run: Id of its run.
            cell: Its number.
            ranks: The ranks that run it.
            limit: Bytes of memory for all snapshots; 0: none are taken, and those that exist are dropped.
        """
        if not limit:
            self.forget_cells()
            return
        entry = CellSnapshot(run, cell, ranks, time.time(), None)
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
        return dict(snapshot.state.obstacles)

    def _take_within(self, limit: int) -> Snapshot:
        bound = set(map(id, list(self._namespace.values())))
        held = {id(value): value for cell in self.cells for value in _values(cell) if id(value) not in bound}
        snapshot = Snapshot(self._finder.find_within(limit, held.values()))
        del held
        if too_large := snapshot.state.too_large:  # an earlier snapshot must not keep alive what has grown since
            for cell in [cell for cell in self.cells if any(id(value) in too_large for value in _values(cell))]:
                self.cells.remove(cell)
                self._drop(cell)
        changed = snapshot.changed_since(self._latest())
        needed = snapshot.state.structure + sum(facts.size for facts in changed)
        while self.cells and (len(self.cells) >= _MAX_CELLS or self._used + needed > limit):
            self._drop(self.cells.pop(0))
        snapshot.save(changed, self._memory, self._counts)
        return snapshot

    @property
    def _used(self) -> int:
        return self.size + sum(snapshot.state.structure for snapshot in self._snapshots())

    def changed_above_limit(self, cell: CellSnapshot) -> list[str]:
        """Return the variables that did not fit into the limit before a cell, and are known to have changed since."""
        left_out = cell.snapshot.state.left_out if cell.snapshot is not None else {}
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
        snapshot = self.cells[index].snapshot
        assert snapshot is not None
        refused = self._restore(snapshot)
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
            snapshot.release(self._memory)

    def forget_cells(self) -> None:
        """Drop the snapshots before cells, as their state would not fit any more."""
        while self.cells:
            self._drop(self.cells.pop())
        self._memory.trim(0)

    def _drop(self, cell: CellSnapshot) -> None:
        if cell.snapshot is not None:
            cell.snapshot.release(self._memory)
            cell.snapshot = None


def _values(cell: CellSnapshot) -> Iterable[object]:
    return cell.snapshot.state.names.values() if cell.snapshot is not None else ()
