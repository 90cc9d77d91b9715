"""torch's process group API over one NCCL communicator, using the functions of `torch.cuda.nccl`.

They enqueue on the device's current stream, so later computation is ordered after them and `wait` does nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from axon_nb.comm.errors import NcclError
from axon_nb.comm.nccl.messages import Message, Messages

# ncclRedOp_t, in nccl.h
_NCCL_OPS = (
    (dist.ReduceOp.SUM, 0),
    (dist.ReduceOp.PRODUCT, 1),
    (dist.ReduceOp.MAX, 2),
    (dist.ReduceOp.MIN, 3),
)
_Base: Any = dist.ProcessGroup
Tensors = Sequence[torch.Tensor]


class _EnqueuedWork(Work):
    """Work enqueued on the device's stream."""

    def __init__(self, device: torch.device, output: Any) -> None:
        super().__init__()
        self._output = output
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Do nothing: the stream keeps the order."""
        return True

    def is_completed(self) -> bool:
        """Whether the device has finished it."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Block until the device has finished it."""
        self._event.synchronize()

    def result(self) -> Any:
        """Return the output tensors."""
        return self._output


class _AwaitedWork(Work):
    """Work that another thread enqueues on the stream that was current here."""

    def __init__(self, enqueued: Future[Work]) -> None:
        super().__init__()
        self._enqueued = enqueued

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is enqueued; from then on the stream keeps the order."""
        return bool(self._enqueued.result(None if not timeout else timeout.total_seconds()).wait())

    def is_completed(self) -> bool:
        """Whether the device has finished it."""
        return self._enqueued.done() and bool(self._enqueued.result().is_completed())

    def synchronize(self) -> None:
        """Block until the device has finished it."""
        self._enqueued.result().synchronize()

    def result(self) -> Any:
        """Return the output tensors."""
        return self._enqueued.result().result()


class NcclGroup(_Base):
    """One rank of a hand-made NCCL world.

    Args:
        communicator: NCCL's, from `join_world`.
        rank: This rank.
        size: Number of ranks.
        device: Its GPU.
        threaded: Whether other ranks are in this process. NCCL connects in the first operation and waits there for the
            others, so each rank then enqueues in a thread of its own.
    """

    def __init__(
        self, communicator: Any, rank: int, size: int, device: torch.device, *, threaded: bool = False
    ) -> None:
        super().__init__(rank, size)
        self._thread = ThreadPoolExecutor(1, f"axon_nb-nccl-{rank}") if threaded else None
        self._communicator = communicator
        self._messages: Messages | None = None
        self._own_rank = rank
        self._size = size
        self._device = device
        self._name = f"axon_nccl_{uuid.uuid4().hex}"

    def _enqueue(self, call: Any, output: Any) -> Work:
        if self._communicator is None:
            raise NcclError("this NCCL world is closed; create another one.")
        if self._thread is None:
            return self._enqueue_now(call, output)
        stream = torch.cuda.current_stream(self._device)  # a setting per thread

        def work() -> Work:
            with torch.cuda.stream(stream):
                return self._enqueue_now(call, output)

        return _AwaitedWork(self._thread.submit(work))

    def _enqueue_now(self, call: Any, output: Any) -> Work:
        try:
            with torch.cuda.device(self._device):
                call([self._communicator])
                return _EnqueuedWork(self._device, output)
        except RuntimeError as error:
            raise NcclError(f"NCCL: {error}.") from None

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce over ranks, in place."""
        op = _nccl_op(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        buffers = [tensors[0]]
        return self._enqueue(lambda comms: torch.cuda.nccl.all_reduce(buffers, buffers, op, None, comms), buffers)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        """Copy one rank's tensor to all ranks."""
        buffers, root = [tensors[0]], opts.rootRank
        return self._enqueue(lambda comms: torch.cuda.nccl.broadcast(buffers, root, None, comms), buffers)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Gather all ranks' tensors on every rank."""
        return self._enqueue(lambda comms: torch.cuda.nccl.all_gather([tensor], [output], None, comms), [output])

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Reduce over ranks and give each rank one part."""
        op = _nccl_op(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        return self._enqueue(
            lambda comms: torch.cuda.nccl.reduce_scatter([tensor], [output], op, None, comms), [output]
        )

    _reduce_scatter_base = reduce_scatter_single

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message], output: Any) -> Work:
        sends = [(tensor.contiguous(), peer) for tensor, peer in sends]
        if not all(tensor.is_contiguous() for tensor, _ in receives):
            raise NcclError("hand-made NCCL worlds receive into contiguous tensors only; pass `tensor.contiguous()`.")

        def call(comms: list[Any]) -> None:
            if self._messages is None:
                self._messages = self._messages_of(comms[0])
            self._messages.exchange(sends, receives, self._stream())

        return self._enqueue(call, output)

    _messages_of = staticmethod(Messages.of)

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        """Send a tensor; NCCL has no tags: messages to a rank arrive in their order."""
        return self._exchange([(tensors[0], peer)], [], tensors)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank."""
        return self._exchange([], [(tensors[0], source)], tensors)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        """Gather all ranks' tensors on one."""
        is_root = opts.rootRank == self._own_rank
        receives = [(tensor, rank) for rank, tensor in enumerate(outputs[0])] if is_root else []
        return self._exchange([(inputs[0], opts.rootRank)], receives, outputs)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        """Give each rank one of the tensors that one rank has."""
        is_root = opts.rootRank == self._own_rank
        sends = [(tensor, rank) for rank, tensor in enumerate(inputs[0])] if is_root else []
        return self._exchange(sends, [(outputs[0], opts.rootRank)], outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Send one tensor to each rank, and receive one from each."""
        sends, receives = ([(tensor, rank) for rank, tensor in enumerate(each)] for each in (inputs, outputs))
        return self._exchange(sends, receives, outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Like `alltoall`, with one tensor that is split along dim 0; without sizes, evenly."""
        outputs, inputs = (
            whole.split(list(sizes) or len(whole) // self._size)
            for whole, sizes in ((output, output_sizes), (tensor, input_sizes))
        )
        return self.alltoall(outputs, inputs, opts)

    alltoall_base = all_to_all_single

    def close(self) -> None:
        """Destroy the communicator once the device has finished; later calls raise `NcclError`. On all ranks."""
        if self._communicator is None:
            return
        if self._thread is not None:
            self._thread.shutdown()
        self._synchronize()
        (self._messages or self._messages_of(self._communicator)).leave()
        self._communicator = self._messages = None
        world: Any = dist.distributed_c10d._world
        for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
            table.pop(self, None)

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def barrier(self, opts: Any = None) -> Work:
        """Wait for all ranks, on the device."""
        return self.allreduce([torch.zeros(1, device=self._device)])

    def getBackendName(self) -> str:
        """Return a name that is not that of a C++ class, which DDP's logger would look for."""
        return "axon_nccl"

    def name(self) -> str:
        """Return the name that torch prints."""
        return "axon_nccl"

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def rank(self) -> int:
        """Return this rank."""
        return self._own_rank

    getSize = size
    getRank = rank

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._name


def register(group: Any) -> None:
    """Register `group` in the tables that torch's functions use to look up groups."""
    world: Any = dist.distributed_c10d._world
    world.pg_map[group] = (group.getBackendName(), None)
    world.pg_names[group] = group.group_name
    world.pg_group_ranks[group] = {member: member for member in range(group.size())}
    world.pg_backend_config[group] = f"cuda:{group.getBackendName()}"


def _nccl_op(op: Any) -> int:
    code = next((number for known, number in _NCCL_OPS if op == known), None)
    if code is None:
        names = ", ".join(str(known).rpartition(".")[2] for known, _ in _NCCL_OPS)
        raise NcclError(f"hand-made NCCL worlds support {names}; got {op}.")
    return code
