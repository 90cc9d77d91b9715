"""The state of a cluster as a record and as a table.

Asking ranks for the mesh that they have made.

Asking ranks what they do now.

Where every rank is: its Python stack and its communication call, asked over the control channel.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.rpc.client import RankClient
from axon_nb.cluster.rpc.requests import ask, ask_waits
from axon_nb.records.placement import MeshInfo
from axon_nb.records.protocol.inspection import MeshRequest, StacksRequest, StatusRequest
from axon_nb.records.ranks import name_ranks
from axon_nb.records.stacks import RankStack, Stacks
from axon_nb.records.telemetry import Activity, ClusterInfo, RankInfo, RankState
from axon_nb.records.waits import missing_ranks

if TYPE_CHECKING:
    import pandas as pd

    from axon_nb.cluster.state import ClusterState

__all__ = ["ask_mesh", "cluster_info", "describe_state", "rank_stacks", "sample", "status_frame"]

_MESH_LIMIT_S = 1.0


def ask_mesh(client: RankClient, ranks: Iterable[int]) -> MeshInfo | None:
    """The mesh of most ranks, of several the one that most have; None: there is none, or no rank answers in time."""
    answers = ask(client, ranks, MeshRequest(), limit_s=_MESH_LIMIT_S)
    found = Counter(answer.mesh for answer in answers.values() if answer.mesh is not None)
    return max(found, key=lambda mesh: (len(mesh.ranks), found[mesh]), default=None)


_SAMPLE_S = 1.0


def sample(client: RankClient, ranks: Iterable[int]) -> dict[int, RankState]:
    """What each rank does now, over the control channel; those that do not answer in a second are left out."""
    return ask(client, ranks, StatusRequest(), limit_s=_SAMPLE_S)


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
                host=place.host,
                pid=place.pid,
                device=place.device,
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


_STACKS_LIMIT_S = 2.0
_SILENT = "does not answer: it is in C code that keeps Python's lock, or the machine is overloaded"


def rank_stacks(client: RankClient, ranks: Sequence[int], world: Sequence[int], dead: Mapping[int, str]) -> Stacks:
    """The stacks of some ranks; those that do not answer within 2 seconds, or are dead, say so instead.

    Args:
        client: The cluster's client.
        ranks: Whose stacks.
        world: All ranks; asked whom the others wait for.
        dead: Why each dead rank died; reads after its name.
    """
    answers = ask(client, [rank for rank in ranks if rank not in dead], StacksRequest(), limit_s=_STACKS_LIMIT_S)
    late: dict[int, tuple[int, ...]] = {}
    if any(answer.state.activity is Activity.WAITING for answer in answers.values()):
        late = missing_ranks(ask_waits(client, [rank for rank in world if rank not in dead]), 0.0)
    stacks = {}
    for rank in ranks:
        if rank in dead:
            stacks[rank] = RankStack(dead[rank])
        elif rank not in answers:
            stacks[rank] = RankStack(_SILENT)
        else:
            state = answers[rank].state
            # Without the time, which is another for each rank: those that do the same are told once.
            words = describe_state(dataclasses.replace(state, since_ns=state.time_ns), late.get(rank, ()))
            seconds = (state.time_ns - state.since_ns) / 1e9 if state.activity is Activity.WAITING else 0.0
            stacks[rank] = RankStack(words.rstrip(","), answers[rank].frames, state.cell, seconds)
    return Stacks(stacks)
