"""Restore the state of all ranks, or of none: take cells back (`%distributed undo`), and try cells.

To undo, every rank is asked first, and restores only if all can. Of a tried cell, the ranks save their state, run the
cell, and restore the state however it ends. `CellManager` does this for every cell with `restores`, so `--try`,
`--branch`, `--compare` and `--prove` share it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from axon_nb.cluster.launch.engines import STATES_S, ask
from axon_nb.cluster.recovery.new_ranks import interrupts_deferred
from axon_nb.cluster.recovery.repair import repair
from axon_nb.errors import AxonError, UsageError
from axon_nb.records.protocol import recovery as protocol
from axon_nb.records.protocol.wire import RankCall
from axon_nb.records.ranks import name_ranks, ranks_by
from axon_nb.records.units import count_of

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

_OUTSIDE = "files, processes and whatever else is outside the ranks' variables"
_KEY = "try"


def undo(state: ClusterState, count: int) -> str:
    """Take the last `count` cells back.

    Args:
        state: The cluster.
        count: How many.

    Returns:
        What was undone, as a sentence.

    Raises:
        UsageError: that is not possible; nothing has changed.
    """
    if count < 1:
        raise UsageError(f"%distributed undo takes a number of cells from 1; got {count}.")
    state.raise_if_busy("wait for it or interrupt it, then undo")
    state.health.ensure_available(state.ranks)
    with interrupts_deferred():
        answers: dict[int, protocol.Undoable] = ask(
            state.connection, dict.fromkeys(state.ranks, protocol.ListUndoable())
        )
        cells = _last_cells(answers, count)
        targets = {
            rank: next(cell for cell in cells if rank in cell.ranks)
            for rank in state.ranks
            if any(rank in cell.ranks for cell in cells)
        }
        named: dict[str, str] = {}
        for rank, cell in targets.items():
            named.update(_check(rank, cell, answers[rank]).obstacles)
        if named:
            print(describe_obstacles(named))
        else:
            state.health.hint(_KEY, describe_obstacles(named))
        refused = restore_all(state, {rank: protocol.UndoCell(cell.run) for rank, cell in targets.items()})
    report_refused(refused)
    unlike = ", but for what is named above" if named or any(refused.values()) else ""
    which = ", ".join(f"In [{cell.cell}]" for cell in reversed(cells))
    have = "has" if len(targets) == 1 else "have"
    return f"Undid {which}: {name_ranks(targets)} {have} the state from before{unlike}."


def _last_cells(answers: Mapping[int, protocol.Undoable], count: int) -> list[protocol.UndoableCell]:
    """Return the last cells of the cluster, oldest first; raises UsageError if there are fewer."""
    by_run: dict[str, protocol.UndoableCell] = {}
    for answer in answers.values():
        for cell in answer.cells:
            by_run.setdefault(cell.run, cell)
    cells = sorted(by_run.values(), key=lambda cell: cell.started)
    if not cells:
        raise UsageError(
            "Nothing to undo: the ranks have no state from before a cell. They keep one before each cell unless "
            "`%distributed config undo_memory` is 0."
        )
    if len(cells) < count:
        raise UsageError(f"Only {count_of(len(cells), 'cell')} can be undone; got {count}.")
    return cells[-count:]


def _check(rank: int, cell: protocol.UndoableCell, answer: protocol.Undoable) -> protocol.UndoableCell:
    """Return the rank's own record of a cell; raises UsageError if it has no snapshot of the time before."""
    record = next((one for one in answer.cells if one.run == cell.run), None)
    why = ""
    if record is None and answer.since > cell.started:
        why = "was replaced or restarted since, and its earlier states are gone"
    elif record is None:
        why = "has no room for that state any more; `config undo_memory` sets how much memory it may use"
    elif record.missing:
        why = record.missing
    if record is None or why:
        raise UsageError(f"In [{cell.cell}] cannot be undone: rank {rank} {why}. Nothing has changed.")
    return record


def describe_obstacles(named: Mapping[str, str]) -> str:
    """Say in one line what stays as it is.

    Args:
        named: By variable, what it is or contains.
    """
    variables = [f"`{name}` ({what})" for name, what in sorted(named.items())]
    return f"Not undone: {', '.join([*variables, _OUTSIDE])}."


def restore_all(state: ClusterState, calls: Mapping[int, RankCall[list[str]]]) -> dict[int, list[str]]:
    """Make each rank restore a state; return by rank the objects that refused theirs."""
    return ask(state.connection, calls, within=STATES_S)


def report_refused(refused: Mapping[int, Sequence[str]]) -> None:
    """Print which objects refused their state, once for ranks that say the same."""
    for line, ranks in ranks_by((line, rank) for rank, lines in refused.items() for line in lines).items():
        print(f"Not restored on {name_ranks(ranks)}: {line}")


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
        state.raise_if_busy("wait for it or interrupt it, then try this cell")
        state.health.ensure_available(self._ranks)
        self._processes = [place.pid for place in state.rank_info]
        if self._is_kept:
            return
        if self._may_keep:
            self._is_kept = self._may_keep = not self._save(protocol.KeepSnapshot(self._key, self._limit))
        if not self._is_kept and (missing := self._save(protocol.HoldSnapshot(_KEY, self._limit))):
            rank, why = next(iter(missing.items()))
            raise UsageError(f"The cell did not run: rank {rank} {why}.")

    def _save(self, call: protocol.HoldSnapshot | protocol.KeepSnapshot) -> dict[int, str]:
        """Return by rank why it cannot save its state; empty if all have."""
        with interrupts_deferred():
            saved: Mapping[int, protocol.UndoableCell] = ask(self._state.connection, dict.fromkeys(self._ranks, call))
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
        gone = [rank for rank in self._ranks if rank in replaced or rank in health.dead or rank in health.world.stuck]
        why = f"{name_ranks(gone)} {'died' if {*gone} - {*health.world.stuck} else 'did not stop'}" if gone else ""
        if not self._is_kept:
            able = [rank for rank in self._ranks if rank not in health.dead and rank not in health.world.stuck]
            with interrupts_deferred():
                report_refused(restore_all(state, dict.fromkeys(able, protocol.RestoreHeld(_KEY))))
            if unable := [rank for rank in self._ranks if rank not in able]:
                print(f"{name_ranks(unable).capitalize()} could not restore the state from before the cell.")
            self.lost = why
            return
        try:
            if health.world.missing:
                returned = repair(state, None).returned
                self.lost = "" if returned is not None else f"{why}, and no state was left"
                refused = returned.refused if returned is not None else {}
            else:
                with interrupts_deferred():
                    refused = restore_all(
                        state, dict.fromkeys(state.ranks, protocol.RestoreProtected(self._key, (0, 0)))
                    )
        except AxonError as error:
            self.lost = f"{why}, and could not be replaced ({error})" if gone else f"the state was lost ({error})"
        else:
            known = {f"`{name}` ({what})" for name, what in self.named.items()}
            report_refused({rank: [line for line in lines if line not in known] for rank, lines in refused.items()})

    def close(self) -> None:
        """Give up what the ranks keep, unless a repair needs it."""
        if self._is_kept and not self.lost and self._state.running and not self._state.health.dead:
            ask(self._state.connection, dict.fromkeys(self._state.ranks, protocol.ForgetProtected(self._key)))
