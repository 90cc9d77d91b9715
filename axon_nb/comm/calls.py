"""Counts of the communication calls and bytes of a block, per operation and peer.

Groups of cells and of mock worlds report each call as they start it, also those that DDP, FSDP or pipelines make.
torch's own groups, as under torchrun and on NCCL, do so since torch 2.14, by hooks that they run before each call, in
the dispatcher: so also for functional collectives and for what DDP and FSDP call. Before, only the calls of
`axon_nb.comm` are counted there, without the peer. Parts of an all_to_all count as equal on torch's own groups.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from axon_nb.records.hooks import hook, missing_hooks
from axon_nb.records.units import aligned, format_bytes
from axon_nb.records.waits import PUBLIC_NAMES

if TYPE_CHECKING:
    import pandas as pd


__all__ = ["CallCounts", "OperationCount", "calls", "report_call", "report_payload"]

_INPUT_SECOND = frozenset({"all_gather", "all_to_all", "gather", "reduce_scatter"})
"""Operations whose group method takes outputs first."""
_RENAMED = {**PUBLIC_NAMES, "allgather_coalesced": "all_gather", "monitored_barrier": "barrier"}
_MAX_LOGGED = 1000
_open: tuple[CallCounts, ...] = ()
_lock = threading.Lock()
_OPERATIONS = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "ALLTOALL": "all_to_all",
    "REDUCE_SCATTER": "reduce_scatter",
    **{name.upper(): name for name in ("barrier", "broadcast", "gather", "recv", "reduce", "scatter", "send")},
}
"""By the beginning of torch's name for them; the longest counts."""
_INPUT_ONLY = frozenset({"all_reduce", "broadcast", "reduce", "send"})
_watched: list[tuple[Any, Callable[[], None]]] = []


class OperationCount(NamedTuple):
    """The calls of one operation, with one peer."""

    operation: str
    """Such as ``all_reduce`` or ``send``; `all_gather_single` counts as ``all_gather``."""
    peer: int
    """Global rank of the other side of a send or recv; -1 for collectives, and for a recv from any rank."""
    calls: int
    bytes: int
    """What the rank passed in, in bytes: the tensor; for an all_gather, reduce_scatter or all_to_all its input; for a
    scatter the rank's part; for a recv what it received."""
    sent: int
    """What the rank sends over the wire, in bytes, if the group works in a ring; see `calls`."""


