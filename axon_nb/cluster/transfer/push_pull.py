"""Moves values between the notebook and ranks: through shared memory on one host, in messages between hosts.

A push sends one message per host: its first rank holds the values in shared memory for the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.cells.values import await_reply, ranks_on_this_host, read_value
from axon_nb.cluster.failures.hints import hint_for
from axon_nb.cluster.failures.report import cell_error, root_cause
from axon_nb.cluster.rpc import requests
from axon_nb.errors import UsageError
from axon_nb.host.shared_memory import BlockAddress, SharedBlock, block_size, join_parts
from axon_nb.records.protocol.messages import RankCall, cell_source
from axon_nb.records.protocol.transfer import (
    HoldValues,
    ReceiveValues,
    ReleaseValues,
    SendValue,
    SetVariables,
    TakePendingValue,
    Undelivered,
)
from axon_nb.records.ranks import name_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.cells.manager import CellManager
    from axon_nb.cluster.state import ClusterState

_MIN_HELD_BYTES = 64 << 10
"""Fewer bytes go to each rank in its own message, which takes one exchange instead of three."""


def push(cells: CellManager, variables: Mapping[int, Mapping[str, Any]], *, as_is: bool = False) -> None:
    """Set variables in the namespaces of ranks; return when each rank has them.

    Args:
        cells: The cells of the cluster.
        variables: The variables of each rank; a mapping that several ranks share is sent once.
        as_is: Whether arrays of other libraries on a device, such as CuPy's, stay such arrays.

    Raises:
        UsageError: a name is not valid, or a value cannot be pickled or is too large.
        ClusterLostError: the cluster is gone, or one of the ranks is dead or stuck.
    """
    names = list(dict.fromkeys(name for namespace in variables.values() for name in namespace))
    for name in names:
        if not name.isidentifier():
            raise UsageError(f"{name!r} is not a valid variable name.")
    task = f"receive {', '.join(names)}"
    cells.state.health.ensure_available(list(variables))
    _report_queue(cells.state, variables)
    packed = {id(namespace): _packed(namespace, as_is=as_is) for namespace in variables.values()}
    local = ranks_on_this_host(cells.state, variables)
    _check_memory(sum(block_size(parts) for parts in packed.values()), what=", ".join(names))
    with contextlib.ExitStack() as open_blocks:
        addresses: dict[int, BlockAddress] = {}
        for key, parts in packed.items():
            recipients = [rank for rank in local if id(variables[rank]) == key]
            if recipients:
                block = open_blocks.enter_context(SharedBlock())
                block.write(parts)
                addresses.update(dict.fromkeys(recipients, block.address))
        data = _joined(packed, variables, [rank for rank in variables if rank not in addresses])
        addresses |= open_blocks.enter_context(_held(cells.state, data, task))
        unreached = _run(cells, list(addresses), ReceiveValues(addresses), task) if addresses else {}
    remote = {rank: content for rank, content in data.items() if rank not in addresses}
    remote |= _joined(packed, variables, unreached)
    _call_remote(cells.state, {rank: SetVariables(content) for rank, content in remote.items()}, task)


def _joined(
    packed: Mapping[int, Sequence[Any]], variables: Mapping[int, Mapping[str, Any]], ranks: Iterable[int]
) -> dict[int, bytes]:
    """Return the bytes that each of these ranks gets; ranks with the same variables get the same object."""
    keys = {rank: id(variables[rank]) for rank in ranks}
    joined = {key: bytes(join_parts(packed[key])) for key in set(keys.values())}
    return {rank: joined[key] for rank, key in keys.items()}


@contextlib.contextmanager
def _held(state: ClusterState, data: Mapping[int, bytes], task: str) -> Iterator[dict[int, BlockAddress]]:
    """Send large data once per host, where one rank holds it in shared memory; give the block that each rank reads.

    Args:
        state: The cluster.
        data: The bytes for each rank on another host; ranks that get the same share one object.
        task: What the ranks do, for messages.
    """
    sharing: dict[tuple[str, int], list[int]] = {}
    for rank, content in data.items():
        if len(content) >= _MIN_HELD_BYTES:
            sharing.setdefault((state.rank_info[rank].host, id(content)), []).append(rank)
    groups = {ranks[0]: ranks for ranks in sharing.values() if len(ranks) > 1}
    try:
        blocks = _call_remote(state, {holder: HoldValues(data[holder]) for holder in groups}, task)
        yield {rank: block for holder, block in blocks.items() if block is not None for rank in groups[holder]}
    except BaseException:
        for holder in groups:
            with contextlib.suppress(Exception):  # it is dead
                requests.call(state.connection.client, holder, ReleaseValues())  # not awaited: it may be stuck
        raise
    _call_remote(state, {holder: ReleaseValues() for holder in groups}, task)


def pull(
    cells: CellManager,
    ranks: Sequence[int],
    expression: str,
    *,
    shards: bool = False,
    arrays: bool = False,
    as_is: bool = False,
) -> tuple[dict[int, Any], bool]:
    """Fetch the value of a name or expression from each rank.

    Args:
        cells: The cells of the cluster.
        ranks: Where to evaluate it.
        expression: The name or expression.
        shards: Whether each rank sends its own shard of a distributed tensor; else the full tensor is gathered.
        arrays: Whether tensors arrive as NumPy arrays.
        as_is: Whether arrays of other libraries on a device arrive as such; this process then needs the library.

    Returns:
        The values by rank, and whether they are copies of one value that was gathered from several ranks.

    Raises:
        UsageError: the expression is not valid or fails, or its value cannot be pickled or loaded.
        ClusterLostError: the cluster is gone, or one of the ranks is dead or stuck.
    """
    try:
        compile(expression, "<pull>", "eval")
    except (SyntaxError, ValueError):
        raise UsageError(f"{expression!r} is not a name or an expression.") from None
    cells.state.health.ensure_available(ranks)
    _report_queue(cells.state, ranks)
    task = f"send {expression!r}"
    local = ranks_on_this_host(cells.state, ranks)
    participants = list(ranks)
    with contextlib.ExitStack() as open_blocks:
        while True:
            blocks = {rank: open_blocks.enter_context(SharedBlock()) for rank in local}
            addresses = {rank: blocks[rank].address if rank in blocks else None for rank in ranks}
            call = SendValue(expression, addresses, tuple(participants), shards, arrays, as_is)
            unreached = _run(cells, participants, call, task)
            if needed := {rank for reason in unreached.values() for rank in reason.needed}:
                participants = sorted(needed)
                continue
            if not unreached:
                break
            local = [rank for rank in local if rank not in unreached]
        remote = [rank for rank in ranks if rank not in blocks]
        received = _call_remote(cells.state, dict.fromkeys(remote, TakePendingValue()), task)
        sources: dict[int, SharedBlock | bytes] = {rank: block for rank, block in blocks.items() if not block.empty}
        sources |= {rank: data for rank, data in received.items() if data}
        # A gathered value comes from one rank; the entry of each rank is still a separate copy.
        is_gathered = len(sources) < len(ranks) or participants != list(ranks)
        first = sources[min(sources)]
        return {rank: _loaded(rank, expression, sources.get(rank, first)) for rank in ranks}, is_gathered


def _loaded(rank: int, expression: str, source: SharedBlock | bytes) -> Any:
    try:
        return read_value(source)
    except Exception as error:
        raise UsageError(
            f"Rank {rank} sent {expression!r}, but the notebook cannot load it: {type(error).__name__}: {error}"
        ) from None


def _packed(variables: Mapping[str, Any], *, as_is: bool) -> list[Any]:
    from axon_nb.shell.value_pickle import cannot_pickle, pack

    try:
        return pack(dict(variables), with_names=True, as_is=as_is)
    except Exception as error:
        reason = cannot_pickle(error)
    for name, value in variables.items():
        try:
            pack(value, with_names=True, as_is=as_is)
        except Exception as error:
            raise UsageError(f"{name!r} cannot be sent to ranks: {cannot_pickle(error)}") from None
    raise UsageError(f"{', '.join(variables)} cannot be sent to ranks: {reason}")


def _check_memory(size: int, *, what: str) -> None:
    from axon_nb.host.resources.cgroups import free_memory
    from axon_nb.records.units import format_bytes

    free = free_memory()
    if free is not None and size > free:
        raise UsageError(
            f"{what} needs {format_bytes(size)} but only {format_bytes(free)} is free: send part of it, or load it on "
            "the ranks."
        )


def _report_queue(state: ClusterState, ranks: Iterable[int]) -> None:
    ahead = [rank for rank in state.busy if rank in ranks]
    if ahead:
        print(f"Waiting for the cell that is running on {name_ranks(ahead)}.")


def _run(
    cells: CellManager, ranks: Sequence[int], call: RankCall[Undelivered | None], task: str
) -> dict[int, Undelivered]:
    """Make a call as a cell, so that a death, an interrupt or a deadlock aborts it like any other cell.

    Args:
        cells: The cells of the cluster.
        ranks: Where to call it.
        call: The call.
        task: What the ranks do, for messages; reads after "cannot".

    Returns:
        By rank that could not transfer its value in this way, the reason.
    """
    result = cells.run(cell_source(call), ranks=ranks, quiet=True, check=False)
    undelivered = {rank: value for rank, value in result.values.items() if isinstance(value, Undelivered)}
    if not result.errors or any(reason.needed for reason in undelivered.values()):
        return undelivered
    cause = root_cause(result.errors)
    if cause.kind != "raised":
        raise cell_error(result.errors, first=(), hint=hint_for(result.errors.values()))
    reason = cause.evalue if cause.ename == "UsageError" else str(cause)
    raise UsageError(f"Rank {cause.rank} cannot {task}: {reason}")


def _call_remote(state: ClusterState, calls: Mapping[int, RankCall[Any]], task: str) -> dict[int, Any]:
    """Make calls to ranks that share no memory with the notebook; their arguments and results are not cached."""
    client = state.connection.client
    futures = {rank: requests.call(client, rank, call) for rank, call in calls.items()}
    return {rank: await_reply(state, rank, future, task) for rank, future in futures.items()}
