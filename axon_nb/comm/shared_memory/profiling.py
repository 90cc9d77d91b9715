"""Operations as tools of torch see those of Gloo: `torch.profiler`, and `CommDebugMode`, which counts them.

torch records the calls of backends in C++: the operator, such as ``c10d::allreduce_``, and in it ``gloo:all_reduce``.
This records those of the groups here, where the latter is ``shm:all_reduce``, on the thread that started them and until
they are done, wherever they run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import record_function
from torch.utils import _python_dispatch as python_dispatch

from axon_nb.comm.shared_memory.work import SharedWork

is_profiling: Callable[[], bool] = (
    getattr(torch.autograd, "_profiler_enabled", lambda: False)
    if hasattr(record_function, "_call_end_callbacks_on_future")
    else lambda: False
)
"""Whether a profiler records this thread."""


_modes: Callable[[], list[Any]] = getattr(python_dispatch, "_get_current_dispatch_mode_stack", list)
_OPERATORS = {
    "all_reduce": "allreduce_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "all_gather": "allgather_",
    "all_gather_single": "_allgather_base_",
    "gather": "gather_",
    "scatter": "scatter_",
    "reduce_scatter": "reduce_scatter_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "all_to_all": "alltoall_",
    "all_to_all_single": "alltoall_base_",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv_",
}
"""By operation, the operator of c10d that calls it on Gloo."""


def record(name: str, start: Callable[[], SharedWork], operator: str = "") -> SharedWork:
    """Start an operation, and record it from now until it is done.

    Args:
        name: The operation, such as ``all_reduce``.
        start: Starts it.
        operator: Its operator, if it is not the usual one of the operation.
    """
    with record_function(f"c10d::{operator or _OPERATORS[name]}"), record_function(f"shm:{name}") as event:
        work = start()
        if not work.is_completed():
            event._call_end_callbacks_on_future(work.get_future())
        return work


class _Operator:
    """Stands for an operator of c10d that a mode counts: calling it does nothing."""

    def __init__(self, name: str) -> None:
        self._overloadpacket = getattr(torch.ops.c10d, name, None)

    def __call__(self, *_: Any, **__: Any) -> None: ...

    def __str__(self) -> str:
        return f"{self._overloadpacket}.default"


def count(name: str, tensors: list[torch.Tensor], operator: str = "") -> None:
    """Have every active `CommDebugMode` count an operation; for the arguments see `record`."""
    debug = sys.modules.get("torch.distributed.tensor.debug")
    if debug is not None:
        for mode in _modes():
            if isinstance(mode, debug.CommDebugMode):
                mode.__torch_dispatch__(_Operator(operator or _OPERATORS[name]), (), (tensors,), {})
