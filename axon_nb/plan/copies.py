"""Several calculations at once: in copies of this process, which has loaded and made all that they need."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Generic, NoReturn, TypeVar, cast

from axon_nb.host.parentage import set_parent_death_signal

__all__ = ["together"]

T = TypeVar("T")
_MOST = 4
"""Copies at once, as each has memory of its own."""
_inside = [False]
"""Whether this process is among those of a `together` that runs: within, calculations come one after the other."""


def together(calls: Sequence[Callable[[], T]], *, tell: Callable[[int], None] | None = None) -> list[T]:
    """What each function returns, in order; as many at a time as there are cores for this process.

    Each runs in a forked copy, whose changes to anything are lost. None runs here, not even a single one: after a
    backward in this process, builds of torch with CUDA refuse one in any copy made later (pytorch wiki, "Autograd and
    Fork").

    Args:
        calls: Their results can be pickled. No threads of this process are needed by them.
        tell: Told here how many are done.

    Raises:
        Exception: what one of them has raised.
    """
    free = min(_cores(), _MOST)
    if free < 2 or _inside[0] or not hasattr(os, "fork"):
        return [_told(call(), number, tell) for number, call in enumerate(calls)]
    _inside[0] = len(calls) > 1  # a single one may use the cores itself
    try:
        found: list[T] = []
        for first in range(0, len(calls), free):
            for result in _at_once(calls[first : first + free]):
                found.append(_told(result, len(found), tell))
        return found
    finally:
        _inside[0] = False


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _told(result: T, number: int, tell: Callable[[int], None] | None) -> T:
    if tell is not None:
        tell(number + 1)
    return result


def _at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    with contextlib.ExitStack() as stack:
        copies = [stack.enter_context(_Copy(call)) for call in calls]
        return [copy.result() for copy in copies]


class _Copy(Generic[T]):
    """A forked process that calculates one thing.

    Args:
        call: What it calls.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._pipe, theirs = Pipe(duplex=False)
        self._number = os.fork()
        if not self._number:
            set_parent_death_signal(signal.SIGKILL)
            _answer(theirs, call)
        theirs.close()

    def result(self) -> T:
        """What the function has returned there; where that process has ended without an answer, it is called here."""
        try:
            kind, value = pickle.loads(self._pipe.recv_bytes())
        except EOFError:
            return self._call()
        if kind == "raised":
            raise value
        return cast("T", value)

    def __enter__(self) -> _Copy[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._number, signal.SIGKILL)  # it has answered, or nobody waits for its answer
        os.waitpid(self._number, 0)


def _answer(pipe: Connection, call: Callable[[], T]) -> NoReturn:
    code = 1
    try:
        try:
            answer = pickle.dumps(("value", call()))
        except Exception as error:
            answer = pickle.dumps(("raised", error))
        pipe.send_bytes(answer)
        code = 0
    finally:
        os._exit(code)
