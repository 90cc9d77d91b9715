"""Take cells back on all their ranks, or on none: every rank is asked first, and restores only if all can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from axon_nb.cluster.launch.join import gather
from axon_nb.cluster.recovery.new_ranks import call_all, interrupts_deferred
from axon_nb.cluster.rpc import requests
from axon_nb.errors import UsageError
from axon_nb.records.protocol.messages import RankCall
from axon_nb.records.protocol.recovery import ListUndoable, Undoable, UndoableCell, UndoCell
from axon_nb.records.ranks import name_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

_RESTORE_TIMEOUT_S = 600.0
_OUTSIDE = "files, processes and whatever else is outside the ranks' variables"


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
    raise_if_busy(state, "undo")
    state.health.ensure_available(state.ranks)
    with interrupts_deferred():
        answers: dict[int, Undoable] = call_all(state.connection, state.ranks, ListUndoable())
        cells = _last_cells(answers, count)
        targets = {
            rank: next(cell for cell in cells if rank in cell.ranks)
            for rank in state.ranks
            if any(rank in cell.ranks for cell in cells)
        }
        named: dict[str, str] = {}
        for rank, cell in targets.items():
            named.update(_check(rank, cell, answers[rank]).obstacles)
        print(describe_obstacles(named))
        refused = restore_all(state, {rank: UndoCell(cell.run) for rank, cell in targets.items()})
    report_refused(refused)
    unlike = ", but for what is named above" if named or any(refused.values()) else ""
    which = ", ".join(f"In [{cell.cell}]" for cell in reversed(cells))
    have = "has" if len(targets) == 1 else "have"
    return f"Undid {which}: {name_ranks(targets)} {have} the state from before{unlike}."


def raise_if_busy(state: ClusterState, command: str) -> None:
    """Raise UsageError if a cell runs: only idle ranks can be asked for their state."""
    if state.busy:
        raise UsageError(f"A cell is running on {name_ranks(state.busy)}: wait for it or interrupt it, then {command}.")


def _last_cells(answers: Mapping[int, Undoable], count: int) -> list[UndoableCell]:
    """Return the last cells of the cluster, oldest first; raises UsageError if there are fewer."""
    by_run: dict[str, UndoableCell] = {}
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
        raise UsageError(f"Only {len(cells)} cell{'s' * (len(cells) > 1)} can be undone; got {count}.")
    return cells[-count:]


def _check(rank: int, cell: UndoableCell, answer: Undoable) -> UndoableCell:
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
    futures = {rank: requests.call(state.client, rank, call) for rank, call in calls.items()}
    return gather(futures, _RESTORE_TIMEOUT_S, state.connection)


def report_refused(refused: Mapping[int, Sequence[str]]) -> None:
    """Print which objects refused their state, once for ranks that say the same."""
    ranks_by_line: dict[str, list[int]] = {}
    for rank, lines in refused.items():
        for line in lines:
            ranks_by_line.setdefault(line, []).append(rank)
    for line, ranks in ranks_by_line.items():
        print(f"Not restored on {name_ranks(ranks)}: {line}")
