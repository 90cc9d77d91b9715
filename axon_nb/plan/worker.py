"""A calculation in a process of its own: with its progress, a way to call it off, and no way to take this one along."""

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
from typing import IO, Any

from axon_nb.plan.errors import PlanCancelledError, PlanError, SimulatorError

__all__ = ["run_in_process"]

_LOOK_S = 0.1
"""How often `cancel` is looked at, in seconds."""
_END_S = 60.0
"""How long a process that has closed its pipe is given to end, in seconds."""
_TAIL = 2000
"""Characters of its output that are shown when it died."""


def run_in_process(
    entry: str,
    task: bytes,
    *,
    progress: Callable[[float, str], None] | None = None,
    cancel: threading.Event | None = None,
) -> Any:
    """Call a function in a new process.

    Args:
        entry: ``module:function``; it is called with the unpickled task and with a function that reports progress.
        task: Its argument, pickled by cloudpickle.
        progress: Called here with the share done and what is done next.
        cancel: Ends the process when it is set.

    Returns:
        What the function returned.

    Raises:
        PlanError: the function has raised one, or another `UsageError`.
        SimulatorError: it has raised something else, or its process ended.
        PlanCancelledError: `cancel` was set.
    """
    ours, theirs = Pipe()
    with tempfile.TemporaryFile() as output, ours:
        with theirs:
            process = _started(theirs, output)
        try:
            _send(ours, pickle.dumps((entry, list(sys.path), task)))
            kind, value = _answer(ours, progress, cancel)
            if kind == "died":
                _wait(process)
        finally:
            process.kill()  # it has answered, or nobody waits for its answer
            process.wait()
        if kind == "died":
            raise SimulatorError(f"The simulator's process {_cause(process.returncode)}.{_tail(output)}")
    if kind == "refused":
        raise PlanError(value)
    if kind == "failed":
        raise SimulatorError(value)
    return value


def _started(theirs: Connection, output: IO[bytes]) -> subprocess.Popen[bytes]:
    number = theirs.fileno()
    path = os.pathsep.join(item or os.curdir for item in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", "axon_nb.plan.worker_main", str(number)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=(number,),
        # A GPU, where there is one, is left alone.
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,  # Ctrl-C reaches this process, which ends that one
    )


def _send(pipe: Connection, task: bytes) -> None:
    try:
        pipe.send_bytes(task)
    except (BrokenPipeError, ConnectionResetError):
        return  # it has ended: reading says so


def _answer(
    pipe: Connection, progress: Callable[[float, str], None] | None, cancel: threading.Event | None
) -> tuple[str, Any]:
    while True:
        if cancel is not None and cancel.is_set():
            raise PlanCancelledError("The plan was called off.")
        try:
            if not pipe.poll(_LOOK_S):
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
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return


def _cause(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"
    return f"ended by itself, with exit code {code}"


def _tail(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").splitlines()
    # Of what C++ says when it gives up, the addresses of its frames tell a reader nothing.
    text = "\n".join(line for line in lines if not line.startswith(("frame #", "<omitting python frames>"))).strip()
    return f" Its last words: {text[-_TAIL:]}" if text else ""
