"""Moving values between the notebook and ranks: a parcel in memory on one host, messages to other hosts."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.cluster import remote
from axon_nb.cluster.failures import cell_error, root_cause
from axon_nb.cluster.hints import hint_for
from axon_nb.errors import ClusterLostError, UsageError
from axon_nb.host.parcels import (
    BlockAddress,
    SharedBlock,
    SharedBlockUnavailableError,
    block_size,
    join_parts,
    memfd_supported,
    split_parts,
)
from axon_nb.records.ranks import format_ranks, parse_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster

__all__ = ["last_values", "pull", "push"]

_ENGINE = "axon_nb.engine.variables"
_LOOK_S = 0.1
_OTHER_RANKS = "OtherRanks"
_UNREACHABLE = SharedBlockUnavailableError.__name__


def push(cluster: Cluster, variables: Mapping[int, Mapping[str, Any]]) -> None:
    """Put variables into the namespaces of ranks; returns when each has them.

    Args:
        cluster: The cluster.
        variables: By rank; the same mapping for several ranks is sent once.
    """
    names = list(dict.fromkeys(name for own in variables.values() for name in own))
    for name in names:
        if not name.isidentifier():
            raise UsageError(f"{name!r} is no variable name.")
    what = f"take {', '.join(names)}"
    cluster.health.refuse(list(variables))
    _tell_queue(cluster, variables)
    packed = {id(own): _packed(own) for own in variables.values()}
    near = _near(cluster, variables)
    _check_memory(sum(block_size(parts) for parts in packed.values()), what=", ".join(names))
    with contextlib.ExitStack() as open_parcels:
        addresses: dict[int, BlockAddress] = {}
        for key, parts in packed.items():
            fitting = [rank for rank in near if id(variables[rank]) == key]
            if fitting:
                parcel = open_parcels.enter_context(SharedBlock())
                parcel.write(parts)
                addresses.update(dict.fromkeys(fitting, parcel.address))
        unreached = _run(cluster, list(addresses), f"take({addresses!r})", what) if addresses else []
    far = [rank for rank in variables if rank not in addresses or rank in unreached]
    joined = {key: bytes(join_parts(parts)) for key, parts in packed.items()} if far else {}
    _ask_far(cluster, far, "put", what, lambda rank: {"parts": joined[id(variables[rank])]})


def pull(
    cluster: Cluster, ranks: Sequence[int], expression: str, *, shards: bool = False, arrays: bool = False
) -> tuple[dict[int, Any], bool]:
    """The value of a name or expression on each rank.

    Args:
        cluster: The cluster.
        ranks: Which are asked.
        expression: What they evaluate.
        shards: Whether each gives its own part of a distributed tensor; else all of it is put together.
        arrays: Whether tensors come as NumPy arrays.

    Returns:
        The values by rank, and whether they are one value that was put together from several ranks.
    """
    try:
        compile(expression, "<pull>", "eval")
    except (SyntaxError, ValueError):
        raise UsageError(f"{expression!r} is no name or expression.") from None
    cluster.health.refuse(ranks)
    _tell_queue(cluster, ranks)
    near = _near(cluster, ranks)
    running = list(ranks)
    with contextlib.ExitStack() as open_parcels:
        while True:
            parcels = {rank: open_parcels.enter_context(SharedBlock()) for rank in near}
            addresses = {rank: parcels[rank].address if rank in parcels else None for rank in ranks}
            call = f"give({expression!r}, {addresses!r}, {running!r}, shards={shards}, arrays={arrays})"
            try:
                unreached = _run(cluster, running, call, f"give {expression!r}")
            except _NeedsRanks as more:
                running = more.ranks
                continue
            if not unreached:
                break
            near = [rank for rank in near if rank not in unreached]
        far = [rank for rank in ranks if rank not in parcels]
        came = _ask_far(cluster, far, "take_offer", f"give {expression!r}", lambda rank: {})
        sources: dict[int, SharedBlock | bytes] = {rank: parcel for rank, parcel in parcels.items() if not parcel.empty}
        sources |= {rank: data for rank, data in came.items() if data}
        # What was put together has one giver; the entry of each rank is a copy of its own all the same.
        whole = len(sources) < len(ranks) or running != list(ranks)
        first = sources[min(sources)]
        return {rank: _loaded(rank, expression, sources.get(rank, first)) for rank in ranks}, whole


def last_values(cluster: Cluster, ranks: Iterable[int], token: str) -> dict[int, Any]:
    """The value of the last expression of the cell with this token; one that cannot travel comes as its text."""
    client, values = cluster.connection.client, {}
    chosen = list(ranks)
    near = _near(cluster, chosen)
    with contextlib.ExitStack() as open_parcels:
        parcels = {rank: open_parcels.enter_context(SharedBlock()) for rank in near}
        futures = {}
        for rank in chosen:
            address = parcels[rank].address if rank in parcels else None
            futures[rank] = remote.call(client, rank, f"{_ENGINE}:last_value", token=token, address=address)
        for rank, future in futures.items():
            data, text = _answer(cluster, rank, future, "give the cell's value")
            if data == b"":
                values[rank] = text
                continue
            try:
                values[rank] = _unpack(_parts(parcels[rank] if data is None else data))
            except Exception:
                values[rank] = text
    return values


class _NeedsRanks(Exception):
    def __init__(self, ranks: list[int]) -> None:
        super().__init__()
        self.ranks = ranks


def _unpack(parts: list[memoryview]) -> Any:
    from axon_nb.engine.parcel_pickle import unpack

    return unpack(parts)


def _parts(source: SharedBlock | bytes) -> list[memoryview]:
    return source.read() if isinstance(source, SharedBlock) else split_parts(bytearray(source))


def _loaded(rank: int, expression: str, source: SharedBlock | bytes) -> Any:
    try:
        return _unpack(_parts(source))
    except Exception as error:
        raise UsageError(
            f"Rank {rank} has given {expression!r}, but it cannot be loaded in the notebook: "
            f"{type(error).__name__}: {error}"
        ) from None


def _packed(variables: Mapping[str, Any]) -> list[Any]:
    from axon_nb.engine.parcel_pickle import pack

    try:
        return pack(dict(variables), with_names=True)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    for name, value in variables.items():
        try:
            pack(value, with_names=True)
        except Exception as error:
            raise UsageError(f"{name!r} cannot be sent to ranks: {type(error).__name__}: {error}") from None
    raise UsageError(f"{', '.join(variables)} cannot be sent to ranks: {reason}")


def _check_memory(size: int, *, what: str) -> None:
    from axon_nb.host.free_memory import free_memory
    from axon_nb.records.quantity import format_bytes

    free = free_memory()
    if free is not None and size > free:
        raise UsageError(
            f"{what} takes {format_bytes(size)}, and {format_bytes(free)} of memory are free: send a part, or have "
            "the ranks load it themselves."
        )


def _near(cluster: Cluster, ranks: Iterable[int]) -> list[int]:
    """The ranks on the notebook's own host."""
    if not memfd_supported():
        return []
    own = socket.gethostname()
    return [rank for rank in ranks if cluster.places[rank]["host"] == own]


