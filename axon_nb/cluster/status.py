"""The state of a cluster as a record and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.mesh import ask_mesh
from axon_nb.cluster.waits import ask_waits
from axon_nb.records.cluster_info import ClusterInfo, RankInfo
from axon_nb.records.ranks import name_ranks
from axon_nb.records.state import Activity, RankState
from axon_nb.records.waits import missing_ranks

if TYPE_CHECKING:
    import pandas as pd

    from axon_nb.cluster.cluster import Cluster

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


def cluster_info(cluster: Cluster, places: Sequence[Mapping[str, Any]], dead: Mapping[int, str]) -> ClusterInfo:
    """Ask every rank and put the answers together."""
    states = cluster.sample() if cluster.running else {}
    late: dict[int, tuple[int, ...]] = {}
    if any(state.activity is Activity.WAITING for state in states.values()):
        late = missing_ranks(ask_waits(cluster.client, states), _WAITED_S)
    rows = []
    for rank, place in enumerate(places):
        state = states.get(rank)
        words = dead.get(rank) or (describe_state(state, late.get(rank, ())) if cluster.running else "gone")
        rows.append(
            RankInfo(
                rank=rank,
                host=str(place["host"]),
                pid=int(place["pid"]),
                device=str(place["device"]),
                backend=cluster.backend,
                state=words,
                rss_bytes=state.rss_bytes if state else 0,
                device_bytes=state.device_bytes if state else 0,
                cell=state.cell if state else None,
            )
        )
    hosts = ", ".join(dict.fromkeys(row.host for row in rows))
    return ClusterInfo(
        name=cluster.name,
        backend=cluster.backend,
        host=hosts,
        num_ranks=cluster.world_size,
        running=cluster.running,
        engines=cluster.engines,
        ranks=tuple(rows),
        mesh=ask_mesh(cluster.client, states) if states else None,
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
