"""Moving values between the notebook and ranks: a parcel in memory on one host, messages to other hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.cells.values import await_answer, ranks_on_this_host, read_value
from axon_nb.cluster.failures.hints import hint_for
from axon_nb.cluster.failures.report import cell_error, root_cause
from axon_nb.cluster.rpc import requests
from axon_nb.errors import UsageError
from axon_nb.host.shared_memory import BlockAddress, SharedBlock, SharedBlockUnavailableError, block_size, join_parts
from axon_nb.records.protocol.messages import RankCall, cell_source
from axon_nb.records.protocol.transfer import GiveValue, PutValues, TakeOffer, TakeValues
from axon_nb.records.ranks import format_ranks, parse_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.cells.manager import CellManager
    from axon_nb.cluster.state import ClusterState

__all__ = ["pull", "push"]

_OTHER_RANKS = "OtherRanks"
_UNREACHABLE = SharedBlockUnavailableError.__name__


def push(cells: CellManager, variables: Mapping[int, Mapping[str, Any]]) -> None:
    """Put variables into the namespaces of ranks; returns when each has them.

    Args:
        cells: The cells of the cluster.
        variables: By rank; the same mapping for several ranks is sent once.
    """
    names = list(dict.fromkeys(name for own in variables.values() for name in own))
    for name in names:
        if not name.isidentifier():
            raise UsageError(f"{name!r} is no variable name.")
    what = f"take {', '.join(names)}"
    cells.state.health.refuse(list(variables))
    _tell_queue(cells.state, variables)
    packed = {id(own): _packed(own) for own in variables.values()}
    near = ranks_on_this_host(cells.state, variables)
    _check_memory(sum(block_size(parts) for parts in packed.values()), what=", ".join(names))
    with contextlib.ExitStack() as open_parcels:
        addresses: dict[int, BlockAddress] = {}
        for key, parts in packed.items():
            fitting = [rank for rank in near if id(variables[rank]) == key]
            if fitting:
                parcel = open_parcels.enter_context(SharedBlock())
                parcel.write(parts)
                addresses.update(dict.fromkeys(fitting, parcel.address))
        unreached = _run(cells, list(addresses), TakeValues(addresses), what) if addresses else []
    far = [rank for rank in variables if rank not in addresses or rank in unreached]
    joined = {key: bytes(join_parts(parts)) for key, parts in packed.items()} if far else {}
    _ask_far(cells.state, {rank: PutValues(joined[id(variables[rank])]) for rank in far}, what)


def pull(
    cells: CellManager, ranks: Sequence[int], expression: str, *, shards: bool = False, arrays: bool = False
) -> tuple[dict[int, Any], bool]:
    """The value of a name or expression on each rank.

    Args:
        cells: The cells of the cluster.
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
    cells.state.health.refuse(ranks)
    _tell_queue(cells.state, ranks)
    near = ranks_on_this_host(cells.state, ranks)
    running = list(ranks)
    with contextlib.ExitStack() as open_parcels:
        while True:
            parcels = {rank: open_parcels.enter_context(SharedBlock()) for rank in near}
            addresses = {rank: parcels[rank].address if rank in parcels else None for rank in ranks}
            call = GiveValue(expression, addresses, tuple(running), shards, arrays)
            try:
                unreached = _run(cells, running, call, f"give {expression!r}")
            except _NeedsRanks as more:
                running = more.ranks
                continue
            if not unreached:
                break
            near = [rank for rank in near if rank not in unreached]
        far = [rank for rank in ranks if rank not in parcels]
        came = _ask_far(cells.state, dict.fromkeys(far, TakeOffer()), f"give {expression!r}")
        sources: dict[int, SharedBlock | bytes] = {rank: parcel for rank, parcel in parcels.items() if not parcel.empty}
        sources |= {rank: data for rank, data in came.items() if data}
        # What was put together has one giver; the entry of each rank is a copy of its own all the same.
        whole = len(sources) < len(ranks) or running != list(ranks)
        first = sources[min(sources)]
        return {rank: _loaded(rank, expression, sources.get(rank, first)) for rank in ranks}, whole


class _NeedsRanks(Exception):
    def __init__(self, ranks: list[int]) -> None:
        super().__init__()
        self.ranks = ranks


def _loaded(rank: int, expression: str, source: SharedBlock | bytes) -> Any:
    try:
        return read_value(source)
    except Exception as error:
        raise UsageError(
            f"Rank {rank} has given {expression!r}, but it cannot be loaded in the notebook: "
            f"{type(error).__name__}: {error}"
        ) from None


def _packed(variables: Mapping[str, Any]) -> list[Any]:
    from axon_nb.engine.transfer.value_pickle import pack

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
    from axon_nb.host.resources import free_memory
    from axon_nb.records.units import format_bytes

    free = free_memory()
    if free is not None and size > free:
        raise UsageError(
            f"{what} takes {format_bytes(size)}, and {format_bytes(free)} of memory are free: send a part, or have "
            "the ranks load it themselves."
        )


def _tell_queue(state: ClusterState, ranks: Iterable[int]) -> None:
    ahead = [rank for rank in state.busy if rank in ranks]
    if ahead:
        print(f"Waiting for the cell that still runs on ranks {format_ranks(ahead)}.")


def _run(cells: CellManager, ranks: Sequence[int], call: RankCall[None], what: str) -> list[int]:
    """Make a call as a cell: a death, an interrupt or a deadlock ends it as it ends any other.

    Returns:
        The ranks that cannot open the parcel.
    """
    result = cells.run(cell_source(call), ranks=ranks, quiet=True, check=False, values=False)
    errors = {rank: error for rank, error in result.errors.items() if error.ename != _UNREACHABLE}
    if not errors:
        return list(result.errors)
    cause = root_cause(errors)
    if cause.ename == _OTHER_RANKS:
        raise _NeedsRanks(parse_ranks(cause.evalue, cells.state.world_size))
    if cause.kind != "raised":
        raise cell_error(errors, first=(), hint=hint_for(errors.values()))
    why = cause.evalue if cause.ename == "UsageError" else str(cause)
    raise UsageError(f"Rank {cause.rank} cannot {what}: {why}")


def _ask_far(state: ClusterState, calls: Mapping[int, RankCall[Any]], what: str) -> dict[int, Any]:
    """Make calls to ranks that share no memory with the notebook; what they were sent and gave is cached nowhere."""
    client = state.connection.client
    futures = {rank: requests.call(client, rank, call) for rank, call in calls.items()}
    return {rank: await_answer(state, rank, future, what) for rank, future in futures.items()}
