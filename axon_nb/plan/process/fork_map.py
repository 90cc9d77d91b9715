"""Runs functions in parallel in forked copies of this process, which has already imported and built what they need."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Generic, NoReturn, TypeVar, cast

from axon_nb.host.children import set_parent_death_signal

T = TypeVar("T")
_MAX_FORKS = 4
"""Processes at once, because each has memory of its own."""
_is_nested: ContextVar[bool] = ContextVar("is_nested", default=False)
"""Whether a `fork_map` is running; nested calls run one after the other."""
_ran_here = [False]
"""Whether a function ran in this process because its forks died. From then on, torch may refuse a backward in forks."""


def fork_map(calls: Sequence[Callable[[], T]], *, progress: Callable[[int], None] | None = None) -> list[T]:
    """Call functions in forked processes, one per core at a time, and return their results in order.

    Changes that a function makes are lost. Even a single one is forked: after a backward in this process, CUDA builds
    of torch refuse a backward in any later fork (pytorch wiki, "Autograd and Fork"). If a fork dies without a result, a
    second one runs the function; if that dies, too, this and all later functions run in this process.

    Args:
        calls: Their results must be picklable; they must not need other threads of this process.
        progress: Called here with the number of results so far.

    Raises:
        Exception: what one of them raised.
    """
    free = min(_cores(), _MAX_FORKS)
    if free < 2 or _is_nested.get() or _ran_here[0] or not hasattr(os, "fork"):
        return [_reported(call(), number, progress) for number, call in enumerate(calls)]
    token = _is_nested.set(len(calls) > 1)  # a single function may use the cores itself
    try:
        results: list[T] = []
        for first in range(0, len(calls), free):
            for result in _at_once(calls[first : first + free]):
                results.append(_reported(result, len(results), progress))
        return results
    finally:
        _is_nested.reset(token)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _reported(result: T, number: int, progress: Callable[[int], None] | None) -> T:
    if progress is not None:
        progress(number + 1)
    return result


def _at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    with contextlib.ExitStack() as stack:
        forks = [stack.enter_context(_Fork(call)) for call in calls]
        results: list[T | _Died] = [fork.result() for fork in forks]
    return [
        _retried(call) if isinstance(result, _Died) else result for call, result in zip(calls, results, strict=True)
    ]


def _retried(call: Callable[[], T]) -> T:
    with _Fork(call) as fork:
        result = fork.result()
    if not isinstance(result, _Died):
        return result
    _ran_here[0] = True
    return call()


class _Died:
    """In place of a result: the process died without one."""


class _Fork(Generic[T]):
    """A forked process that calls one function.

    Args:
        call: The function.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._pipe, theirs = Pipe(duplex=False)
        parent = os.getpid()
        self._number = os.fork()
        if not self._number:
            set_parent_death_signal(signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)  # it died before that
            _answer(theirs, call)
        theirs.close()

    def result(self) -> T | _Died:
        """Wait for the function's result, or for the process to die without one."""
        try:
            kind, value = pickle.loads(self._pipe.recv_bytes())
        except EOFError:
            return _Died()
        if kind == "raised":
            raise value
        return cast("T", value)

    def __enter__(self) -> _Fork[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._number, signal.SIGKILL)  # it has answered, or its answer is no longer wanted
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
