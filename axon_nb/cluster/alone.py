"""Whether the ranks outside a cell can have any part in its communication."""

from __future__ import annotations

from typing import TYPE_CHECKING

from axon_nb.cluster.waits import ask

if TYPE_CHECKING:
    from axon_nb.cluster.cell import CellRun
    from axon_nb.cluster.state import ClusterState

__all__ = ["nobody_else"]

_LIMIT_S = 2.0
"""Ranks that run nothing answer in milliseconds, unless the machine is busy."""


def nobody_else(state: ClusterState, run: CellRun) -> bool:
    """Whether a blocking cell of some ranks, about to be sent, is the only one that can communicate until it is over.

    Never said of a cell that another may legitimately meet: not while one runs in the background on other ranks, nor
    when a rank outside has begun a call that it has not waited for, or has a thread of the user's. In doubt: no.
    """
    outside = [rank for rank in state.ranks if rank not in run.ranks]
    others = [cell for cell in list(state.active_cells) if cell is not run]
    if not outside or state.backend != "gloo" or any(other.unfinished for other in others):
        return False
    living = [rank for rank in outside if rank not in state.health.dead]
    answers = ask(state.connection.client, living, "axon_waits", limit_s=_LIMIT_S)
    if set(answers) != set(living):
        return False
    return not any(answer["pending"] or answer["threads"] or answer["running"] for answer in answers.values())
