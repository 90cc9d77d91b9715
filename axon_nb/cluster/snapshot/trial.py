"""Cells that are tried: the ranks save their state, run the cell, and restore the state however the cell ends.

`CellManager` does this for every cell with `restores`, so `--try`, `--branch` and `--compare` share it.
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

_KEY = "try"


class Trials:
    """Cells that run one after the other, always from the same state.

    Args:
        state: The cluster.
        ranks: The ranks that run them.
        limit: Bytes that a snapshot may always take on each rank; more, up to half of the memory that is free there.
        outlives: Whether to go on after a death: if all ranks run the cells, the state is then kept in memory that
            outlives the ranks, in the place of a protected step, until `close`.
    """

    def __init__(self, state: ClusterState, ranks: Sequence[int], limit: int, *, outlives: bool = False) -> None:
        self._state, self._ranks, self._limit = state, ranks, limit
        self._key = f"{_KEY} {uuid.uuid4().hex}"
        self._may_keep = outlives and list(ranks) == list(state.ranks) and state.engines == "axon"
        self._is_kept = False
        self._processes: list[int] = []
        self.named: dict[str, str] = {}
        """By variable, what is or has something that cannot be restored."""
        self.lost = ""
        """Why no other cell can be tried, as a sentence without its end; empty if one can."""

    def begin(self) -> None:
        """Before a cell: have the ranks save the state, and say what of it cannot be restored.

        Raises:
            UsageError: one of them cannot; the cell must not run.
        """
        state = self._state
        raise_if_busy(state, "try this cell")
        state.health.ensure_available(self._ranks)
        self._processes = [place.pid for place in state.rank_info]
        if self._is_kept:
            return
        if self._may_keep:
            self._is_kept = self._may_keep = not self._save(KeepSnapshot(self._key, self._limit))
        if not self._is_kept and (missing := self._save(HoldSnapshot(_KEY, self._limit))):
            rank, why = next(iter(missing.items()))
            raise UsageError(f"The cell did not run: rank {rank} {why}.")

    def _save(self, call: HoldSnapshot | KeepSnapshot) -> dict[int, str]:
        """Return by rank why it cannot save its state; empty if all have."""
        with interrupts_deferred():
            saved: Mapping[int, UndoableCell] = call_all(self._state.connection, self._ranks, call)
        missing = {rank: record.missing for rank, record in saved.items() if record.missing}
        if not missing:
            named = {name: what for one in saved.values() for name, what in one.obstacles.items()}
            if not named:
                self._state.health.hint(_KEY, describe_obstacles(named))
            elif named != self.named:
                print(describe_obstacles(named))
            self.named = named
        return missing

    def end(self) -> None:
        """After a cell: restore the state, and replace ranks that died if the state outlives them."""
        state, health = self._state, self._state.health
        replaced = [rank for rank in self._ranks if state.rank_info[rank].pid != self._processes[rank]]
        gone = [rank for rank in self._ranks if rank in replaced or rank in health.dead or rank in health.stuck]
        why = f"{name_ranks(gone)} {'died' if {*gone} - {*health.stuck} else 'did not stop'}" if gone else ""
        if not self._is_kept:
            able = [rank for rank in self._ranks if rank not in health.dead and rank not in health.stuck]
            with interrupts_deferred():
                report_refused(restore_all(state, dict.fromkeys(able, RestoreHeld(_KEY))))
            if unable := [rank for rank in self._ranks if rank not in able]:
                print(f"{name_ranks(unable).capitalize()} could not restore the state from before the cell.")
            self.lost = why
            return
        try:
            if health.dead or health.stuck or health.lost_contexts:
                returned = repair(state, None).returned
                self.lost = "" if returned is not None else f"{why}, and no state was left"
                refused = returned.refused if returned is not None else {}
            else:
                with interrupts_deferred():
                    refused = restore_all(state, dict.fromkeys(state.ranks, RestoreProtected(self._key, (0, 0))))
        except AxonError as error:
            self.lost = f"{why}, and could not be replaced ({error})" if gone else f"the state was lost ({error})"
        else:
            known = {f"`{name}` ({what})" for name, what in self.named.items()}
            report_refused({rank: [line for line in lines if line not in known] for rank, lines in refused.items()})

    def close(self) -> None:
        """Give up what the ranks keep, unless a repair needs it."""
        if self._is_kept and not self.lost and self._state.running and not self._state.health.dead:
            call_all(self._state.connection, self._state.ranks, ForgetProtected(self._key))


def begin_trials(
    restores: bool | Trials | None, state: ClusterState, ranks: Sequence[int], limit: int
) -> bool | Trials:
    """Before a cell: return the trials that its option `restores` asks for, once they have begun; False: none."""
    trials = Trials(state, ranks, limit) if restores is True else restores
    if trials:
        trials.begin()
    return trials or False
