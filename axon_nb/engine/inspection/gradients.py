"""Gradients for threads that look at a rank from outside its main thread.

While a backward runs, C++ sets `.grad` without Python's lock, and a thread that reads it then can take the process down
(SIGSEGV, seen with torch 2.13 within seconds). So gradients are read while no cell runs, or by the main thread itself
between two of its instructions, where none of its own backwards is under way.
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

from axon_nb.engine.session import current

__all__ = ["defers_interrupt", "read_gradients"]

T = TypeVar("T")

_MOST_KEPT = 64
_kept: dict[Hashable, Any] = {}
"""What the main thread made last, by key; the oldest go first."""
_jobs: deque[Callable[[], None]] = deque()
_gradient = operator.attrgetter("grad")


def read_gradients(
    key: Hashable, parameters: Sequence[torch.Tensor], make: Callable[[list[torch.Tensor | None]], T], *, before: T
) -> T:
    """What `make` gives for the gradients of these parameters; while a cell runs, what it gave a moment ago.

    Args:
        key: What is asked for: the same for the same question.
        parameters: Any tensors.
        make: From their gradients, None where there is none, to what is told of them; it must not keep them.
        before: The answer as long as the main thread has not come to it.
    """
    if threading.current_thread() is threading.main_thread():
        return make([parameter.grad for parameter in parameters])
    session, gradients = current(), map(_gradient, parameters)
    # No instruction between the question and the call can give Python's lock away, and the call is C throughout: no
    # cell begins meanwhile.
    if session.cell is None:
        return make(list(gradients))
    if not _jobs:
        _jobs.append(lambda: _keep(key, make([parameter.grad for parameter in parameters])))
        _wake()
    answer: T = _kept.get(key, before)
    return answer


def _keep(key: Hashable, made: Any) -> None:
    _kept.pop(key, None)
    _kept[key] = made
    while len(_kept) > _MOST_KEPT:
        del _kept[next(iter(_kept))]


def _run(_: Any) -> int:
    # One of them: who asks all the time is not to hold the user's code up.
    with contextlib.suppress(Exception):  # it would be raised in the middle of the user's code
        _jobs[0]()
    _jobs.clear()
    return 0


# Part of Python's stable C interface: the main thread calls these between two instructions, as it does signal handlers.
_add_call = ctypes.pythonapi.Py_AddPendingCall
_add_call.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_run_for_c = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_run)
_RUN = ctypes.cast(_run_for_c, ctypes.c_void_p)
_INTERRUPT = ctypes.cast(ctypes.pythonapi.PyErr_SetInterruptEx, ctypes.c_void_p)


def _wake() -> None:
    if _add_call(_RUN, None) != 0:
        _jobs.clear()  # its queue is full: the next question comes soon


def defers_interrupt(frame: FrameType | None) -> bool:
    """From the handler of an interrupt that has landed on `frame`: whether that is within a look at gradients.

    What is raised there ends in C, and nobody hears of it. The interrupt comes again as soon as the look is over.
    """
    while frame is not None:
        if frame.f_code is _run.__code__:
            return bool(_add_call(_INTERRUPT, signal.SIGINT) == 0)
        frame = frame.f_back
    return False
