"""Requests what the ranks are doing now: their states, meshes and stacks, as records and as a table."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.inspection.card import cluster_card
from axon_nb.cluster.rpc.client import RankClient
from axon_nb.cluster.rpc.requests import request_all, request_waits
from axon_nb.errors import ClusterLostError
from axon_nb.records.placement import MeshInfo
from axon_nb.records.protocol.agent import ReadGpus
from axon_nb.records.protocol.inspection import MeshRequest, StacksRequest, StatusRequest
from axon_nb.records.ranks import name_ranks
from axon_nb.records.stacks import RankStack, Stacks
from axon_nb.records.telemetry import Activity, ClusterInfo, GpuUse, RankInfo, RankState
from axon_nb.records.waits.calls import missing_ranks

if TYPE_CHECKING:
    import pandas as pd

    from axon_nb.cluster.state import ClusterState

_TIMEOUT_S = 1.0
_STACKS_TIMEOUT_S = 2.0
_MIN_WAIT_S = 0.25
"""Shorter waits are not described."""
_SILENT = "does not reply: it is in C code that holds the GIL, or the machine is overloaded"


def request_mesh(client: RankClient, ranks: Iterable[int]) -> MeshInfo | None:
    """Return the largest mesh on the ranks, and among equals the most common; None if there is none or no reply."""
    replies = request_all(client, ranks, MeshRequest(), timeout_s=_TIMEOUT_S)
    meshes = Counter(reply.mesh for reply in replies.values() if reply.mesh is not None)
    return max(meshes, key=lambda mesh: (len(mesh.ranks), meshes[mesh]), default=None)


def request_states(client: RankClient, ranks: Iterable[int]) -> dict[int, RankState]:
    """Return what each rank is doing now; ranks that do not reply within a second are left out."""
    return request_all(client, ranks, StatusRequest(), timeout_s=_TIMEOUT_S)


def paused_ranks(states: Mapping[int, RankState]) -> list[int]:
    """Return the ranks that have stopped at a breakpoint."""
    return [rank for rank, state in states.items() if state.activity is Activity.PAUSED]


def describe_state(state: RankState | None, late: Sequence[int] = (), paused: Collection[int] = ()) -> str:
    """Describe a rank's state, such as ``waiting in all_reduce at line 4 for rank 1, for 2.1 s``.

    Args:
        state: The rank's latest sample; None: it did not reply.
        late: The ranks that have not joined the call that it waits in.
        paused: The ranks that have stopped at a breakpoint.
    """
    if state is None:
        return "does not reply"
    if state.activity not in (Activity.COLLECTIVE, Activity.WAITING):
        is_at_line = state.line and state.activity in (Activity.RUNNING, Activity.PAUSED)
        return state.activity.value + (f" line {state.line}" if is_at_line else "")
    seconds = (state.time_ns - state.since_ns) / 1e9
    at = f" at line {state.line}" if state.line else ""
    verb = "waiting in" if state.activity is Activity.WAITING else "in"
    debugger = "the debugger on " if set(late) <= set(paused) else ""
    missing = f" for {debugger}{name_ranks(late)}," if late else ""
    return f"{verb} {state.call}{at}{missing}" + (f" for {seconds:.1f} s" if seconds >= _MIN_WAIT_S else "")


def cluster_info(state: ClusterState) -> ClusterInfo:
    """Request the state of every rank, and return the cluster's state."""
    states = request_states(state.client, state.live_ranks) if state.running else {}
    late: dict[int, tuple[int, ...]] = {}
    if any(rank_state.activity is Activity.WAITING for rank_state in states.values()):
        late = missing_ranks(request_waits(state.client, states), _MIN_WAIT_S)
    rows, paused = [], paused_ranks(states)
    for rank, place in enumerate(state.rank_info):
        rank_state = states.get(rank)
        text = state.health.dead.get(rank) or (
            describe_state(rank_state, late.get(rank, ()), paused) if state.running else "gone"
        )
        rows.append(
            RankInfo(
                rank=rank,
                host=place.host,
                pid=place.pid,
                device=place.device,
                backend=state.backend,
                state=text,
                rss_bytes=rank_state.rss_bytes if rank_state else 0,
                device_bytes=rank_state.device_bytes if rank_state else 0,
                cell=rank_state.cell if rank_state else None,
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
        mesh=request_mesh(state.client, states) if states else None,
        protected=_protected(states.values()),
        slowed=str(state.slowness),
        gpus=_gpus(state) if any(row.device.startswith("cuda") for row in rows) else (),
    )


def _protected(states: Collection[RankState]) -> int | None:
    steps = [state.protected for state in states if state.protected is not None]
    return min(steps) if steps and len(steps) == len(states) else None


def _gpus(state: ClusterState) -> tuple[GpuUse, ...]:
    try:
        return state.connection.agent.call(ReadGpus()).gpus
    except ClusterLostError:
        return ()


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterStatus:
    """What `%distributed status` returns: shown as a card, with units that people read."""

    info: ClusterInfo

    def to_frame(self) -> pd.DataFrame:
        """Return one row per rank, with memory in bytes, as `Cluster.status` does."""
        return status_frame(self.info)

    def __repr__(self) -> str:
        return cluster_card(self.info)["text/plain"]

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return cluster_card(self.info)


def status_frame(info: ClusterInfo) -> pd.DataFrame:
    """Return one row per rank; `memory` is resident bytes, `device_memory` bytes on the accelerator."""
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


def rank_stacks(client: RankClient, ranks: Sequence[int], world: Sequence[int], dead: Mapping[int, str]) -> Stacks:
    """Return the Python stacks of some ranks; for ranks that are dead or do not reply within 2 s, a note instead.

    Args:
        client: The cluster's client.
        ranks: The ranks to show.
        world: All ranks, to find out which ranks the others wait for.
        dead: Why each dead rank died; reads after its name.
    """
    replies = request_all(
        client, [rank for rank in ranks if rank not in dead], StacksRequest(), timeout_s=_STACKS_TIMEOUT_S
    )
    late: dict[int, tuple[int, ...]] = {}
    if any(reply.state.activity is Activity.WAITING for reply in replies.values()):
        late = missing_ranks(request_waits(client, [rank for rank in world if rank not in dead]), 0.0)
    stacks, paused = {}, paused_ranks({rank: reply.state for rank, reply in replies.items()})
    for rank in ranks:
        if rank in dead:
            stacks[rank] = RankStack(dead[rank])
        elif rank not in replies:
            stacks[rank] = RankStack(_SILENT)
        else:
            state = replies[rank].state
            # Without the time, which differs between ranks: ranks with the same description are shown together.
            text = describe_state(dataclasses.replace(state, since_ns=state.time_ns), late.get(rank, ()), paused)
            seconds = (state.time_ns - state.since_ns) / 1e9 if state.activity is Activity.WAITING else 0.0
            stacks[rank] = RankStack(text.rstrip(","), replies[rank].frames, state.cell, seconds)
    return Stacks(stacks)
