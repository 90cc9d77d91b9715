"""The state of a cluster as a record and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.asking import sample
from axon_nb.cluster.mesh import ask_mesh
from axon_nb.cluster.waits import ask_waits
from axon_nb.records.cluster_info import ClusterInfo, RankInfo
from axon_nb.records.ranks import name_ranks
from axon_nb.records.state import Activity, RankState
from axon_nb.records.waits import missing_ranks

if TYPE_CHECKING:
    import pandas as pd

    from axon_nb.cluster.state import ClusterState

__all__ = ["cluster_info", "describe_state", "status_frame"]


_WAITED_S = 0.25


def describe_state(state: RankState | None, late: Sequence[int] = ()) -> str:
    """A rank's state in words, such as ``waiting in all_reduce at line 4 for rank 1, for 2.1 s``.

    Args:
        state: Its latest sample; None: it does not answer.
        late: The ranks that have not come to the call that it waits in.
    """
    if state is None:
        return "does not answer"
    if state.activity not in (Activity.COLLECTIVE, Activity.WAITING):
        return state.activity.value + (
            f" line {state.line}" if state.line and state.activity is Activity.RUNNING else ""
        )
    seconds = (state.time_ns - state.since_ns) / 1e9
    at = f" at line {state.line}" if state.line else ""
    verb = "waiting in" if state.activity is Activity.WAITING else "in"
    whom = f" for {name_ranks(late)}," if late else ""
    return f"{verb} {state.call}{at}{whom}" + (f" for {seconds:.1f} s" if seconds >= _WAITED_S else "")


def cluster_info(state: ClusterState) -> ClusterInfo:
    """Ask every rank and put the answers together."""
    states = sample(state.client, state.living) if state.running else {}
    late: dict[int, tuple[int, ...]] = {}
    if any(seen.activity is Activity.WAITING for seen in states.values()):
        late = missing_ranks(ask_waits(state.client, states), _WAITED_S)
    rows = []
    for rank, place in enumerate(state.places):
        seen = states.get(rank)
        words = state.health.dead.get(rank) or (describe_state(seen, late.get(rank, ())) if state.running else "gone")
        rows.append(
            RankInfo(
                rank=rank,
                host=str(place["host"]),
                pid=int(place["pid"]),
                device=str(place["device"]),
                backend=state.backend,
                state=words,
                rss_bytes=seen.rss_bytes if seen else 0,
                device_bytes=seen.device_bytes if seen else 0,
                cell=seen.cell if seen else None,
            )
        )
    hosts = ", ".join(dict.fromkeys(row.host for row in rows))
    return ClusterInfo(
        name=state.name,
        backend=state.backend,
        host=hosts,
        num_ranks=state.world_size,
        running=state.running,
        engines=state.engines,
        ranks=tuple(rows),
        mesh=ask_mesh(state.client, states) if states else None,
    )


def status_frame(info: ClusterInfo) -> pd.DataFrame:
    """One row a rank; `memory` is resident bytes, plus `device_memory` on accelerators."""
    import pandas as pd

    columns: dict[str, list[Any]] = {
        "rank": [row.rank for row in info.ranks],
        "host": [row.host for row in info.ranks],
        "pid": [row.pid for row in info.ranks],
        "device": [row.device for row in info.ranks],
        "backend": [row.backend for row in info.ranks],
        "state": [row.state for row in info.ranks],
        "memory": [row.rss_bytes for row in info.ranks],
        "device_memory": [row.device_bytes for row in info.ranks],
    }
    frame = pd.DataFrame(columns)
    frame["cell"] = pd.array([row.cell for row in info.ranks], dtype="Int64")
    return frame
