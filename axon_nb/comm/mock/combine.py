"""Combine the tensors of all ranks, always in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.errors import TensorError

__all__ = ["combine"]

_OPS: Any = dist.ReduceOp.RedOpType
_PAIRWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    _OPS.SUM: torch.add,
    _OPS.AVG: torch.add,
    _OPS.PRODUCT: torch.mul,
    _OPS.MIN: torch.minimum,
    _OPS.MAX: torch.maximum,
    _OPS.BAND: torch.bitwise_and,
    _OPS.BOR: torch.bitwise_or,
    _OPS.BXOR: torch.bitwise_xor,
}


def combine(tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """Combine the tensors of all ranks into one.

    Raises:
        TensorError: mock worlds do not support the operation.
    """
    kind = next((kind for kind in _PAIRWISE if op == kind), None)
    if kind is None:
        raise TensorError(f"mock worlds support {', '.join(kind.name for kind in _PAIRWISE)}; got {op}.")
    total = tensors[0].detach().clone()
    for tensor in tensors[1:]:
        total = _PAIRWISE[kind](total, tensor.detach())
    return total / len(tensors) if kind is _OPS.AVG else total
