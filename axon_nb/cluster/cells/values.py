"""Fetch the value of a cell from ranks, and wait for a rank's reply unless the rank dies."""

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

_POLL_INTERVAL_S = 0.1


def last_values(state: ClusterState, ranks: Iterable[int], token: str) -> dict[int, Any]:
    """Fetch the value of the last expression of the cell with this token; its text if it cannot be sent."""
    client, values = state.connection.client, {}
    if not (requested := list(ranks)):
        return {}
    local = ranks_on_this_host(state, requested)
    with contextlib.ExitStack() as stack:
        blocks = {rank: stack.enter_context(SharedBlock()) for rank in local}
        futures = {}
        for rank in requested:
            address = blocks[rank].address if rank in blocks else None
            futures[rank] = requests.call(client, rank, LastValue(token, address))
        for rank, future in futures.items():
            data, text = await_reply(state, rank, future, "give the cell's value")
            if data == b"":
                values[rank] = text
                continue
            try:
                values[rank] = read_value(blocks[rank] if data is None else data)
            except Exception:
                values[rank] = text
    return values


def read_value(source: SharedBlock | bytes) -> Any:
    """Unpack a value that a rank has sent, in shared memory or in a message."""
    from axon_nb.shell.value_pickle import unpack

    return unpack(source.read() if isinstance(source, SharedBlock) else split_parts(bytearray(source)))


def ranks_on_this_host(state: ClusterState, ranks: Iterable[int]) -> list[int]:
    """Return those of the ranks that run on the notebook's own host; none if it has no shared memory."""
    if not memfd_supported():
        return []
    host = socket.gethostname()
    return [rank for rank in ranks if state.rank_info[rank].host == host]


def await_reply(state: ClusterState, rank: int, future: Any, what: str) -> Any:
    """Wait for the result of a call on a rank.

    Args:
        state: The cluster.
        rank: The rank.
        future: The call's future.
        what: What the call does, such as ``give 'x'``: completes "Rank 2 cannot …" in messages.

    Raises:
        ClusterLostError: the rank is dead, or the cluster is gone.
        UsageError: the call raised.
    """
    try:
        while not future.wait(_POLL_INTERVAL_S):
            if state.health.disconnect_reason:
                raise ClusterLostError(
                    f"The cluster {state.name!r} {state.health.disconnect_reason}: it cannot {what}."
                )
            if rank in state.health.dead:
                why, remedy = state.health.dead[rank], state.health.remedy
                raise ClusterLostError(f"Rank {rank} {why}, and cannot {what}. {remedy}")
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