def _tell_queue(cluster: Cluster, ranks: Iterable[int]) -> None:
    ahead = [rank for rank in cluster.busy if rank in ranks]
    if ahead:
        print(f"Waiting for the cell that still runs on ranks {format_ranks(ahead)}.")


def _run(cluster: Cluster, ranks: Sequence[int], call: str, what: str) -> list[int]:
    """Call a function of the ranks' side as a cell: a death, an interrupt or a deadlock ends it as it ends any other.

    Returns:
        The ranks that cannot open the parcel.
    """
    code = f"__import__({_ENGINE!r}, fromlist=['take']).{call}"
    result = cluster.run(code, ranks=ranks, quiet=True, check=False, values=False)
    errors = {rank: error for rank, error in result.errors.items() if error.ename != _UNREACHABLE}
    if not errors:
        return list(result.errors)
    cause = root_cause(errors)
    if cause.ename == _OTHER_RANKS:
        raise _NeedsRanks(parse_ranks(cause.evalue, cluster.world_size))
    if cause.kind != "raised":
        raise cell_error(errors, first=(), hint=hint_for(errors.values()))
    why = cause.evalue if cause.ename == "UsageError" else str(cause)
    raise UsageError(f"Rank {cause.rank} cannot {what}: {why}")


def _ask_far(
    cluster: Cluster, ranks: Sequence[int], function: str, what: str, arguments: Callable[[int], dict[str, Any]]
) -> dict[int, Any]:
    """Call a function of ranks that share no memory with the notebook; what it was sent and gave is cached nowhere."""
    client = cluster.connection.client
    futures = {rank: remote.call(client, rank, f"{_ENGINE}:{function}", **arguments(rank)) for rank in ranks}
    return {rank: _answer(cluster, rank, future, what) for rank, future in futures.items()}


def _answer(cluster: Cluster, rank: int, future: Any, what: str) -> Any:
    """The result of a call, as soon as it is there, or the rank is known to be dead."""
    try:
        while not future.wait(_LOOK_S):
            if cluster.health.gone:
                raise ClusterLostError(f"The cluster {cluster.name!r} {cluster.health.gone}: it cannot {what}.")
            if rank in cluster.health.dead:
                why, way_back = cluster.health.dead[rank], cluster.health.way_back
                raise ClusterLostError(f"rank {rank} {why}, and cannot {what}. {way_back}")
        return future.result()
    except (ClusterLostError, KeyboardInterrupt):
        with contextlib.suppress(Exception):
            cluster.connection.client.abort(future, block=False)
        raise
    except Exception as error:
        ename, evalue = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", str(error))
        raise UsageError(f"Rank {rank} cannot {what}: {ename}: {evalue}") from None
    finally:
        with contextlib.suppress(Exception):  # still on its way
            cluster.connection.client.purge_local_results(future)
