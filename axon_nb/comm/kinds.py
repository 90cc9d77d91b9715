"""Backends and reduce operations, by name."""

from __future__ import annotations

import enum

import torch
import torch.distributed as dist

from axon_nb.comm.errors import CommError

__all__ = ["Backend", "ReduceOp", "as_backend", "as_op", "choose_backend"]


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

    torch_op: dist.ReduceOp.RedOpType
    """Torch's operation; an average is a sum that is divided afterwards."""

    __hash__ = object.__hash__  # that of enumerations is Python, and it is in the way of every call


ReduceOp.SUM.torch_op = ReduceOp.AVERAGE.torch_op = dist.ReduceOp.SUM
ReduceOp.PRODUCT.torch_op = dist.ReduceOp.PRODUCT
ReduceOp.MIN.torch_op = dist.ReduceOp.MIN
ReduceOp.MAX.torch_op = dist.ReduceOp.MAX

_OF_TORCH: dict[object, ReduceOp] = {op.torch_op: op for op in ReduceOp if op is not ReduceOp.AVERAGE}
_OF_TORCH[dist.ReduceOp.AVG] = ReduceOp.AVERAGE
_OTHER_NAMES = {"avg": "average", "mean": "average", "prod": "product"}


def as_op(given: object) -> ReduceOp:
    """Ours, for one of ours, of torch's, or a name.

    Raises:
        CommError: it is none of them.
    """
    if type(given) is ReduceOp:
        return given
    name = given.lower() if isinstance(given, str) else ""
    for known, op in _OF_TORCH.items():
        if given == known or _OTHER_NAMES.get(name, name) == op.value:
            return op
    raise CommError(f"op={given!r}: it is one of {', '.join(f'ReduceOp.{op.name}' for op in ReduceOp)}.")


def as_backend(given: Backend | str) -> Backend:
    """The backend of that name.

    Raises:
        CommError: there is none.
    """
    try:
        return Backend(str(given).lower())
    except ValueError:
        raise CommError(f"backend={given!r}: it is one of {', '.join(map(repr, map(str, Backend)))}.") from None


def choose_backend(local_ranks: int) -> Backend:
    """NCCL when each of the ranks on this host can have a GPU of its own, else Gloo."""
    there = torch.cuda.is_available() and dist.is_nccl_available() and torch.cuda.device_count() >= local_ranks
    return Backend.NCCL if there else Backend.GLOO
