"""Predictions in a process of their own, with progress and cancellation; a crash there leaves this process alone.

The worker process runs this module as its main: it reads a task from its pipe, runs functions in parallel in forks of
itself, which has already imported and built what they need, and answers. On Linux it ends with the process or the
thread that asked, also when that is killed, and its memory is bounded.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any, Generic, NoReturn, TypeVar

from axon_nb.host.children import set_parent_death_signal
from axon_nb.plan.errors import PlanCancelledError, PlanError, SimulatorError

R = TypeVar("R")
Report = Callable[[float, str], None]
"""Called with the fraction done and the next step."""
_POLL_S = 0.1
"""Seconds between checks of `cancel`."""
_EXIT_TIMEOUT_S = 60.0
"""Seconds that a process may take to exit after closing its pipe."""
_OUTPUT_CHARS = 2000
"""Characters of a dead process's output to show."""
T = TypeVar("T")
_MAX_FORKS = 4
"""Processes at once, because each has memory of its own."""
_is_nested: ContextVar[bool] = ContextVar("is_nested", default=False)
"""Whether a `fork_map` is running; nested calls run one after the other."""
_ran_here = [False]
"""Whether a function ran in this process because its forks died. From then on, torch may refuse a backward in forks."""


def run_in_process(
    function: Callable[[Any, Report], R],
    task: bytes,
    *,
    progress: Report | None = None,
    cancel: threading.Event | None = None,
) -> R:
    """Call a function in a new process.

    Args:
        function: A function of a module that the new process can import; called with the unpickled task and a function
            that reports progress.
        task: Its argument, pickled by cloudpickle.
        progress: Called here with the progress.
        cancel: Set it to kill the process.

    Returns:
        What the function returned.

    Raises:
        PlanError: the function raised one, or another `UsageError`.
        SimulatorError: it raised something else, or its process died.
        PlanCancelledError: `cancel` was set.
    """
    ours, theirs = Pipe()
    with tempfile.TemporaryFile() as output, ours:
        with theirs:
            process = _started(theirs, output)
        try:
            _send(ours, pickle.dumps((list(sys.path), pickle.dumps(function), task)))
            kind, value = _awaited_answer(ours, progress, cancel)
            if kind == "died":
                _wait(process)
        finally:
            process.kill()  # it has answered, or its answer is no longer wanted
            process.wait()
        if kind == "died":
            raise SimulatorError(f"The simulator process {_cause(process.returncode)}.{_tail(output)}")
    if kind == "refused":
        raise PlanError(value)
    if kind == "failed":
        raise SimulatorError(value)
    result: R = value
    return result


def _started(theirs: Connection, output: IO[bytes]) -> subprocess.Popen[bytes]:
    number = theirs.fileno()
    path = os.pathsep.join(item or os.curdir for item in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", "axon_nb.plan.worker_main", str(number), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=(number,),
        # The process must not touch a GPU.
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,  # Ctrl-C goes to this process, which kills that one
    )


def _send(pipe: Connection, task: bytes) -> None:
    try:
        pipe.send_bytes(task)
    except (BrokenPipeError, ConnectionResetError):
        return  # it has died: reading will report that


def _awaited_answer(pipe: Connection, progress: Report | None, cancel: threading.Event | None) -> tuple[str, Any]:
    while True:
        if cancel is not None and cancel.is_set():
            raise PlanCancelledError("Planning was cancelled.")
        try:
            if not pipe.poll(_POLL_S):
                continue
            kind, value = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return "died", None
        if kind != "progress":
            return kind, value
        if progress is not None:
            progress(*value)


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return


def _cause(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", as Linux does when memory runs out" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return f"exited with code {code}"


def _tail(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").splitlines()
    # Drop the C++ stack frames, whose addresses say nothing to a reader.
    text = "\n".join(line for line in lines if not line.startswith(("frame #", "<omitting python frames>"))).strip()
    return f" Its last output: {text[-_OUTPUT_CHARS:]}" if text else ""


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
        results = [fork.results() for fork in forks]
    return [found[0] if found else _retried(call) for call, found in zip(calls, results, strict=True)]


def _retried(call: Callable[[], T]) -> T:
    with _Fork(call) as fork:
        found = fork.results()
    if found:
        return found[0]
    _ran_here[0] = True
    return call()


class _Fork(Generic[T]):
    """A forked process that calls one function."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._pipe, theirs = Pipe(duplex=False)
        parent = os.getpid()
        self._number = os.fork()
        if not self._number:
            set_parent_death_signal(signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)  # it died before that
            _answer_from_fork(theirs, call)
        theirs.close()

    def results(self) -> list[T]:
        """Wait for the function's result, or for the process to die without one: then there is none."""
        try:
            kind, value = pickle.loads(self._pipe.recv_bytes())
        except EOFError:
            return []
        if kind == "raised":
            raise value
        return [value]

    def __enter__(self) -> _Fork[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._number, signal.SIGKILL)  # it has answered, or its answer is no longer wanted
        os.waitpid(self._number, 0)


def _answer_from_fork(pipe: Connection, call: Callable[[], T]) -> NoReturn:
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
