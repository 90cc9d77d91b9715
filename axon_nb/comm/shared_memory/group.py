"""The process group that torch sees: every operation of c10d on CPU tensors, over shared memory.

Collectives run on the calling thread if it waits anyway, otherwise on the helper thread.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from axon_nb.comm.errors import CommError, TensorMismatchError
from axon_nb.comm.shared_memory.collectives import calls
from axon_nb.comm.shared_memory.collectives.algorithms import arithmetic
from axon_nb.comm.shared_memory.collectives.calls import Calls, check_sizes, check_whole, split_bytes, stage
from axon_nb.comm.shared_memory.collectives.rounds import Rounds
from axon_nb.comm.shared_memory.messages import ANY, Messages, Receive
from axon_nb.comm.shared_memory.segment.pages import GroupLeftError, dtype_code, reduce_number
from axon_nb.comm.shared_memory.segment.progress import Progress, form
from axon_nb.comm.shared_memory.work import JoinedWork, Order, SharedWork, count, done_work, is_profiling, record
from axon_nb.comm.torch_group import PythonProcessGroup
from axon_nb.records.stacks import fsdp_tag, library_of
from axon_nb.torch_api import torch_api

_num_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_num_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 0)
Tensor = torch.Tensor
Job = Callable[[], None]
BACKEND = "shm"
"""Name of the backend for `dist.init_process_group` and `dist.new_group`."""


class CollectiveOperations(PythonProcessGroup):
    """The collectives of a group; the subclass sets the attributes."""

    _rounds: Rounds
    _calls: Calls
    _order: Order
    _line: Callable[[], int]
    _runs_in_wait: bool
    _batch: list[SharedWork] | None
    _raise_if_forked: Callable[[], None]

    def _begin(self, name: str, job: Job, outputs: list[Tensor], opts: Any, operator: str = "") -> SharedWork:
        if is_profiling():
            return record(name, lambda: self._start(name, job, outputs, opts, operator), operator)
        return self._start(name, job, outputs, opts, operator)

    def _start(self, name: str, job: Job, outputs: list[Tensor], opts: Any, operator: str) -> SharedWork:
        """Run an operation: on this thread if the caller waits and nothing is queued, else on the helper thread."""
        self._raise_if_forked()
        waits = opts is not None and not getattr(opts, "asyncOp", True)
        # Hide the operation's own steps from torch's modes, such as one that counts calls.
        num_modes = _num_modes()
        unseen = not num_modes and not _num_function_modes()
        if num_modes:
            count(name, outputs, operator)
        if waits and self._batch is None and unseen:
            if self._runs_in_wait:
                work = SharedWork(outputs)
                work.run_in_wait(functools.partial(self._order.run_or_put, job, work))
                return work
            if self._order.run_now(job):
                return done_work()
        work = SharedWork(outputs)
        self._order.put(job, work, in_wait=unseen)
        return self._noted(work)

    def _noted(self, work: SharedWork) -> SharedWork:
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _sums(self, tensor: Tensor, opts: Any) -> tuple[int, Any, Any]:
        """Return the number of the reduce operation, its arithmetic, and what this rank multiplies its elements by."""
        number, factor = reduce_number(dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts))
        return number, arithmetic(tensor.dtype, number, self._size), factor

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> SharedWork:
        """Reduce tensors in place."""
        tensors = listed(tensors)
        line, call = self._line(), self._calls.all_reduce
        if len(tensors) == 1:
            tensor = tensors[0]
            number, sums, factor = self._sums(tensor, opts)
            if factor is None:
                return self._begin("all_reduce", lambda: call(tensor, number, sums, line), tensors, opts)
        items = [(tensor, *self._sums(tensor, opts)) for tensor in tensors]

        def job() -> None:
            for tensor, number, sums, factor in items:
                scaled = _scaled(tensor, factor)
                call(scaled, number, sums, line)
                _store(scaled, tensor)

        return self._begin("all_reduce", job, tensors, opts, "allreduce_coalesced_" if len(tensors) > 1 else "")

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> SharedWork:
        """Broadcast the root's tensors."""
        tensors, line, root = listed(tensors), self._line(), _root(opts)

        def job() -> None:
            for tensor in tensors:
                self._calls.broadcast(tensor, root, line)

        return self._begin("broadcast", job, tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> SharedWork:
        """Reduce tensors into the root's."""
        (tensor,), line, root = listed(tensors), self._line(), _root(opts)
        number, sums, factor = self._sums(tensor, opts)

        def job() -> None:
            scaled = _scaled(tensor, factor)
            self._calls.reduce(scaled, number, sums, root, line)
            if root == self._own_rank:
                _store(scaled, tensor)

        return self._begin("reduce", job, [tensor], opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SharedWork:
        """Gather each rank's tensor on all ranks; `outputs[0][rank]` receives that of `rank`."""
        (tensor,), parts, line, tag = inputs, outputs[0], self._line(), fsdp_tag(sys._getframe())
        check_sizes("all_gather", parts, tensor.nbytes, self._size)
        return self._begin("all_gather", lambda: self._calls.all_gather(parts, tensor, line, tag), parts, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SharedWork:
        """Like `allgather`, for several tensors: `outputs[rank][number]`."""
        line = self._line()

        def job() -> None:
            for number, tensor in enumerate(inputs):
                self._calls.all_gather([row[number] for row in outputs], tensor, line)

        tensors = [tensor for row in outputs for tensor in row]
        return self._begin("all_gather", job, tensors, opts, "allgather_coalesced_")

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> SharedWork:
        """Gather each rank's tensor on all ranks, into one tensor."""
        line, tag = self._line(), fsdp_tag(sys._getframe())
        check_whole("all_gather", output, tensor, self._size)
        call = self._calls.all_gather_single
        return self._begin("all_gather_single", lambda: call(output, tensor, line, tag), [output], opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SharedWork:
        """Like `_allgather_base`, for several tensors."""
        line = self._line()
        for output, tensor in zip(outputs, inputs, strict=True):
            check_whole("all_gather", output, tensor, self._size)

        def job() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._calls.all_gather_single(output, tensor, line)

        return self._begin("all_gather_single", job, outputs, opts, "allgather_into_tensor_coalesced_")

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SharedWork:
        """Gather each rank's tensor on the root."""
        (tensor,), line, root = inputs, self._line(), _root(opts)
        parts = outputs[0] if outputs and root == self._own_rank else []
        if root == self._own_rank:
            check_sizes("gather", parts, tensor.nbytes, self._size)
        return self._begin("gather", lambda: self._calls.gather(parts, tensor, root, line), parts, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SharedWork:
        """Scatter the root's tensors, one per rank."""
        (output,), line, root = outputs, self._line(), _root(opts)
        parts = inputs[0] if inputs and root == self._own_rank else []
        if root == self._own_rank:
            check_sizes("scatter", parts, output.nbytes, self._size)
        return self._begin("scatter", lambda: self._calls.scatter(output, parts, root, line), outputs, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SharedWork:
        """Reduce tensors, one per rank, which may differ in size."""
        (output,), parts, line = outputs, inputs[0], self._line()
        check_sizes("reduce_scatter", parts, output.nbytes, self._size, only=self._own_rank)
        number, sums, factor = self._sums(output, opts)

        def job() -> None:
            scaled = [_scaled(part, factor) for part in parts]
            self._calls.reduce_scatter(output, scaled, number, sums, line)

        return self._begin("reduce_scatter", job, outputs, opts)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> SharedWork:
        """Reduce a tensor and scatter it in equal parts."""
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SharedWork:
        """Like `_reduce_scatter_base`, for several tensors."""
        line, tag = self._line(), fsdp_tag(sys._getframe())
        items = []
        for output, tensor in zip(outputs, inputs, strict=True):
            check_whole("reduce_scatter", tensor, output, self._size)
            items.append((output, tensor, *self._sums(output, opts)))

        def job() -> None:
            for output, tensor, number, sums, factor in items:
                self._calls.reduce_scatter_single(output, _scaled(tensor, factor), number, sums, line, tag=tag)

        operator = "reduce_scatter_tensor_coalesced_" if len(outputs) > 1 else ""
        return self._begin("reduce_scatter_single", job, outputs, opts, operator)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> SharedWork:
        """Exchange tensors, one with each rank."""
        line = self._line()
        for tensors in (outputs, inputs):
            if len(tensors) != self._size:
                raise TensorMismatchError(f"all_to_all needs {self._size} tensors, one per rank; got {len(tensors)}.")
        return self._begin("all_to_all", lambda: self._calls.all_to_all(outputs, inputs, line), outputs, opts)

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> SharedWork:
        """Exchange the rows of one tensor."""
        line = self._line()
        taken = split_bytes(output, output_splits, self._size)
        sent = split_bytes(tensor, input_splits, self._size)
        call = self._calls.all_to_all_single
        return self._begin("all_to_all_single", lambda: call(output, tensor, taken, sent, line), [output], opts)

    def barrier(self, opts: Any = None) -> SharedWork:
        """Wait until all ranks have arrived."""
        line = self._line()
        return self._begin("barrier", lambda: self._calls.barrier(line), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have arrived, or name those that have not.

        Raises:
            SharedMemoryTimeoutError: ranks did not arrive within `timeout`.
        """
        self._raise_if_forked()
        line, work = self._line(), SharedWork([])
        seconds = timeout.total_seconds() if timeout is not None else self._rounds.timeout_s
        self._order.put(lambda: self._calls.monitored_barrier(seconds, line), work)
        work.wait()

    # torch's names for them since 2.13.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    all_to_all_single = alltoall_base
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


def listed(tensors: Any) -> list[Tensor]:
    """Return one or several tensors as a list."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _scaled(tensor: Tensor, factor: Any) -> Tensor:
    """Return the tensor times a factor, as a new one; without a factor, the tensor."""
    if factor is None:
        return tensor
    with torch.no_grad():
        scaled: Tensor = (tensor * factor).to(tensor.dtype)
    return scaled


def _store(result: Tensor, tensor: Tensor) -> None:
    if result is not tensor:
        with torch.no_grad():
            tensor.copy_(result)


def _root(opts: Any) -> int:
    return int(getattr(opts, "rootRank", 0))


class SharedMemoryGroup(CollectiveOperations):
    """A process group over shared memory.

    Args:
        store: The rendezvous store.
        rank: This process's rank in the group.
        size: Number of ranks in the group.
        timeout: Timeout of each operation.
        name: torch's name of the group.
        members: Global ranks of the group, for messages; default: the group ranks.
        key: Prefix in the store.
        give_up: Called every 50 ms during a wait; raises to abort it.
        line: Returns the line of user code that makes the call; 0: unknown.
        place: Names the call that this rank makes, for an operation and its line; None: by the operation and its line.
        runs_in_wait: Whether a call that the caller waits for runs inside `wait` of its handle, so that a wrapper of
            the group can watch it, instead of before the handle exists.
        max_bytes: Maximum size of the memory; 0: the usual size.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        members: Sequence[int] = (),
        key: str = "memory",
        give_up: Callable[[], None] | None = None,
        line: Callable[[], int] = lambda: 0,
        place: Callable[[str, int], str] | None = None,
        runs_in_wait: bool = False,
        max_bytes: int = 0,
    ) -> None:
        super().__init__(rank, size, name, backend=BACKEND)
        seconds = timeout.total_seconds()
        self._progress = form(
            store,
            rank=rank,
            members=list(members) or list(range(size)),
            key=key,
            timeout_s=seconds,
            give_up=give_up,
            max_bytes=max_bytes,
        )
        self._line = line
        self._pid = os.getpid()
        self._runs_in_wait = runs_in_wait
        self._rounds = Rounds(self._progress, seconds, place)
        self._calls = Calls(self._rounds)
        self._order = Order(f"axon_nb-{name}", self._leave, self._progress.has_left)
        self._messages = Messages(self._progress, f"axon_nb-{name}-messages", seconds, self._leave)
        self._batch: list[SharedWork] | None = None

    def _raise_if_forked(self) -> None:
        if os.getpid() != self._pid:
            raise CommError(
                "This process was forked from a rank, and only the rank can communicate in its groups: "
                "return the data to the rank, or start processes with their own group, as torchrun does."
            )

    def _leave(self, error: BaseException) -> None:
        if not isinstance(error, GroupLeftError) or not self._progress.left:
            self._progress.leave(str(error) or type(error).__name__)

    def send(self, tensors: Any, peer: int, tag: int = 0) -> SharedWork:
        """Send a tensor."""
        if is_profiling():
            return record("send", lambda: self._send(tensors, peer, tag))
        return self._send(tensors, peer, tag)

    def _send(self, tensors: Any, peer: int, tag: int) -> SharedWork:
        (tensor,) = listed(tensors)
        staged = stage(tensor)
        line, work = self._line(), self._message([tensor, staged])
        try:
            code = dtype_code(tensor.dtype)
            self._messages.send(work, staged.address, staged.size, dtype=code, peer=peer, tag=tag, line=line)
            return self._left_to_helper(work)
        except BaseException as error:
            self._messages.fail(error)
            raise

    def recv(self, tensors: Any, source: int, tag: int = 0) -> SharedWork:
        """Receive a tensor from a rank."""
        if is_profiling():
            operator = "recv_any_source_" if source == ANY else ""
            return record("recv", lambda: self._recv(tensors, source, tag), operator)
        return self._recv(tensors, source, tag)

    def _recv(self, tensors: Any, source: int, tag: int) -> SharedWork:
        (tensor,) = listed(tensors)
        staged = stage(tensor, reads=False)
        work = self._message([tensor, staged])
        store = None if staged.address == tensor.data_ptr() else staged.store
        try:
            code = dtype_code(tensor.dtype)
            self._messages.receive(Receive(work, staged.address, staged.size, code, source, tag, store))
            return self._left_to_helper(work)
        except BaseException as error:
            self._messages.fail(error)
            raise

    def recv_anysource(self, tensors: Any, tag: int = 0) -> SharedWork:
        """Receive a tensor from any rank; the handle's `source_rank` identifies the sender."""
        return self.recv(tensors, ANY, tag)

    def _message(self, keep: list[Any]) -> SharedWork:
        self._raise_if_forked()
        self._progress.raise_if_left()
        work = SharedWork(keep[:1])
        work.run_in_wait(functools.partial(self._messages.drive, work))
        work.keep = keep
        return self._noted(work)

    def _left_to_helper(self, work: SharedWork) -> SharedWork:
        if not work.is_completed() and not calls.is_waited_for():
            self._messages.attend()
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> SharedWork:
        works, self._batch = self._batch or [], None
        return JoinedWork(works)

    def abort(self) -> None:
        """Abort all waits in this group, on all its ranks; callable from any thread."""
        if os.getpid() != self._pid:
            return  # a forked child must not end its parent's group
        self._progress.leave("it was aborted")
        self._messages.fail(GroupLeftError("the group was aborted"))

    def shutdown(self) -> None:
        """Leave the group and stop its threads. Peers that wait for this rank are notified."""
        if os.getpid() != self._pid:
            return
        self._progress.leave("", closed=True)
        self._order.close()
        self._messages.close()
        # These refer to this group: without the reference cycle, its memory is freed at once.
        self._order.leave = self._messages.leave = _ignore

    @property
    def progress(self) -> Progress:
        """The control pages of the group, which show what each rank is doing."""
        return self._progress

    def describe(self) -> list[str]:
        """Describe the call that each rank is in, one line per rank."""
        return self._progress.describe()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations that start from now on."""
        self._rounds.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout
    supports_coalescing = supports_splitting = False

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._rounds.sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: sequence numbers are in the shared memory."""


def _ignore(error: BaseException) -> None:
    """The group is gone."""


def caller_line() -> int:
    """Return the line of user code that the current thread is in; 0: none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not library_of(file):
            return frame.f_lineno
        frame = frame.f_back
    return 0


def register(name: str = BACKEND) -> None:
    """Register the backend for `dist.init_process_group` and `dist.new_group`."""
    if name in dist.Backend.backend_list:  # torch refuses a second time
        return

    def create(options: Any, _: Any) -> SharedMemoryGroup:
        return SharedMemoryGroup(
            options.store,
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout or timedelta(minutes=30),
            name=options.group_id,
            members=list(options.global_ranks_in_group),
            line=caller_line,
        )

    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    torch_api().register_group_class(name)
