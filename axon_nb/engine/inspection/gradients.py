"""Reads gradients safely from threads other than the main thread.

During a backward pass C++ sets `.grad` without holding the GIL, so a thread that reads it may crash the process
(SIGSEGV, seen with torch 2.13 within seconds). Gradients are therefore read while no cell runs, or by the main thread
itself between two instructions, when none of its backward passes is running.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
import signal
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch

from axon_nb.engine.session import RankSession

T = TypeVar("T")

_MAX_CACHED = 64
_gradient = operator.attrgetter("grad")

# Part of Python's stable ABI: the main thread runs these calls between two instructions, as it does signal handlers.
_add_pending_call = ctypes.pythonapi.Py_AddPendingCall
_add_pending_call.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_INTERRUPT = ctypes.cast(ctypes.pythonapi.PyErr_SetInterruptEx, ctypes.c_void_p)


class GradientReader:
    """Reads gradients for other threads.

    Args:
        session: This rank.
    """

    def __init__(self, session: RankSession) -> None:
        self._session = session
        self._results: dict[Hashable, Any] = {}
        """Results that the main thread computed last, by key; the oldest are evicted first."""
        self._jobs: deque[Callable[[], None]] = deque()
        self._c_callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._run_pending_job)
        self._callback = ctypes.cast(self._c_callback, ctypes.c_void_p)

    def read(
        self,
        key: Hashable,
        parameters: Sequence[torch.Tensor],
        compute: Callable[[list[torch.Tensor | None]], T],
        *,
        default: T,
    ) -> T:
        """Compute a result from the gradients of these parameters; while a cell runs, return the previous result.

        Args:
            key: Identifies the request, so that repeated requests share a cached result.
            parameters: Any tensors.
            compute: Called with their gradients (None if there is none); must not keep references to them.
            default: Returned until the main thread has computed a result.
        """
        if threading.current_thread() is threading.main_thread():
            return compute([parameter.grad for parameter in parameters])
        session, gradients = self._session, map(_gradient, parameters)
        # No instruction between the check and the call can release the GIL, and the call runs entirely in C, so no cell
        # starts in between.
        if session.cell is None:
            return compute(list(gradients))
        if not self._jobs:
            self._jobs.append(lambda: self._store(key, compute([parameter.grad for parameter in parameters])))
            if _add_pending_call(self._callback, None) != 0:
                self._jobs.clear()  # the queue is full; the next request comes soon
        result: T = self._results.get(key, default)
        return result

    def _store(self, key: Hashable, result: Any) -> None:
        self._results.pop(key, None)
        self._results[key] = result
        while len(self._results) > _MAX_CACHED:
            del self._results[next(iter(self._results))]

    def _run_pending_job(self, _: Any) -> int:
        # Run only one job, so that frequent requests do not delay the user's code.
        with contextlib.suppress(Exception):  # an exception would surface in the user's code
            self._jobs[0]()
        self._jobs.clear()
        return 0

    def defers_interrupt(self, frame: FrameType | None) -> bool:
        """Whether an interrupt landed on `frame` while gradients were being read; if so, it is raised again afterwards.

        An exception raised there would be swallowed by the C caller.
        """
        while frame is not None:
            if frame.f_code is GradientReader._run_pending_job.__code__:
                return bool(_add_pending_call(_INTERRUPT, signal.SIGINT) == 0)
            frame = frame.f_back
        return False
