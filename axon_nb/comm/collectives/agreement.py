"""Optional check before each collective that all ranks make the same call. Opt-in, as it costs one round trip."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import torch
import torch.distributed as dist

from axon_nb.comm.errors import CollectiveMismatchError, TensorMismatchError
from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.types import Backend, ReduceOp
from axon_nb.records.environment import CHECK

_DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)
_NAMES = (
    "all_reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "all_to_all",
    "gather_tensor",
    "scatter_tensor",
    "barrier",
)
_MAX_DIMS = 8
_FROM_START = CHECK.is_enabled()
# A context variable: the ranks of a mock world are threads, and each has its own setting.
_enabled = contextvars.ContextVar("axon_nb_check", default=_FROM_START)
is_checking = _enabled.get
"""Whether checks are on in this thread."""


@contextlib.contextmanager
def checking(on: bool = True) -> Iterator[None]:
    """Check inside this context, before each collective, that all ranks make the same call with matching tensors.

    Costs one small all_gather per call. Set `AXON_NB_CHECK=1` in the environment to turn it on everywhere.
    """
    token = _enabled.set(on)
    try:
        yield
    finally:
        _enabled.reset(token)


def check_agreement(
    group: ProcessGroup, name: str, tensor: torch.Tensor, *, op: ReduceOp | None = None, root: int = -1
) -> None:
    """Compare name, operation, root, dtype and shape with all ranks of the group, if checks are on.

    Raises:
        CollectiveMismatchError: a rank makes a different call.
        TensorMismatchError: a rank passes a different dtype or shape.
    """
    if not is_checking():
        return
    device = tensor.device if group.backend is Backend.NCCL else torch.device("cpu")
    local = torch.tensor(_signature(name, op, root, tensor), dtype=torch.int64, device=device)
    everyone = [torch.empty_like(local) for _ in group.ranks]
    dist.all_gather(everyone, local, group=group.torch_group)
    rows = [row.tolist() for row in everyone]
    for rank, row in enumerate(rows):
        if row[:3] != rows[0][:3]:
            raise CollectiveMismatchError(
                f"Collective mismatch: rank {group.ranks[0]} called {_call(rows[0])}, rank {group.ranks[rank]} called "
                f"{_call(row)} on the same group; all ranks must make the same calls in the same order."
            )
        if row != rows[0]:
            raise TensorMismatchError(
                f"{name}: rank {group.ranks[0]} passed {_tensor(rows[0])}, rank {group.ranks[rank]} passed "
                f"{_tensor(row)}; dtype and shape must match on all ranks."
            )


def _signature(name: str, op: ReduceOp | None, root: int, tensor: torch.Tensor) -> list[int]:
    shape = list(tensor.shape)[:_MAX_DIMS]
    call = [_NAMES.index(name), -1 if op is None else list(ReduceOp).index(op), root]
    return [*call, _DTYPES.index(tensor.dtype), tensor.ndim, *shape, *[-1] * (_MAX_DIMS - len(shape))]


def _call(row: list[int]) -> str:
    details = [list(ReduceOp)[row[1]].value] if row[1] >= 0 else []
    details += [f"from or to rank {row[2]}"] if row[2] >= 0 else []
    return _NAMES[row[0]] + (f" ({', '.join(details)})" if details else "")


def _tensor(row: list[int]) -> str:
    return f"{_DTYPES[row[3]]} of shape {tuple(row[5 : 5 + row[4]])}"
