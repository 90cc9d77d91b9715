"""Backends and reduce operations, by name."""

from __future__ import annotations

import enum

import torch
import torch.distributed as dist

__all__ = ["Backend", "ReduceOp", "choose_backend"]


class Backend(enum.StrEnum):
    """What carries the messages."""

    GLOO = "gloo"
    """Processes, on CPUs; takes CUDA tensors too, over the host's memory."""
    NCCL = "nccl"
    """Processes with a GPU each."""
    MOCK = "mock"
    """All ranks in this process, in turns; deterministic."""


class ReduceOp(enum.Enum):
    """How values of several ranks become one."""

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AVERAGE = "average"
    """The mean over ranks; refused for integers, which cannot hold it."""

    @property
    def torch_op(self) -> dist.ReduceOp.RedOpType:
        """Torch's operation; an average is a sum that is divided afterwards."""
        return _TORCH_OPS[self]


_TORCH_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.AVERAGE: dist.ReduceOp.SUM,
}


def choose_backend(local_ranks: int) -> Backend:
    """NCCL when each of the ranks on this host can have a GPU of its own, else Gloo."""
    there = torch.cuda.is_available() and dist.is_nccl_available() and torch.cuda.device_count() >= local_ranks
    return Backend.NCCL if there else Backend.GLOO
