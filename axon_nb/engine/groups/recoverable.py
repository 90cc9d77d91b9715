"""A process group that survives an abort, and its works: torch's group API over a Gloo group that can be replaced.

Objects that hold the group (DDP, FSDP2, DTensor meshes, pipelines) keep it; `rebuild` gives it a fresh inner group. On
Gloo this is the only way: it has no abort, and a backend whose connections were closed cannot be repaired. An abort
ends the wait of each work, and its future can be failed from another thread.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, Work
from torch.utils._pytree import tree_leaves

from axon_nb.comm.calls import report_call
from axon_nb.comm.errors import CommError, TensorError, TensorMismatchError
from axon_nb.comm.shared_memory.segment.pages import GroupLeftError
from axon_nb.comm.shared_memory.work import SharedWork
from axon_nb.comm.torch_group import PythonProcessGroup, stage_on_host
from axon_nb.engine.frames import describe_awaited_call, group_operations
from axon_nb.engine.groups import gloo
from axon_nb.engine.groups.abort import AbortedError, BrokenGroupError, wait_for_peers
from axon_nb.engine.groups.state import Call, GroupsState, payload_bytes, peer_of
from axon_nb.errors import UsageError
from axon_nb.records.spans import emit, is_suppressed, ring, span_of
from axon_nb.shell import user_frame

if TYPE_CHECKING:
    from axon_nb.comm.shared_memory.group import SharedMemoryGroup
    from axon_nb.engine.groups.size_check import SizeTable

_SLICE = timedelta(milliseconds=50)
_POLL_S = 0.05
_BACKEND = "axon_nb"
_GLOO = dist.ProcessGroup.BackendType.GLOO
_CPU = torch.device("cpu")
_POINT_TO_POINT = {"recv", "recv_anysource", "send"}
_SCATTERING = {"_reduce_scatter_base", "reduce_scatter_single"}
_CHANGING = {"allreduce", "broadcast", "reduce"}
# For these, Gloo returns a work whose wait accepts a timeout and can be repeated. The others lose their connection when
# a wait times out (send, recv) or ignore the timeout (reduce_scatter).
_SLICED = frozenset({
    "_allgather_base", "all_gather_single", "all_to_all_single", "allgather", "allreduce", "allreduce_coalesced",
    "alltoall_base", "barrier", "broadcast", "gather", "reduce", "scatter",
})  # fmt: skip


class RecoverableWork(Work):
    """Wraps the work of the inner group.

    Args:
        inner: The inner group's work.
        call: The operation.
        group: Its group. Without the group's timeout, a recv on Gloo would use the one for connecting.
        sliced: Whether the inner wait may be cut into slices. A send or recv whose wait times out loses its
            connection, and reduce_scatter ignores the timeout: those are waited for in a helper thread.
        keep_alive: Objects that must live as long as the operation runs.
        on_finish: Called once with `call` when the operation has finished.
        results: The output tensors if `on_finish` stores into them; None: the inner work has them.
    """

    _done = False
    _future: Any = None

    def __init__(
        self,
        inner: Any,
        call: Call,
        *,
        group: RecoverableGroup,
        sliced: bool,
        keep_alive: Any,
        on_finish: Callable[[Call], None],
        results: Any = None,
    ) -> None:
        super().__init__()
        self._inner = inner
        self._results = results
        self._call = call
        self._group = group
        self._state = group.state
        self._sliced = sliced
        self._keep_alive = keep_alive
        self._on_finish = on_finish
        if type(inner) is SharedWork and inner.runs_without_wait:  # its handle may be dropped, or only polled
            inner.when_done(functools.partial(group.settle, call))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the operation.

        Raises:
            AbortedError: the cell was aborted meanwhile, or a peer is gone.
            RuntimeError: the operation failed or timed out.
            UsageError: some of its ranks do not run the cell.
        """
        if self._done:
            return True
        if self._call.refusal:
            raise UsageError(self._call.refusal)
        end = None if not timeout or timeout <= timedelta(0) else time.monotonic() + timeout.total_seconds()
        self._state.slowdown.sleep()
        self._call.waiting_thread = threading.get_ident()
        if ring.watched and not is_suppressed("wait"):
            self._call.wait_started_ns = time.monotonic_ns()
        try:
            self._wait_sliced(end) if self._sliced else self._wait_in_helper(end)
        except KeyboardInterrupt as interrupt:  # loggers of the user's need not show where in our code it came
            raise interrupt.with_traceback(None)  # noqa: B904
        except Exception as error:
            if (described := self._describe(error)) is not error:
                raise described from None
            raise
        finally:
            self._call.waiting_thread = 0
            self._state.slowdown.skip()
        if not self._done:
            self._done = True
            self._on_finish(self._call)
        return True

    def _describe(self, error: Exception) -> Exception:
        """Return the error that a wait raises for one of the inner work, which may be the same."""
        if not isinstance(error, RuntimeError):  # a signal handler of the user raised it
            self._state.calls.note_left(self._call, error)
            return error
        name = self._call.name
        if isinstance(self._inner, SharedWork) and self._inner.is_completed():
            self._group.settle(self._call, error)  # it failed; otherwise, only this wait did
        if isinstance(error, AbortedError):
            return error
        if self._state.abort.is_set():
            return AbortedError(f"aborted while waiting in {name}")
        if isinstance(error, GroupLeftError):
            return AbortedError(f"lost a peer while waiting in {name}: {error}")
        if isinstance(error, CommError):  # all ranks raise it, and the group stays usable
            self._done = True
            if not never_began(error):
                self._on_finish(self._call)
        if "gloo" in str(error) and "timed out" not in str(error).lower():
            return AbortedError(f"lost a peer while waiting in {name}: {str(error)[-120:]}")
        return error

    def _wait_sliced(self, end: float | None) -> None:
        wait = self._inner.wait
        if isinstance(self._inner, SharedWork):
            wait = self._inner.wait_slice
            if end is not None:
                self._inner.leave_to_helper()
        while True:
            try:
                wait(_SLICE)
                return
            except RuntimeError as error:
                if "Operation timed out" not in str(error):
                    raise
            self._check(end)

    def _wait_in_helper(self, end: float | None) -> None:
        if self._inner.is_completed():
            self._inner.wait()
            return
        done = threading.Lock()  # setting an Event and waking from it takes several times as long
        done.acquire()
        failure: list[BaseException] = []

        def wait() -> None:
            try:
                # Without a timeout a send or recv uses the one for connecting, which a slow peer would exceed.
                self._inner.wait(self._group.timeout)
            except BaseException as error:
                failure.append(error)
            done.release()

        self._state.helpers.run(wait)
        while not done.acquire(timeout=_POLL_S):
            self._check(end)
        if failure:
            raise failure[0]

    def _check(self, end: float | None) -> None:
        if self._state.abort.is_set():
            raise AbortedError(f"aborted while waiting in {self._call.name}")
        if end is not None and time.monotonic() > end:
            raise RuntimeError(f"{self._call.name} timed out")

    def get_future(self) -> Any:
        """Return a future that an abort can fail.

        `Future.set_exception` sets a Python result that the C++ reducer reads as tensors, and crashes. An exception
        raised inside a `then` callback does become a C++ error.
        """
        if self._future is None:
            inner = self._inner.get_future()
            self._base = torch.futures.Future()  # type: ignore[var-annotated]
            self._lock = threading.Lock()
            self._fired = self._failed = False

            def unwrap(_: Any) -> Any:
                if self._failed:
                    raise AbortedError(f"aborted while waiting in {self._call.name}")
                try:
                    value = inner.value()
                    return value if self._results is None else tree_leaves(self._results)
                except RuntimeError as error:
                    if GroupLeftError.__name__ in str(error) or isinstance(error, GroupLeftError):
                        raise AbortedError(f"lost a peer while waiting in {self._call.name}: {error}") from None
                    raise

            self._future = self._base.then(unwrap)
            self._state.works_with_future.add(self)
            inner.add_done_callback(lambda _: self._resolve(failed=False))
        return self._future

    def _resolve(self, *, failed: bool) -> None:
        with self._lock:
            if self._fired:
                return
            self._fired, self._failed = True, failed
        if not failed and not self._done:
            self._done = True
            self._on_finish(self._call)
        self._base.set_result(None)

    def fail(self) -> None:
        """Fail the future from any thread: whatever waits for it raises `AbortedError`."""
        if self._future is not None:
            self._resolve(failed=True)

    def is_completed(self) -> bool:
        """Whether the operation has finished; a received tensor then has its values."""
        if not self._done and isinstance(self._inner, SharedWork) and self._inner.is_success():
            self._done = True
            self._on_finish(self._call)
        if self._done or not self._inner.is_completed():
            return self._done
        copies = self._call.sequence == 0 or self._results is not None  # from host memory, or from another layout
        if copies and not self._call.refusal:
            with contextlib.suppress(RuntimeError):  # `wait` raises it again
                self.wait()
        return True

    def is_success(self) -> bool:
        """Whether it succeeded."""
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        """Return its failure."""
        return self._inner.exception()

    def result(self) -> Any:
        """Return its output tensors."""
        return self._inner.result() if self._results is None else tree_leaves(self._results)

    def synchronize(self) -> None:
        """Do nothing: results on the CPU are complete after the wait."""

    def source_rank(self) -> int:
        """Return the sender of a recv from any rank."""
        return int(self._inner.source_rank())

    _source_rank = source_rank


