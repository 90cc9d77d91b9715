"""The abort flag of this rank (while it is set, waits end and no communication starts), and threads for waits in C++.

The helper threads are reused, and abandoned if they get stuck.

Private hook into torch: the wrapper that every optimizer's `step` runs in, to find out whether a stack contains a step.
Without it none is found, so an interrupt may leave a step half done.
"""

from __future__ import annotations

import functools
import queue
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

__all__ = [
    "ABORT",
    "AbortedError",
    "BrokenGroupError",
    "connect_in_helper",
    "disable_groups",
    "raise_at_cut",
    "raise_if_aborted",
    "register_step_code",
    "run_in_helper",
    "step_depth",
    "step_wrapper_problems",
    "stop_at",
    "stop_requested",
]

_other_steps: dict[int, CodeType] = {}
"""Keyed by identity: hashing a code object hashes all of it, and every frame on the stack is looked up."""


@functools.cache
def _wrapper_code() -> CodeType | None:
    from torch.optim import Optimizer

    hook = getattr(Optimizer, "profile_hook_step", None)
    # All wrappers share one code object.
    return getattr(hook(lambda self: None), "__code__", None) if hook is not None else None


def step_wrapper_problems() -> list[str]:
    """Return what is missing if the wrapper of `step` has no code object; else nothing."""
    return [] if _wrapper_code() is not None else ["torch.optim.Optimizer.profile_hook_step(step).__code__"]


def register_step_code(code: CodeType) -> None:
    """Treat code that runs under `code` as an optimizer step, for optimizers that do not derive from torch's."""
    _other_steps[id(code)] = code


def step_depth(frame: FrameType | None) -> int:
    """Count the steps on this stack: 2 in an optimizer that steps another, such as ZeroRedundancyOptimizer."""
    depth, step = 0, _wrapper_code()
    while frame is not None:
        depth += frame.f_code is step or id(frame.f_code) in _other_steps
        frame = frame.f_back
    return depth


ABORT = threading.Event()
"""Set by the control thread, cleared when the groups are rebuilt."""

_broken: list[str] = []
_stop_at: list[tuple[str, int]] = []


class AbortedError(RuntimeError):
    """The cell was aborted while this rank was in a communication call, or before it started one."""


class BrokenGroupError(AbortedError):
    """Communication is not possible until a rank is replaced."""


def disable_groups(reason: str) -> None:
    """Refuse communication, because the groups cannot be rebuilt; cells still run. An empty reason allows it again."""
    _broken[:] = [reason] if reason else []
    ABORT.clear()


def stop_at(sequence: int | None, *, group: str = "") -> None:
    """Stop before the collective after number `sequence` of `group` (empty: of all groups); None cancels the stop."""
    _stop_at[:] = [] if sequence is None else [(group, sequence)]


def stop_requested() -> bool:
    """Whether the cell is to stop before one of the next collectives."""
    return bool(_stop_at)


def raise_at_cut(sequence: int, total: int, *, group: str, name: str) -> None:
    """Raise if the cell is to stop before this collective; an optimizer step in progress finishes first.

    Args:
        sequence: Number of the collective in `group`, in this cell.
        total: Its number among the collectives of all groups.
        group: Name of its group.
        name: The operation.

    Raises:
        KeyboardInterrupt: the cell stops here; every rank raises it before the same collective.
    """
    if not _stop_at or _stop_at[0][0] not in ("", group):
        return
    number = sequence if _stop_at[0][0] else total
    if number > _stop_at[0][1] and not step_depth(sys._getframe(1)):
        raise KeyboardInterrupt(f"stopped before {name}, like all ranks")


def raise_if_aborted(where: str = "") -> None:
    """Raise if communication must not start.

    Raises:
        AbortedError: the cell is being aborted, or the groups are disabled.
    """
    if ABORT.is_set():
        raise AbortedError(f"aborted{' before ' + where if where else ''}")
    if _broken:
        raise BrokenGroupError(f"{where or 'communication'} failed: {_broken[0]}.")


_POLL_S = 0.02

_idle: list[queue.SimpleQueue[Callable[[], None]]] = []


def run_in_helper(work: Callable[[], None]) -> None:
    """Run `work` in a daemon thread, which is reused when it is done."""
    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(jobs,), name="axon_nb-wait", daemon=True).start()
    jobs.put(work)


def _serve(jobs: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()
        _idle.append(jobs)


def connect_in_helper(
    build: Callable[[], Any],
    *,
    raise_if_cancelled: Callable[[], None],
    timeout_s: float,
    dispose: Callable[[Any], None],
) -> Any:
    """Return what `build` returns, called in a thread that is abandoned if the wait ends first.

    Args:
        build: Connects in C++, where nothing can interrupt it.
        raise_if_cancelled: Called every 20 ms; raises to end the wait.
        timeout_s: Seconds to wait.
        dispose: Disposes of a backend that arrives too late.

    Raises:
        RuntimeError: connecting timed out or failed.
    """
    box: list[Any] = []
    lock, done, abandoned = threading.Lock(), threading.Event(), threading.Event()

    def work() -> None:
        try:
            result = build()
        except BaseException as error:
            result = error
        with lock:
            box.append(result)
            late = abandoned.is_set()
            done.set()
        if late and not isinstance(result, BaseException):
            dispose(result)

    run_in_helper(work)
    end = time.monotonic() + timeout_s
    try:
        while not done.wait(_POLL_S):
            raise_if_cancelled()
            if time.monotonic() > end:
                raise RuntimeError(f"connecting timed out after {timeout_s:g} s")
    except BaseException:
        with lock:
            abandoned.set()
            if box and not isinstance(box[0], BaseException):
                run_in_helper(lambda: dispose(box[0]))
        raise
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]
