"""Cells that are tried: each rank holds a snapshot from before, and restores it however the cell ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from axon_nb.cluster.recovery.new_ranks import call_all, interrupts_deferred
from axon_nb.cluster.snapshot.undo import describe_obstacles, raise_if_busy, report_refused, restore_all
from axon_nb.errors import UsageError
from axon_nb.records.protocol.recovery import HoldSnapshot, RestoreHeld
from axon_nb.records.ranks import name_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

__all__ = ["begin_trial", "end_trial"]

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
    text = describe_obstacles({name: what for record in held.values() for name, what in record.obstacles.items()})
    state.health.hint(text, text)


def end_trial(state: ClusterState, ranks: Sequence[int]) -> None:
    """Restore what these ranks hold; those that died or are stuck meanwhile are named."""
    able = [rank for rank in ranks if rank not in state.health.dead and rank not in state.health.stuck]
    with interrupts_deferred():
        report_refused(restore_all(state, dict.fromkeys(able, RestoreHeld(_KEY))))
    if lost := [rank for rank in ranks if rank not in able]:
        print(f"{name_ranks(lost).capitalize()} could not restore the state from before the cell.")