def never_began(error: BaseException) -> bool:
    """Whether an operation over shared memory failed with it before it was announced: only this rank raises it."""
    return isinstance(error, TensorError) and not isinstance(error, TensorMismatchError)


class RecoverableGroup(PythonProcessGroup):
    """A group whose connections can be closed from any thread and rebuilt; see the module.

    Args:
        state: What the groups of this rank share.
        root: The store that all ranks can reach; each rebuild uses its own prefix.
        epoch: How often the groups have been rebuilt.
        rank: This process's rank in the group.
        size: Number of ranks in the group.
        timeout: Timeout of the group's operations.
        name: torch's name of the group, the same on all its ranks.
        global_rank: This process's rank in the default group.
        members: Global ranks of the group, for messages; by default those from 0 on.
        shares_memory: Whether it communicates through shared memory instead of Gloo.
        rank_device: Where this rank computes.
        max_bytes: Maximum size of that memory; 0: the usual size.
    """

    def __init__(
        self,
        state: GroupsState,
        root: Store,
        *,
        epoch: int,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        global_rank: int,
        members: Sequence[int] = (),
        shares_memory: bool = False,
        rank_device: torch.device = _CPU,
        max_bytes: int = 0,
    ) -> None:
        super().__init__(rank, size, name, backend=_BACKEND)
        self.rank_device = rank_device
        """Where this rank computes; `axon_nb.comm` makes tensors there."""
        self.emits_spans = True
        """Tells `axon_nb.comm` not to record calls on this group."""
        self.state = state
        """What the groups of this rank share."""
        self._calls = state.calls
        self._abort = state.abort
        self._root = root
        self.timeout = timeout
        self._global_rank = global_rank
        self._global_ranks = members
        self._shares_memory = shares_memory
        self._max_bytes = max_bytes
        self._inner: Any = None
        self.memory: SharedMemoryGroup | None = None
        """The inner group, if it shares memory."""
        self._table: SizeTable | None = None
        self.sequence = 0
        """Number of collectives that this rank has started in the group since it was last rebuilt."""
        if name != "0" and not state.skips_rendezvous:  # all ranks arrive at the default group when they start
            wait_for_peers(
                PrefixStore(f"arrived{epoch}/{name}/", root),
                rank,
                size,
                raise_if_cancelled=functools.partial(state.abort.raise_if_set, "new_group"),
                timeout_s=timeout.total_seconds(),
            )
        self.rebuild(epoch)

    def rebuild(self, epoch: int) -> None:
        """Connect a fresh inner group; collective over the group's ranks.

        Raises:
            AbortedError: an abort arrived meanwhile.
            RuntimeError: a peer did not arrive.
        """
        if self._table is not None:
            self._table.close()
        store = PrefixStore(f"epoch{epoch}/{self._name}/", self._root)
        memory = self._share_memory(store) if self._shares_memory else None
        inner = memory or self._connect(store, epoch)
        if self._inner is not None:  # a rank that had finished its cell got no abort: connections are still open
            self._drop_inner()
        self.sequence, self._inner, self.memory = 0, inner, memory

    def _drop_inner(self) -> None:
        self.close_connections()
        if self.memory is not None:
            self.memory.shutdown()
        else:
            self.state.gloo.abandon(self._inner)

    def _share_memory(self, store: Store) -> SharedMemoryGroup:
        # Imported here: ranks on Gloo do without these modules.
        from axon_nb.comm.shared_memory.group import SharedMemoryGroup, caller_line

        return SharedMemoryGroup(
            store,
            rank=self._own_rank,
            size=self._size,
            timeout=self.timeout,
            name=self._name,
            members=self._global_ranks,
            give_up=self._abort.raise_if_set,
            line=caller_line,
            place=describe_awaited_call,
            runs_in_wait=True,
            max_bytes=self._max_bytes,
        )

    def _connect(self, store: Store, epoch: int) -> dist.ProcessGroup:
        from axon_nb.engine.groups.size_check import open_size_table

        # Before connecting: once the ranks are connected, each has cleared its entries.
        self._table = open_size_table(
            self._root, self.state, name=self._name, epoch=epoch, rank=self._own_rank, size=self._size
        )
        connect, cancel = self.state.gloo.connect, self._abort.raise_if_set
        backend = connect(store, self._own_rank, self._size, timeout=self.timeout, raise_if_cancelled=cancel)
        inner = dist.ProcessGroup(store, self._own_rank, self._size)
        for device in self._device_types:
            inner._register_backend(device, _GLOO, backend)
        inner._set_default_backend(_GLOO)
        inner._set_group_name(self._name)
        inner._set_group_desc(self._desc)
        return inner

    def disable(self) -> None:
        """Refuse all operations, instead of a rebuild: some ranks of the group do not have it."""
        self._drop_inner()
        reason = f"group {self._name!r} no longer exists on all of its ranks. Recreate it with `dist.new_group`"

        def refuse(name: str, *_: Any) -> Any:
            raise BrokenGroupError(f"{name} failed: {reason} on every rank.")

        self.run = refuse

    def close_connections(self) -> None:
        """End all waits in this group on this rank, from any thread."""
        self.connection_closer()()

    abort = gloo.close_connections

    def connection_closer(self) -> Callable[[], None]:
        """Return a function that closes the current connections; called late, it spares those of a rebuild."""
        if self.memory is not None:
            return self.memory.abort
        return functools.partial(gloo.close_connections, self._inner._get_backend(_CPU))

    def run(self, name: str, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Start one operation on the inner group."""
        calls, abort, slowdown = self._calls, self._abort, self.state.slowdown
        abort.raise_if_set(name)
        slowdown.sleep()
        if self.memory is None and _is_meta(args):  # torch returns at once, and sends nothing
            return operation(self._inner, *args, **kwargs)
        point_to_point = name in _POINT_TO_POINT
        peer = peer_of(name, args) if point_to_point else -1
        refusal = calls.refusal_reason(self, name, peer) if calls.exclusive is not None else ""
        sequence, finished = 0, self._finished
        if self.memory is None or point_to_point:  # collectives over shared memory do it themselves
            args, finished = stage_on_host(name, args, finished)
        if point_to_point:
            if self._table is not None:
                self._table.check_point_to_point(name, args, self._members)
        else:
            if abort.stop_requested():
                abort.raise_at_cut(self.sequence + 1, calls.num_collectives + 1, group=self._name, name=name)
            self.sequence = sequence = self.sequence + 1
        call = None
        try:
            if sequence and self._table is not None:
                self._table.check_collective(name, args, sequence, self._members)
            call = calls.start(name, self._name, sequence, peer, payload_bytes(name, args))
            report_call(name, args, self._own_rank, self._members, peer)
            if ring.watched and (frame := user_frame(sys._getframe())) is not None:
                call.line = frame.f_lineno
            call.refusal = refusal
            _count_change(name, args, self._own_rank)
            exact = args
            if self.memory is not None and operation is not gloo.MonitoredBarrier:
                work, sliced = getattr(self.memory, name)(*args, **kwargs), True
            else:
                from axon_nb.engine.groups.gloo_arguments import exact_arguments  # not on ranks with shared memory

                exact, finished = exact_arguments(name, args, finished, rank=self._own_rank)
                work = operation(self._inner, *exact, **kwargs)
                sliced = name in _SLICED or type(work) is gloo.ReduceScatterWork
        except BaseException as error:
            self.retract(call, sequence)
            if reason := _lost_peer(error):
                raise AbortedError(f"{name} lost a peer: {reason}") from None
            raise
        late = slowdown.late(work, name, args, self, call.bytes)
        sliced = sliced or late is not work
        results = None if exact is args else args[0]
        return RecoverableWork(
            late, call, group=self, sliced=sliced, keep_alive=(args, exact), on_finish=finished, results=results
        )

    def retract(self, call: Call | None, sequence: int) -> None:
        """Do not count an operation that failed before it began, on this rank only."""
        if sequence and (call is None or self._calls.retract(call)):
            self.sequence -= 1
            if self._table is not None:
                self._table.retract(sequence)
        elif call is not None:
            self._calls.finish(call)

    def settle(self, call: Call, error: BaseException | None) -> None:
        """Note that a call is over on this rank; `error`: why it failed."""
        if error is not None and never_began(error):
            self.retract(call, call.sequence)
        else:
            self._calls.finish(call)

    def _finished(self, call: Call) -> None:
        self._calls.finish(call)
        sequence, end, kind = call.sequence, time.monotonic_ns(), "collective" if call.sequence else "p2p"
        rank, group, more = self._global_rank, self._name, (-1, -1, sequence, call.line, "")
        emit(span_of((rank, kind, call.name, call.started_ns, end, group, call.bytes, *more)))
        if call.wait_started_ns:
            emit(span_of((rank, "wait", call.name, call.wait_started_ns, end, group, 0, *more)))

    def _members(self) -> list[int]:
        return dist.get_process_group_ranks(self)

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> Any:
        """Behave like torch's; an abort ends the wait."""
        return self.run("monitored_barrier", gloo.MonitoredBarrier, args, kwargs).wait()

    def shutdown(self) -> None:
        """End the threads of a group over shared memory."""
        if self.memory is not None:
            self.memory.shutdown()

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self._inner._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        super()._set_group_desc(desc)
        self._inner._set_group_desc(desc)

    setGroupName = _set_group_name
    setGroupDesc = _set_group_desc

    def _get_backend(self, device: torch.device) -> Any:
        return self._inner._get_backend(device)

    def _get_sequence_number_for_group(self) -> int:
        return int(self._inner._get_sequence_number_for_group())

    def _start_coalescing(self, device: torch.device) -> Any:
        return self._inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._inner._end_coalescing(device)

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = {"cpu", self.rank_device.type, *(["cuda"] if torch.cuda.is_available() else [])}
        return [torch.device(kind) for kind in sorted(kinds)]


def _count_change(name: str, args: tuple[Any, ...], rank: int) -> None:
    """Have autograd refuse a backward pass that needs what a tensor held before, as after any change in place.

    Not for the other operations: FSDP1 gathers again into what the forward pass has saved.
    """
    if name not in _CHANGING or (
        # The root of a broadcast keeps its values, as all others do in a reduce.
        name != "allreduce" and (name == "reduce") != (getattr(args[-1], "rootRank", rank) == rank)
    ):
        return
    for tensor in [args[0]] if isinstance(args[0], torch.Tensor) else args[0]:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _is_meta(args: tuple[Any, ...]) -> bool:
    """Whether an operation's tensors have no memory."""
    first = args[0] if args else None
    while isinstance(first, list) and first:
        first = first[0]
    return isinstance(first, torch.Tensor) and first.is_meta


def _lost_peer(error: BaseException) -> str:
    """Return the reason if an operation failed because a connection is gone; else an empty string."""
    if isinstance(error, GroupLeftError):
        return str(error)
    text = str(error) if isinstance(error, RuntimeError) else ""
    return text[-120:] if "gloo" in text.lower() and "closed" in text.lower() else ""


def _wrapped(name: str) -> Callable[..., Any]:
    operation = getattr(dist.ProcessGroup, name)
    if name in _SCATTERING:
        operation = gloo.reduce_scatter_via_all_reduce(operation)

    def call(self: RecoverableGroup, *args: Any, **kwargs: Any) -> Any:
        return self.run(name, operation, args, kwargs)

    call.__name__ = name
    return call


for _name in group_operations():
    setattr(RecoverableGroup, _name, _wrapped(_name))