class CallCounts:
    """What `calls` has counted; displays as a table."""

    def __init__(self, rank: int | None) -> None:
        self._rank = rank
        self._counts: dict[tuple[str, int], list[int]] = {}
        self._log: list[tuple[int, OperationCount]] = []
        self._lock = threading.Lock()  # autograd's threads communicate, too

    def add(self, rank: int, operation: str, peer: int, size: int, sent: int) -> None:
        """Count a call; those of other ranks are ignored, if this counts for one rank."""
        if self._rank not in (None, rank):
            return
        with self._lock:
            count = self._counts.setdefault((operation, peer), [0, 0, 0])
            count[:] = count[0] + 1, count[1] + size, count[2] + sent
            if len(self._log) < _MAX_LOGGED:
                self._log.append((rank, OperationCount(operation, peer, 1, size, sent)))

    @property
    def log(self) -> list[tuple[int, OperationCount]]:
        """The first 1,000 calls in the order of their starts, each with the global rank of its caller."""
        with self._lock:
            return list(self._log)

    @property
    def rows(self) -> list[OperationCount]:
        """The counts, by operation and peer, in the order of the first calls."""
        with self._lock:
            return [OperationCount(*key, *count) for key, count in self._counts.items()]

    def of(self, operation: str | None = None, *, peer: int | None = None) -> OperationCount:
        """Return the sum over rows; zeros if there was no such call.

        Args:
            operation: Such as ``all_reduce``; None: all operations.
            peer: Global rank of the other side; None: all.
        """
        rows = [row for row in self.rows if operation in (None, row.operation) and peer in (None, row.peer)]
        return OperationCount(
            operation or "all",
            -1 if peer is None else peer,
            sum(row.calls for row in rows),
            sum(row.bytes for row in rows),
            sum(row.sent for row in rows),
        )

    @property
    def num_calls(self) -> int:
        """Number of calls."""
        return self.of().calls

    @property
    def bytes(self) -> int:
        """What the rank passed in, in bytes."""
        return self.of().bytes

    @property
    def sent(self) -> int:
        """What the rank sends over the wire, in bytes, if the group works in a ring."""
        return self.of().sent

    def to_frame(self) -> pd.DataFrame:
        """Return the rows as a table."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=list(OperationCount.__annotations__))

    def __repr__(self) -> str:
        rows = self.rows
        if not rows:
            return "no calls"
        table = [("operation", "peer", "calls", "bytes", "sent")]
        for row in [*rows, self.of()] if len(rows) > 1 else rows:
            peer = "" if row.peer < 0 else str(row.peer)
            table.append((row.operation, peer, f"{row.calls:,}", format_bytes(row.bytes), format_bytes(row.sent)))
        peers = any(line[1] for line in table[1:])
        columns = [column for column in range(5) if peers or column != 1]
        return "\n".join(
            aligned([[line[column] for column in columns] for line in table], [column > 0 for column in columns])
        )


@contextlib.contextmanager
def calls() -> Iterator[CallCounts]:
    """Count the communication calls of a block: ``with axon_nb.calls() as counted: step()``, then `counted`.

    On a rank, also of a mock world, it counts that rank's calls; around `World.mock(n).run(…)` those of all ranks. A
    call counts when it starts. `send` and `recv` of `axon_nb.comm` make two calls each, unless ``header=False``: the
    header is a message. Under torchrun and on NCCL, all calls of the groups that exist when the block starts are
    counted, but before torch 2.14 only those of `axon_nb.comm`.

    ============== ========================== ===========================================
    operation      bytes (S)                  sent, by a ring of n ranks
    ============== ========================== ===========================================
    all_reduce     the tensor                 2 (n - 1) / n S
    all_gather     this rank's part           (n - 1) S
    reduce_scatter the whole input            (n - 1) / n S
    broadcast      the tensor                 2 (n - 1) / n S, a scatter and an all_gather
    reduce         the tensor                 2 (n - 1) / n S, a reduce_scatter and a gather
    all_to_all     the whole input            S without what stays on the rank
    gather         this rank's part           S; on the root 0
    scatter        this rank's part           0; on the root (n - 1) S
    send           the message                S
    recv           the message                0
    barrier        0                          0
    ============== ========================== ===========================================

    Yields:
        The counts, which grow with each call.
    """
    global _open
    counts = CallCounts(dist.get_rank() if dist.is_initialized() else None)
    with _lock:
        _open = (*_open, counts)
        _watch_groups()
    try:
        yield counts
    finally:
        with _lock:
            _open = tuple(other for other in _open if other is not counts)
            if not _open:
                _unwatch_groups()


def report_call(
    name: str, args: Sequence[Any], place: int, members: Callable[[], Sequence[int]], peer: int = -1
) -> None:
    """Count the call of a group's method, if a block counts calls.

    Args:
        name: The method, such as ``allreduce`` or ``_allgather_base``.
        args: What it was called with: outputs and inputs in torch's order.
        place: Rank of the caller in the group.
        members: Returns the global ranks of the group.
        peer: Rank in the group of the other side of a send or recv; -1: none, or any.
    """
    if not _open:
        return
    ranks = members()
    size = len(ranks)
    operation = _RENAMED.get(name, name).removesuffix("_coalesced").removesuffix("_single")
    first = args[0] if args else None
    second = args[1] if len(args) > 1 else None
    payload = _bytes_of(second if operation in _INPUT_SECOND else first)
    if operation == "all_to_all":
        sent = payload - _kept(second, args, place, size)
    elif operation == "scatter":
        sent = (size - 1) * payload if second else 0
    elif operation == "gather":
        sent = 0 if first else payload
    else:
        sent = _ring(operation, payload, size)
    for counts in _open:
        counts.add(ranks[place], operation, ranks[peer] if peer >= 0 else -1, payload, sent)


def report_payload(rank: int, operation: str, payload: int, size: int, group: Any = None) -> None:
    """Count a call whose group does not report it, if a block counts calls.

    Args:
        rank: Global rank of the caller.
        operation: Its public name.
        payload: Bytes on this rank.
        size: Number of ranks in the group.
        group: Its group, unless the call went to the group's backend.
    """
    if not _open or (group is not None and _is_watched(group)):
        return
    sent = payload * (size - 1) // size if operation == "all_to_all" else _ring(operation, payload, size)
    for counts in _open:
        counts.add(rank, operation, -1, payload, sent)


def _ring(operation: str, payload: int, size: int) -> int:
    match operation:
        case "all_reduce" | "broadcast" | "reduce":
            return -(-2 * (size - 1) * payload // size)
        case "all_gather":
            return (size - 1) * payload
        case "reduce_scatter":
            return -(-(size - 1) * payload // size)
        case "send":
            return payload
    return 0


def _bytes_of(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(map(_bytes_of, tensors)) if isinstance(tensors, (list, tuple)) else 0


def _kept(tensor: Any, args: Sequence[Any], place: int, size: int) -> int:
    """Bytes of an all_to_all's input that stay on the rank."""
    if not isinstance(tensor, torch.Tensor):
        return int(tensor[place].nbytes)
    splits = args[3] if len(args) > 3 else None
    return tensor.nbytes // max(1, len(tensor)) * splits[place] if splits else tensor.nbytes // size


