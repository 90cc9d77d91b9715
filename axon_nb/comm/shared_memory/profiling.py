"""Operations in the traces of `torch.profiler`: ``shm:all_reduce``, as Gloo's appear as ``gloo:all_reduce``.

torch records the calls of backends in C++. This records those of the groups here, on the thread that started them and
until they are done, wherever they run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import record_function

from axon_nb.comm.shared_memory.work import SharedWork

__all__ = ["is_profiling", "record"]

is_profiling: Callable[[], bool] = (
    getattr(torch.autograd, "_profiler_enabled", lambda: False)
    if hasattr(record_function, "_call_end_callbacks_on_future")
    else lambda: False
)
"""Whether a profiler records this thread."""


def record(name: str, start: Callable[[], SharedWork]) -> SharedWork:
    """Start an operation, and record it from now until it is done.

    Args:
        name: The operation, such as ``all_reduce``.
        start: Starts it.
    """
    with record_function(f"shm:{name}") as event:
        work = start()
        if not work.is_completed():
            event._call_end_callbacks_on_future(work.get_future())
        return work
