"""What cells do about missing ranks by themselves, without `%distributed repair`."""

from __future__ import annotations

from collections.abc import Sequence

from axon_nb.cluster.launch.compatibility import can_replace
from axon_nb.cluster.recovery.recovery import AGENT_SILENT
from axon_nb.cluster.recovery.repair import repair
from axon_nb.cluster.state import ClusterState
from axon_nb.errors import AxonError
from axon_nb.records.ranks import name_ranks

_PATIENCE_S = 1.0
"""How long a cell waits for the host agent's reply."""


def auto_repair(state: ClusterState) -> None:
    """Replace the dead ranks, if there are any and they can be replaced, and print the report."""
    dead = state.health.dead
    unusable = {*dead, *state.health.lost_contexts}
    possible = state.engines == "axon" and len(unusable) < state.world_size and not state.health.disconnect_reason
    possible = possible and can_replace(state.rank_info, state.backend)
    if dead and possible and not state.busy and not state.health.stuck:
        print("\n".join(repair(state, None).lines(why=True)))


def rebuild_if_back(state: ClusterState) -> None:
    """Rebuild the groups that were disabled because ranks or the agent did not respond, if they do now; print it."""
    health = state.health
    missing = {*health.dead, *health.stuck, *health.lost_contexts}
    is_due = bool(health.groups_disabled) and health.rebuild_when_back and not missing
    if not is_due or health.disconnect_reason or state.busy:
        return
    try:
        if state.connection.agent.responds(_PATIENCE_S):
            print("\n".join(repair(state, None).lines()))
    except AxonError as error:
        health.rebuild_when_back = False
        print(f"Failed to rebuild the process groups: {error}")


def replace_stuck(state: ClusterState, ranks: Sequence[int]) -> list[str]:
    """Replace ranks that do not react, all of them if need be; return the lines to show, also if it fails."""
    if not ranks or state.health.disconnect_reason:
        return []
    try:
        if not state.connection.agent.responds(_PATIENCE_S):
            return [f"{name_ranks(ranks).capitalize()} cannot be replaced: {AGENT_SILENT}."]
        return repair(state, ranks, all_allowed=True).lines()
    except AxonError as error:
        return [f"Failed to replace {name_ranks(ranks)}: {error}"]
