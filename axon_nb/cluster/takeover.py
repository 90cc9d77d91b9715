"""Variables of a living rank for those that were just replaced, straight from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.cluster import remote
from axon_nb.cluster.bringup import gather
from axon_nb.errors import StartError
from axon_nb.records.ranks import format_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

__all__ = ["copy_variables"]

_COPIES = "axon_nb.engine.copies"
_COPY_LIMIT_S = 60.0
_SLOWEST_BYTES_S = 20e6


def copy_variables(
    state: ClusterState, ranks: Sequence[int], survivors: Sequence[int], source: int, names: Sequence[str]
) -> dict[str, Any]:
    """Copy variables of `source` to `ranks`; process groups are each rank's own of the same name.

    Returns:
        `copied` (names), `skipped` (name: why not) and `size` in bytes.

    Raises:
        StartError: they were replaced, and could not take the variables over.
    """
    connection = state.connection
    client = connection.client
    try:
        asked = {rank: remote.call(client, rank, f"{_COPIES}:group_variables") for rank in survivors}
        groups: dict[str, str] = {}
        for answer in gather(asked, _COPY_LIMIT_S, connection).values():
            groups |= {name: group for name, group in answer.items() if not names or name in names}
        packed = remote.call(client, source, f"{_COPIES}:pack", names=list(names))
        parcel = gather({source: packed}, _COPY_LIMIT_S * 10, connection)[source]
        content = {key: parcel[key] for key in ("size", "digest", "surroundings")}
        calls = {
            rank: remote.call(client, rank, f"{_COPIES}:take", source=source, groups=groups, **content)
            for rank in ranks
        }
        calls[source] = remote.call(client, source, f"{_COPIES}:give", ranks=list(ranks))
        gather(calls, _COPY_LIMIT_S + parcel["size"] * len(ranks) / _SLOWEST_BYTES_S, connection)
    except StartError as error:
        raise StartError(
            f"Ranks {format_ranks(ranks)} are replaced, but could not take over the variables of rank {source}, and "
            f"are empty: {error}"
        ) from None
    skipped = {name: why for name, why in parcel["skipped"].items() if name not in groups}
    return {"copied": sorted({*parcel["copied"], *groups}), "skipped": skipped, "size": parcel["size"]}
