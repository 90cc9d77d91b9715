"""Backends, reduce operations, and the handle that `async_op=True` returns."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.errors import InvalidArgumentError

_ALIASES = {"avg": "average", "mean": "average", "prod": "product"}


class Backend(enum.StrEnum):
    """The transport that carries messages between ranks."""

    GLOO = "gloo"
    """Processes on CPUs; accepts CUDA tensors too, copied through host memory."""
    NCCL = "nccl"
    """Processes with one GPU each."""
    MOCK = "mock"
    """All ranks in this process, one at a time; deterministic."""


class ReduceOp(enum.Enum):
    """How values from several ranks are combined."""

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AVERAGE = "average"
    """The mean over ranks; not defined for integers, which cannot represent it."""

    torch_op: dist.ReduceOp.RedOpType
    """torch's operation; an average is a sum that is divided afterwards."""

    __hash__ = object.__hash__  # the enum's own is written in Python and slows down every call


ReduceOp.SUM.torch_op = ReduceOp.AVERAGE.torch_op = dist.ReduceOp.SUM
ReduceOp.PRODUCT.torch_op = dist.ReduceOp.PRODUCT
ReduceOp.MIN.torch_op = dist.ReduceOp.MIN
ReduceOp.MAX.torch_op = dist.ReduceOp.MAX

_FROM_TORCH: dict[object, ReduceOp] = {op.torch_op: op for op in ReduceOp if op is not ReduceOp.AVERAGE}
_FROM_TORCH[dist.ReduceOp.AVG] = ReduceOp.AVERAGE


def as_op(value: object) -> ReduceOp:
    """Convert one of our operations, one of torch's, or a name.

    Raises:
        InvalidArgumentError: the operation is unknown.
    """
    if type(value) is ReduceOp:
        return value
    name = value.lower() if isinstance(value, str) else ""
    for known, op in _FROM_TORCH.items():
        if value == known or _ALIASES.get(name, name) == op.value:
            return op
    raise InvalidArgumentError(
        f"op must be one of {', '.join(f'ReduceOp.{op.name}' for op in ReduceOp)}; got {value!r}."
    )


def as_backend(backend: Backend | str) -> Backend:
    """Return the backend with this name.

    Raises:
        InvalidArgumentError: the backend is unknown.
    """
    try:
        return Backend(str(backend).lower())
    except ValueError:
        raise InvalidArgumentError(
            f"backend must be one of {', '.join(map(repr, map(str, Backend)))}; got {backend!r}."
        ) from None


def choose_backend(local_ranks: int) -> Backend:
    """Choose NCCL if each of the `local_ranks` on this host can have its own GPU, else Gloo."""
    has_gpus = torch.cuda.is_available() and dist.is_nccl_available() and torch.cuda.device_count() >= local_ranks
    return Backend.NCCL if has_gpus else Backend.GLOO


class Handle:
    """One communication in progress.

    Args:
        work: torch's handle; None if there is nothing to wait for.
        finish: Called once, when the communication has completed; returns the result.
    """

    def __init__(self, work: Any, finish: Callable[[], Any]) -> None:
        self._work = work
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """Wait for completion and return what the call returns without `async_op`. Later calls return the same."""
        if self._finish is not None:
            if self._work is not None:
                self._work.wait()
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._finish is None or self._work is None or bool(self._work.is_completed())

    is_completed = done
