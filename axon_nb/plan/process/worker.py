"""Runs a function in a new process, with progress and cancellation; a crash there leaves this process alone.

On Linux the new process ends with this one, or with the thread that asked.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any, TypeVar

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
            kind, value = _answer(ours, progress, cancel)
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
        [sys.executable, "-m", "axon_nb.plan.process.worker_main", str(number), str(os.getpid())],
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


def _answer(pipe: Connection, progress: Report | None, cancel: threading.Event | None) -> tuple[str, Any]:
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
