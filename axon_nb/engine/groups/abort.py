"""The abort flag of this rank: while it is set no wait lasts and no communication begins.

Helper threads for waits that only C++ can do; reused, and left behind when stuck.

Whether an optimizer's step is on a stack. Private hook into torch: the wrapper that every `step` runs in.

Where it is missing no step is ever found: an interrupt may then tear one.
"""

from __future__ import annotations

import functools
import queue
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType

__all__ = [
    "ABORT",
    "Aborted",
    "GroupBroken",
    "count_as_step",
    "is_to_stop",
    "raise_at_cut",
    "raise_if_aborted",
    "run_in_helper",
    "stand_down",
    "step_depth",
    "step_wrapper_problems",
    "stop_at",
]

_other_steps: dict[int, CodeType] = {}
"""By identity: to hash code is to hash all of it, for every frame that is looked at."""


@functools.cache
def _wrapper_code() -> CodeType | None:
    from torch.optim import Optimizer

    hook = getattr(Optimizer, "profile_hook_step", None)
    # All wrappers share one code object.
    return getattr(hook(lambda self: None), "__code__", None) if hook is not None else None


def step_wrapper_problems() -> list[str]:
    """Names what is missing if the wrapper of `step` has no code object; else nothing."""
    return [] if _wrapper_code() is not None else ["torch.optim.Optimizer.profile_hook_step(step).__code__"]


def count_as_step(code: CodeType) -> None:
    """What runs under this code is a step, too: of an optimizer that is none of torch's."""
    _other_steps[id(code)] = code


def step_depth(frame: FrameType | None) -> int:
    """How many steps are on this stack: 2 in an optimizer that steps another, such as ZeroRedundancyOptimizer."""
    depth, step = 0, _wrapper_code()
    while frame is not None:
        depth += frame.f_code is step or id(frame.f_code) in _other_steps
        frame = frame.f_back
    return depth


ABORT = threading.Event()
"""Set by the control thread, cleared when the groups are formed anew."""

_broken: list[str] = []
_stop_at: list[tuple[str, int]] = []


class Aborted(RuntimeError):
    """The cell was ended while this rank was in, or came to, a communication call."""


class GroupBroken(Aborted):
    """Communication is not possible, and will not be before a rank is replaced."""


def stand_down(reason: str) -> None:
    """The groups cannot be formed anew: cells may run, communication is refused with `reason`; empty: it is not."""
    _broken[:] = [reason] if reason else []
    ABORT.clear()


def stop_at(sequence: int | None, *, group: str = "") -> None:
    """Stop before the collective after number `sequence` of `group` (empty: of all together); None: do not stop."""
    _stop_at[:] = [] if sequence is None else [(group, sequence)]


def is_to_stop() -> bool:
    """Whether a collective is to be found before which the cell stops."""
    return bool(_stop_at)


def raise_at_cut(sequence: int, total: int, *, group: str, name: str) -> None:
    """Raise before a collective when the cell is to stop there; a step of an optimizer is made to its end first.

    Args:
        sequence: The collective's number in `group`, in this cell.
        total: Its number among those of all groups.
        group: Its group.
        name: What it is.

    Raises:
        KeyboardInterrupt: it is; every rank gets it before the same collective.
    """
    if not _stop_at or _stop_at[0][0] not in ("", group):
        return
    number = sequence if _stop_at[0][0] else total
    if number > _stop_at[0][1] and not step_depth(sys._getframe(1)):
        raise KeyboardInterrupt(f"stopped before {name}, as all ranks")


def raise_if_aborted(where: str = "") -> None:
    """Raise when communication may not begin.

    Raises:
        Aborted: the cell is being ended, or the groups are broken.
    """
    if ABORT.is_set():
        raise Aborted(f"aborted{' before ' + where if where else ''}")
    if _broken:
        raise GroupBroken(f"{where or 'communication'} is not possible: {_broken[0]}.")


_idle: list[queue.SimpleQueue[Callable[[], None]]] = []


def run_in_helper(work: Callable[[], None]) -> None:
    """Run `work` in a daemon thread; the thread waits for more when it is done."""
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
