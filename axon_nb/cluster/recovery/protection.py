"""After ranks were replaced: bring all ranks to the last step that every one of them holds."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from axon_nb.cluster.failures.report import REPAIR_HINT, Kept, RankError
from axon_nb.cluster.launch.join import gather
from axon_nb.cluster.recovery.new_ranks import call_all
from axon_nb.cluster.recovery.report import Returned
from axon_nb.cluster.rpc import requests
from axon_nb.records.protocol.inspection import StatusRequest
from axon_nb.records.protocol.recovery import ListProtected, ProtectedStep, RestoreProtected
from axon_nb.records.ranks import name_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.launch.connection import Connection
    from axon_nb.cluster.state import ClusterState

_STATES_TIMEOUT_S = 1.0
_RESTORE_TIMEOUT_S = 600.0


def kept_of(state: ClusterState, protect: int, errors: Iterable[RankError]) -> Kept:
    """Say what is kept of ranks that died in a cell, and how to replace them.

    Args:
        state: The cluster.
        protect: The setting of this name.
        errors: How the cell failed.
    """
    remedy, died = state.health.remedy, sorted(error.rank for error in errors if error.kind == "died")
    if remedy != REPAIR_HINT or not died or not state.health.dead:
        return Kept(remedy)
    states = requests.request_all(state.client, state.live_ranks, StatusRequest(), timeout_s=_STATES_TIMEOUT_S)
    steps = [one.protected for one in states.values() if one.protected is not None]
    if steps and len(steps) == len(state.live_ranks):
        last = "or to the last one before that all of them hold"
        remedy = f"new ranks get the state of the dead ones, and all ranks return to step {min(steps)}, {last}."
        text = f"Kept: the state of all ranks at step {min(steps)}, {last.replace('to', 'at', 1)}."
        return Kept(f"Run `%distributed repair`: {remedy}", text, min(steps))
    nothing = f"Nothing of {name_ranks(died)} is kept"
    if protect:  # a rank that is slow to answer may hold a step
        return Kept(remedy, f"{nothing}, unless `%distributed repair` finds a step that all ranks hold.")
    if state.engines != "axon" or sys.platform != "linux":
        return Kept(remedy, f"{nothing}.")
    return Kept(remedy, f"{nothing}. `%distributed config protect=on` keeps each step of all ranks.")


def return_to_protected(connection: Connection, ranks: Sequence[int]) -> Returned | None:
    """Return to the last step that all these ranks hold; None: there is none.

    Args:
        connection: The cluster's connection.
        ranks: All ranks; replacements have joined the groups.

    Raises:
        StartError: a rank exited, failed or did not reply in time.
    """
    held = call_all(connection, ranks, ListProtected())
    common = _latest_common([one.held for one in held.values()])
    if common is None:
        return None
    call = RestoreProtected(common.run, common.fence)
    futures = {rank: requests.call(connection.client, rank, call) for rank in ranks}
    refused = gather(futures, _RESTORE_TIMEOUT_S, connection)
    furthest = max(one.now for one in held.values())
    repeated = max(0, furthest - common.step)
    return Returned(common.step, repeated, {rank: lines for rank, lines in refused.items() if lines})


def _latest_common(held: Sequence[Sequence[ProtectedStep]]) -> ProtectedStep | None:
    first, *others = held
    return next((step for step in first if all(step in steps for steps in others)), None)
