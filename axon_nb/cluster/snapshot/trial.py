"""Cells that are tried: each rank holds a snapshot from before, and restores it however the cell ends.

Cells of `--branch` go on after a death: if all ranks run them, the snapshot is in memory that outlives the ranks.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from axon_nb.cluster.recovery.new_ranks import call_all, interrupts_deferred
from axon_nb.cluster.recovery.repair import repair
from axon_nb.cluster.snapshot.undo import describe_obstacles, raise_if_busy, report_refused, restore_all
from axon_nb.errors import AxonError, UsageError
from axon_nb.records.protocol.recovery import (
    ForgetProtected,
    HoldSnapshot,
    KeepSnapshot,
    RestoreHeld,
    RestoreProtected,
    UndoableCell,
)
from axon_nb.records.ranks import name_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

__all__ = ["Trials", "begin_trial", "end_trial"]

_KEY = "try"


def begin_trial(state: ClusterState, ranks: Sequence[int], limit: int) -> None:
    """Have these ranks hold a snapshot, and say what it cannot restore.

    Args:
        state: The cluster.
        ranks: The ranks that will run the cell.
        limit: Bytes that the snapshot may take on each rank; 0: half of the memory that is free there.

    Raises:
        UsageError: one of them cannot; the cell must not run.
    """
    raise_if_busy(state, "try this cell")
    state.health.ensure_available(ranks)
    with interrupts_deferred():
        held = call_all(state.connection, ranks, HoldSnapshot(_KEY, limit))
    if missing := {rank: record.missing for rank, record in held.items() if record.missing}:
        rank, why = next(iter(missing.items()))
        raise UsageError(f"The cell did not run: rank {rank} {why}.")
    _hint_obstacles(state, held)


def _hint_obstacles(state: ClusterState, held: Mapping[int, UndoableCell]) -> None:
    text = describe_obstacles({name: what for record in held.values() for name, what in record.obstacles.items()})
    state.health.hint(text, text)


def end_trial(state: ClusterState, ranks: Sequence[int]) -> None:
    """Restore what these ranks hold; those that died or are stuck meanwhile are named."""
    able = [rank for rank in ranks if rank not in state.health.dead and rank not in state.health.stuck]
    with interrupts_deferred():
        report_refused(restore_all(state, dict.fromkeys(able, RestoreHeld(_KEY))))
    if lost := [rank for rank in ranks if rank not in able]:
        print(f"{name_ranks(lost).capitalize()} could not restore the state from before the cell.")


class Trials:
    """Cells that are tried one after the other, always from the same state.

    Args:
        state: The cluster.
        ranks: The ranks that run them.
        limit: As for `begin_trial`.
    """

    def __init__(self, state: ClusterState, ranks: Sequence[int], limit: int) -> None:
        self._state = state
        self._ranks = ranks
        self._limit = limit
        self._key = f"try {uuid.uuid4().hex}"
        self._outlives: bool | None = None
        """Whether the snapshot outlives the ranks; None: there was no cell yet."""

    def begin(self) -> None:
        """Before a cell: have the ranks keep the state, unless they have it. Raises as `begin_trial`."""
        if self._outlives is None:
            self._outlives = self._keep()
        if not self._outlives:
            begin_trial(self._state, self._ranks, self._limit)

    def _keep(self) -> bool:
        state = self._state
        if list(self._ranks) != list(state.ranks) or state.engines != "axon":
            return False
        raise_if_busy(state, "try this cell")
        state.health.ensure_available(self._ranks)
        with interrupts_deferred():
            kept = call_all(state.connection, state.ranks, KeepSnapshot(self._key, self._limit))
        if any(record.missing for record in kept.values()):
            return False
        _hint_obstacles(state, kept)
        return True

    def end(self, gone: Sequence[int]) -> str:
        """After a cell: restore the state, and replace ranks that died.

        Args:
            gone: The ranks that died in the cell, also those that were replaced since.

        Returns:
            Why no other cell can be tried, as a sentence without its end; empty if one can.
        """
        state = self._state
        if not self._outlives:
            end_trial(state, self._ranks)
            return f"{name_ranks(gone)} died" if gone else ""
        try:
            if state.health.dead or state.health.stuck or state.health.lost_contexts:
                returned = repair(state, None).returned
                if returned is None:
                    return f"{name_ranks(gone)} died, and no state was left"
                refused = returned.refused
            else:
                with interrupts_deferred():
                    refused = restore_all(state, dict.fromkeys(state.ranks, RestoreProtected(self._key, (0, 0))))
        except AxonError as error:
            return f"{name_ranks(gone)} died, and could not be replaced ({error})"
        report_refused(refused)
        return ""

    def close(self) -> None:
        """Give up what the ranks keep."""
        if self._outlives and not self._state.health.dead:
            call_all(self._state.connection, self._state.ranks, ForgetProtected(self._key))
