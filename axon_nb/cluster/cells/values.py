"""What ranks give the notebook: the value of a cell, and the answer of a call that a death ends too."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.rpc import requests
from axon_nb.errors import ClusterLostError, UsageError
from axon_nb.host.shared_memory import SharedBlock, memfd_supported, split_parts
from axon_nb.records.protocol.transfer import LastValue

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

__all__ = ["await_answer", "last_values", "ranks_on_this_host", "read_value"]

_LOOK_S = 0.1


def last_values(state: ClusterState, ranks: Iterable[int], token: str) -> dict[int, Any]:
    """The value of the last expression of the cell with this token; one that cannot travel comes as its text."""
    client, values = state.connection.client, {}
    chosen = list(ranks)
    near = ranks_on_this_host(state, chosen)
    with contextlib.ExitStack() as open_parcels:
        parcels = {rank: open_parcels.enter_context(SharedBlock()) for rank in near}
        futures = {}
        for rank in chosen:
            address = parcels[rank].address if rank in parcels else None
            futures[rank] = requests.call(client, rank, LastValue(token, address))
        for rank, future in futures.items():
            data, text = await_answer(state, rank, future, "give the cell's value")
            if data == b"":
                values[rank] = text
                continue
            try:
                values[rank] = read_value(parcels[rank] if data is None else data)
            except Exception:
                values[rank] = text
    return values


def read_value(source: SharedBlock | bytes) -> Any:
    """The value that a rank has sent, in a parcel or in a message."""
    from axon_nb.engine.transfer.value_pickle import unpack

    return unpack(source.read() if isinstance(source, SharedBlock) else split_parts(bytearray(source)))


def ranks_on_this_host(state: ClusterState, ranks: Iterable[int]) -> list[int]:
    """The ranks on the notebook's own host."""
    if not memfd_supported():
        return []
    own = socket.gethostname()
    return [rank for rank in ranks if state.places[rank].host == own]


def await_answer(state: ClusterState, rank: int, future: Any, what: str) -> Any:
    """The result of a call, as soon as it is there, or the rank is known to be dead."""
    try:
        while not future.wait(_LOOK_S):
            if state.health.gone:
                raise ClusterLostError(f"The cluster {state.name!r} {state.health.gone}: it cannot {what}.")
            if rank in state.health.dead:
                why, way_back = state.health.dead[rank], state.health.way_back
                raise ClusterLostError(f"rank {rank} {why}, and cannot {what}. {way_back}")
        return future.result()
    except (ClusterLostError, KeyboardInterrupt):
        with contextlib.suppress(Exception):
            state.connection.client.abort(future, block=False)
        raise
    except Exception as error:
        ename, evalue = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", str(error))
        raise UsageError(f"Rank {rank} cannot {what}: {ename}: {evalue}") from None
    finally:
        with contextlib.suppress(Exception):  # still on its way
            state.connection.client.purge_local_results(future)
