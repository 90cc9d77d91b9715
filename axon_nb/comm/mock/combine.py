"""Combining the tensors of all ranks, always in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.errors import TensorError

__all__ = ["combined"]

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


def combined(tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """One tensor from those of all ranks.

    Raises:
        TensorError: an operation that mock worlds do not have.
    """
    kind = next((kind for kind in _PAIRWISE if op == kind), None)
    if kind is None:
        raise TensorError(f"{op}: mock worlds have {', '.join(kind.name for kind in _PAIRWISE)}.")
    total = tensors[0].detach().clone()
    for tensor in tensors[1:]:
        total = _PAIRWISE[kind](total, tensor.detach())
    return total / len(tensors) if kind is _OPS.AVG else total
