"""The collectives of c10d on tensors: on the calling thread if it waits anyway, otherwise on the helper thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.errors import TensorMismatchError
from axon_nb.comm.shared_memory.collectives.arithmetic import arithmetic
from axon_nb.comm.shared_memory.collectives.calls import Calls
from axon_nb.comm.shared_memory.collectives.rounds import Rounds
from axon_nb.comm.shared_memory.collectives.staging import check_sizes, check_whole, split_bytes
from axon_nb.comm.shared_memory.order import Order
from axon_nb.comm.shared_memory.profiling import count, is_profiling, record
from axon_nb.comm.shared_memory.segment.announcement import reduce_number
from axon_nb.comm.shared_memory.work import SharedWork, done_work
from axon_nb.comm.torch_group import PythonProcessGroup

_num_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_num_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 0)
Tensor = torch.Tensor
Job = Callable[[], None]


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
        (tensor,), parts, line = inputs, outputs[0], self._line()
        check_sizes("all_gather", parts, tensor.nbytes, self._size)
        return self._begin("all_gather", lambda: self._calls.all_gather(parts, tensor, line), parts, opts)

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
        line = self._line()
        check_whole("all_gather", output, tensor, self._size)
        call = self._calls.all_gather_single
        return self._begin("all_gather_single", lambda: call(output, tensor, line), [output], opts)

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
        line = self._line()
        items = []
        for output, tensor in zip(outputs, inputs, strict=True):
            check_whole("reduce_scatter", tensor, output, self._size)
            items.append((output, tensor, *self._sums(output, opts)))

        def job() -> None:
            for output, tensor, number, sums, factor in items:
                self._calls.reduce_scatter_single(output, _scaled(tensor, factor), number, sums, line)

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
