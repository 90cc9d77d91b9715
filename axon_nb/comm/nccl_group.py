"""torch's group API over one communicator of NCCL, by the functions of `torch.cuda.nccl`.

They enqueue on the device's current stream, so what is computed afterwards waits by itself; `wait` has nothing to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from axon_nb.comm.errors import NcclError

__all__ = ["NcclGroup", "register"]

_numbers = itertools.count()
# ncclRedOp_t, in nccl.h
_NCCL_OPS = (
    (dist.ReduceOp.SUM, 0),
    (dist.ReduceOp.PRODUCT, 1),
    (dist.ReduceOp.MAX, 2),
    (dist.ReduceOp.MIN, 3),
)
_Base: Any = dist.ProcessGroup
Tensors = Sequence[torch.Tensor]


class _Enqueued(Work):
    """Work that the device's stream carries out in its turn."""

    def __init__(self, device: torch.device, output: Any) -> None:
        super().__init__()
        self._output = output
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Nothing: the stream keeps the order."""
        return True

    def is_completed(self) -> bool:
        """Whether the device has carried it out."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Wait for the device."""
        self._event.synchronize()

    def result(self) -> Any:
        """The output tensors."""
        return self._output


class NcclGroup(_Base):
    """One rank's end of a world that was made by hand.

    Args:
        communicator: NCCL's, from `torch.cuda.nccl.init_rank`.
        rank: This rank.
        size: Number of ranks.
        device: Its GPU.
    """

    def __init__(self, communicator: Any, rank: int, size: int, device: torch.device) -> None:
        super().__init__(rank, size)
        self._communicator = communicator
        self._own_rank = rank
        self._size = size
        self._device = device
        self._name = f"axon_nccl_{next(_numbers)}"

    def _begin(self, call: Any, output: Any) -> Work:
        try:
            with torch.cuda.device(self._device):
                call([self._communicator])
                return _Enqueued(self._device, output)
        except RuntimeError as error:
            raise NcclError(f"NCCL: {error}.") from None

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Combine."""
        op = _nccl_op(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        own = [tensors[0]]
        return self._begin(lambda comms: torch.cuda.nccl.all_reduce(own, own, op, None, comms), own)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        """One rank's tensor for all."""
        own, root = [tensors[0]], opts.rootRank
        return self._begin(lambda comms: torch.cuda.nccl.broadcast(own, root, None, comms), own)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Everyone's tensors for everyone."""
        return self._begin(lambda comms: torch.cuda.nccl.all_gather([tensor], [output], None, comms), [output])

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Combine, and one part for each."""
        op = _nccl_op(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        return self._begin(lambda comms: torch.cuda.nccl.reduce_scatter([tensor], [output], op, None, comms), [output])

    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts: Any = None) -> Work:
        """Wait for everyone, on the device."""
        return self.allreduce([torch.zeros(1, device=self._device)])

    def getBackendName(self) -> str:
        """Not the name of a C++ class, which DDP's logger would look for."""
        return "axon_nccl"

    def name(self) -> str:
        """What torch prints."""
        return "axon_nccl"

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def rank(self) -> int:
        """This rank."""
        return self._own_rank

    getSize = size
    getRank = rank

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._name


def register(group: Any) -> None:
    """Tell torch's functions what they look up for any group."""
    world: Any = dist.distributed_c10d._world
    world.pg_map[group] = (group.getBackendName(), None)
    world.pg_names[group] = group.group_name
    world.pg_group_ranks[group] = {member: member for member in range(group.size())}
    world.pg_backend_config[group] = f"cuda:{group.getBackendName()}"


def _nccl_op(op: Any) -> int:
    found = next((number for known, number in _NCCL_OPS if op == known), None)
    if found is None:
        names = ", ".join(str(known).rpartition(".")[2] for known, _ in _NCCL_OPS)
        raise NcclError(f"{op}: NCCL worlds made by hand have {names}.")
    return found