def before_calls(
    group: Any, see: Callable[[str, tuple[Any, ...], int], object], started: Callable[[str], object] | None = None
) -> Callable[[], None] | None:
    """Call `see` before each call of a group of torch's own; return a function that ends that, or None before 2.14.

    torch does so in the dispatcher, but not for `monitored_barrier`, for what calls the group's backend, nor for groups
    that are written in Python. If `see` raises, the call raises that, and has sent nothing.

    Args:
        group: The group.
        see: Gets the operation, its tensors in torch's order, and the rank in the group of the root or peer, else -1.
            The reduction, the splits of an all_to_all and the tag of a message are not known.
        started: Called with the operation once it has started.
    """
    if not hook("comm.group_hooks").is_used or missing_hooks("comm.group_hooks"):
        return None

    def before(call: Any) -> None:
        if operation := _operation(call.name):
            see(operation, _tensors(operation, call), call.root)

    def after(call: Any) -> None:
        if started is not None and (operation := _operation(call.name)):
            started(operation)

    number = id(before)  # no other hook has it while the group holds this one
    group.register_pre_hook(number, before)
    if started is not None:
        group.register_post_hook(number, after)

    def end() -> None:
        with contextlib.suppress(RuntimeError):  # the group was destroyed
            group.unregister_pre_hook(number)
            if started is not None:
                group.unregister_post_hook(number)

    return end


def _watch_groups() -> None:
    """Report the calls of all groups of torch's own that this process has now, until `_unwatch_groups`."""
    for group in list(c10d._world.pg_map) if dist.is_initialized() else ():
        if type(group) is dist.ProcessGroup and not _is_watched(group):
            see = functools.partial(_report, dist.get_process_group_ranks(group), group.rank())
            if end := before_calls(group, see):
                _watched.append((group, end))


def _unwatch_groups() -> None:
    while _watched:
        _watched.pop()[1]()


def _is_watched(group: Any) -> bool:
    return any(group is other for other, _ in _watched)


def _report(ranks: list[int], place: int, operation: str, tensors: tuple[Any, ...], root: int) -> None:
    report_call(operation, tensors, place, lambda: ranks, root if operation in ("send", "recv") else -1)


@functools.cache
def _operation(kind: Any) -> str:
    """The operation that torch names so to a hook; empty if nothing is communicated, as in a split."""
    return _OPERATIONS.get(max((name for name in _OPERATIONS if kind.name.startswith(name)), key=len, default=""), "")


def _tensors(operation: str, call: Any) -> tuple[Any, ...]:
    inputs = call.input_tensors
    if operation in _INPUT_ONLY:
        return (inputs,)
    if operation == "all_to_all" and len(inputs) == 1:  # of one tensor
        inputs = inputs[0]
    return call.output_tensors, inputs
