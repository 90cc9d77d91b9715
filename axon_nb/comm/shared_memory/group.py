"""The process group that torch sees: every operation of c10d on CPU tensors, over memory that the ranks share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from axon_nb.comm.errors import TensorError, TensorMismatchError
from axon_nb.comm.shared_memory import calls
from axon_nb.comm.shared_memory.announcement import reduce_number
from axon_nb.comm.shared_memory.arithmetic import arithmetic
from axon_nb.comm.shared_memory.calls import Calls
from axon_nb.comm.shared_memory.forming import form
from axon_nb.comm.shared_memory.messages import ANY, Messages
from axon_nb.comm.shared_memory.order import Order
from axon_nb.comm.shared_memory.progress import GroupLeftError
from axon_nb.comm.shared_memory.rounds import Rounds
from axon_nb.comm.shared_memory.staging import stage
from axon_nb.comm.shared_memory.work import JoinedWork, SharedWork, done_work
from axon_nb.comm.torch_group import PythonProcessGroup

__all__ = ["BACKEND", "SharedMemoryGroup"]

BACKEND = "shm"
"""What `dist.init_process_group` and `dist.new_group` call it."""

_num_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
Tensor = torch.Tensor
Job = Callable[[], None]


class SharedMemoryGroup(PythonProcessGroup):
    """See the module.

    Args:
        store: Where the ranks of the group meet.
        rank: This process's rank in the group.
        size: Number of ranks in the group.
        timeout: Limit of each operation.
        name: torch's name of the group.
        members: Global ranks of the group, for messages; by default those of the group.
        key: Where in the store they meet.
        give_up: Called every 50 ms of a wait; raises when the wait is to end.
        line: Gives the line of the user's code that calls; 0: not known.
        runs_in_wait: Whether a call that its caller waits for is made in `wait` of its handle, where a wrapper of the
            group looks on, rather than before there is one.
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
        runs_in_wait: bool = False,
    ) -> None:
        super().__init__(rank, size, name, backend=BACKEND)
        seconds = timeout.total_seconds()
        self._progress = form(
            store,
            rank=rank,
            members=list(members) or list(range(size)),
            key=key,
            limit_s=seconds,
            give_up=give_up,
        )
        self._line = line
        self._runs_in_wait = runs_in_wait
        self._rounds = Rounds(self._progress, seconds)
        self._calls = Calls(self._rounds)
        self._order = Order(f"axon_nb-{name}", self._leave, lambda: bool(self._progress.left))
        self._messages = Messages(self._progress, f"axon_nb-{name}-messages", seconds, self._leave)
        self._batch: list[SharedWork] | None = None

    def _leave(self, error: BaseException) -> None:
        if not isinstance(error, GroupLeftError) or not self._progress.left:
            self._progress.leave(str(error) or type(error).__name__)

    def _begin(self, job: Job, outputs: list[Tensor], opts: Any) -> SharedWork:
        """Run an operation: here when its caller waits for it and nothing is before it, else in the helper thread."""
        waits = opts is not None and not getattr(opts, "asyncOp", True)
        # A mode that looks on, such as one that counts calls, is not to see how an operation is made.
        if waits and self._batch is None and not _num_modes():
            if self._runs_in_wait:
                work = SharedWork(outputs)
                work.run_in_wait(functools.partial(self._order.run_or_put, job, work))
                return work
            if self._order.run_now(job):
                return done_work()
        work = SharedWork(outputs)
        self._order.put(job, work)
        return self._noted(work)

    def _noted(self, work: SharedWork) -> SharedWork:
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _sums(self, tensor: Tensor, opts: Any) -> tuple[int, Any]:
        number, factor = reduce_number(dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts))
        return number, arithmetic(tensor.dtype, number, factor, self._size)

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> SharedWork:
        """Reduce tensors in place."""
        tensors = _listed(tensors)
        line, call = self._line(), self._calls.all_reduce
        if len(tensors) == 1:
            tensor = tensors[0]
            number, sums = self._sums(tensor, opts)
            return self._begin(lambda: call(tensor, number, sums, line), tensors, opts)
        number_of = [(tensor, *self._sums(tensor, opts)) for tensor in tensors]

        def job() -> None:
            for tensor, number, sums in number_of:
                call(tensor, number, sums, line)

        return self._begin(job, tensors, opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> SharedWork:
        """Copy the root's tensors to all."""
        tensors, line, root = _listed(tensors), self._line(), _root(opts)

        def job() -> None:
            for tensor in tensors:
                self._calls.broadcast(tensor, root, line)

        return self._begin(job, tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> SharedWork:
        """Reduce tensors into the root's."""
        (tensor,), line, root = _listed(tensors), self._line(), _root(opts)
        number, sums = self._sums(tensor, opts)
        return self._begin(lambda: self._calls.reduce(tensor, number, sums, root, line), [tensor], opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SharedWork:
        """Copy each rank's tensor to all; `outputs[0][rank]` takes that of a rank."""
        (tensor,), parts, line = inputs, outputs[0], self._line()
        _check_sizes("all_gather", parts, tensor.nbytes, self._size)
        return self._begin(lambda: self._calls.all_gather(parts, tensor, line), parts, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SharedWork:
        """The same for several tensors; `outputs[rank][number]`."""
        line = self._line()

        def job() -> None:
            for number, tensor in enumerate(inputs):
                self._calls.all_gather([row[number] for row in outputs], tensor, line)

        return self._begin(job, [tensor for row in outputs for tensor in row], opts)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> SharedWork:
        """Copy each rank's tensor to all, into one tensor."""
        line = self._line()
        _check_whole("all_gather", output, tensor, self._size)
        return self._begin(lambda: self._calls.all_gather_single(output, tensor, line), [output], opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SharedWork:
        """The same for several tensors."""
        line = self._line()
        for output, tensor in zip(outputs, inputs, strict=True):
            _check_whole("all_gather", output, tensor, self._size)

        def job() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._calls.all_gather_single(output, tensor, line)

        return self._begin(job, outputs, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SharedWork:
        """Copy each rank's tensor to the root."""
        (tensor,), line, root = inputs, self._line(), _root(opts)
        parts = outputs[0] if outputs and root == self._own_rank else []
        if root == self._own_rank:
            _check_sizes("gather", parts, tensor.nbytes, self._size)
        return self._begin(lambda: self._calls.gather(parts, tensor, root, line), parts, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SharedWork:
        """Copy the root's tensors to a rank each."""
        (output,), line, root = outputs, self._line(), _root(opts)
        parts = inputs[0] if inputs and root == self._own_rank else []
        if root == self._own_rank:
            _check_sizes("scatter", parts, output.nbytes, self._size)
        return self._begin(lambda: self._calls.scatter(output, parts, root, line), outputs, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SharedWork:
        """Reduce tensors, one for each rank."""
        (output,), parts, line = outputs, inputs[0], self._line()
        _check_sizes("reduce_scatter", parts, output.nbytes, self._size)
        number, sums = self._sums(output, opts)
        return self._begin(lambda: self._calls.reduce_scatter(output, parts, number, sums, line), outputs, opts)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> SharedWork:
        """Reduce a tensor, and scatter it in equal parts."""
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SharedWork:
        """The same for several tensors."""
        line = self._line()
        items = []
        for output, tensor in zip(outputs, inputs, strict=True):
            _check_whole("reduce_scatter", tensor, output, self._size)
            items.append((output, tensor, *self._sums(output, opts)))

        def job() -> None:
            for output, tensor, number, sums in items:
                self._calls.reduce_scatter_single(output, tensor, number, sums, line)

        return self._begin(job, outputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> SharedWork:
        """Exchange tensors, one with each rank."""
        line = self._line()
        for tensors in (outputs, inputs):
            if len(tensors) != self._size:
                raise TensorMismatchError(f"all_to_all needs {self._size} tensors, one per rank; got {len(tensors)}.")
        return self._begin(lambda: self._calls.all_to_all(outputs, inputs, line), outputs, opts)

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> SharedWork:
        """Exchange the rows of one tensor."""
        line = self._line()
        taken = calls.split_bytes(output, output_splits, self._size)
        sent = calls.split_bytes(tensor, input_splits, self._size)
        return self._begin(lambda: self._calls.all_to_all_single(output, tensor, taken, sent, line), [output], opts)

    def barrier(self, opts: Any = None) -> SharedWork:
        """Wait until all ranks have come."""
        line = self._line()
        return self._begin(lambda: self._calls.barrier(line), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have come, and name those that do not.

        Raises:
            SharedMemoryTimeoutError: ranks did not come within `timeout`.
        """
        line, work = self._line(), SharedWork([])
        seconds = timeout.total_seconds() if timeout is not None else self._rounds.limit_s
        self._order.put(lambda: self._calls.monitored_barrier(seconds, line), work)
        work.wait()

    def send(self, tensors: Any, peer: int, tag: int = 0) -> SharedWork:
        """Send a tensor."""
        (tensor,) = _listed(tensors)
        staged = stage(tensor)
        work = self._message([tensor, staged])
        self._messages.send(work, staged.address, staged.size, peer=peer, tag=tag, line=self._line())
        return self._left_to_helper(work)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> SharedWork:
        """Receive a tensor from a rank."""
        (tensor,) = _listed(tensors)
        staged = stage(tensor, reads=False)
        work = self._message([tensor, staged])
        store = None if staged.address == tensor.data_ptr() else staged.store
        self._messages.receive(work, staged.address, staged.size, source=source, tag=tag, finish=store)
        return self._left_to_helper(work)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> SharedWork:
        """Receive a tensor from any rank; the handle's `source_rank` says which."""
        return self.recv(tensors, ANY, tag)

    def _message(self, keep: list[Any]) -> SharedWork:
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
        """From any thread: end all waits in this group, on all its ranks."""
        self._progress.leave("it was aborted")
        self._messages.fail(GroupLeftError("the group was aborted"))

    def shutdown(self) -> None:
        """This rank is done with the group: end its threads. Peers that wait for it learn that it is gone."""
        self._progress.leave("", closed=True)
        self._order.close()
        self._messages.close()

    def describe(self) -> list[str]:
        """What each rank of the group is in, a line for each."""
        return self._progress.describe()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of operations begun from now on."""
        self._rounds.limit_s = timeout.total_seconds()

    _set_default_timeout = set_timeout
    supports_coalescing = supports_splitting = False

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._rounds.sequence

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: the memory has it."""

    # Since 2.13 torch has these names for them.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    all_to_all_single = alltoall_base
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _root(opts: Any) -> int:
    return int(getattr(opts, "rootRank", 0))


def _check_sizes(name: str, parts: Sequence[Tensor], size: int, ranks: int) -> None:
    if len(parts) != ranks:
        raise TensorMismatchError(f"{name} needs {ranks} tensors, one per rank; got {len(parts)}.")
    for rank, part in enumerate(parts):
        if part.nbytes != size:
            raise TensorMismatchError(
                f"{name}: the tensor for rank {rank} has {part.nbytes:,} bytes; must be {size:,}."
            )


def _check_whole(name: str, whole: Tensor, part: Tensor, ranks: int) -> None:
    if whole.dtype is not part.dtype:
        raise TensorError(f"{name}: the tensors must have one dtype; got {whole.dtype} and {part.dtype}.")
    if whole.numel() != part.numel() * ranks:
        expected = f"{math.prod((part.numel(), ranks)):,}"
        raise TensorMismatchError(f"{name}: the large tensor must have {expected} elements; got {whole.numel():,}.")
