"""How a forked rank begins (detached from the agent, with its environment) and ends.

It must not return into the agent's code, so it ends with `os._exit`, after what Python does when a process ends: exit
handlers run, and open files are written.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from axon_nb.host.children import set_parent_death_signal
from axon_nb.records.protocol.agent import Fork

_OOM_SCORE = "300"
EXIT_LIMIT_S = 5.0
"""How long the exit handlers of a rank may take, in seconds."""
_DESCRIPTORS = (0, 1, 2)
_BLOCKED_SIGNALS = {signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """Parameters of a new rank."""

    rank: int
    env: dict[str, str]
    """The complete environment, captured at `start`."""
    cwd: str
    path: list[str]
    """`sys.path`, captured at `start`."""
    argv: list[str]
    """The engine's arguments."""
    log: Path
    umask: int
    entry: str
    """Function that runs the engine, as `module:function`: takes `argv`, returns when the engine exits."""

    @classmethod
    def of(cls, command: Fork, entry: str) -> ForkRequest:
        """Create from a command; `entry` is the agent's own."""
        return cls(
            rank=command.rank,
            env=dict(command.env),
            cwd=command.cwd,
            path=list(command.path),
            argv=list(command.argv),
            log=Path(command.log),
            umask=command.umask,
            entry=entry,
        )


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals while forking: a child that ran the agent's handlers would terminate its siblings."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become_rank(request: ForkRequest, agent_pid: int, inherited: Iterable[Any]) -> NoReturn:
    """Run the engine in a freshly forked child; never returns."""
    code = 1
    try:
        _detach_from_agent(agent_pid, inherited)
        _redirect_stdio(request.log)
        exit_mark(request.log).unlink(missing_ok=True)
        _apply(request)
        module, _, function = request.entry.partition(":")
        getattr(importlib.import_module(module), function)(request.argv)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)  # the engine's own stream sends over a connection that is closed
    finally:
        _end_process(code, exit_mark(request.log))


def _detach_from_agent(agent_pid: int, inherited: Iterable[Any]) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED_SIGNALS)
    for resource in inherited:
        with contextlib.suppress(OSError):
            resource.close()
    os.setsid()
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != agent_pid:
        os._exit(1)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def _redirect_stdio(log: Path) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(null)
    os.close(out)


def _apply(request: ForkRequest) -> None:
    os.environ.clear()
    os.environ.update(request.env)
    os.umask(request.umask)
    os.chdir(request.cwd)
    sys.path[:] = request.path
    sys.argv = ["ipengine", *request.argv]
    importlib.invalidate_caches()
    random.seed()
    if "numpy" in sys.modules:
        # NumPy's global generator was seeded in the agent: without this all ranks would draw the same numbers.
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        # As in processes that torchrun starts, whose generators on CPUs have different seeds.
        sys.modules["torch"].default_generator.seed()


def exit_mark(log: Path) -> Path:
    """The file that exists once the rank with this log has begun to exit by itself."""
    return log.with_suffix(".exit")


def _end_process(code: int, mark: Path) -> NoReturn:
    """Run Python's exit handlers, write and close files, and exit with `code` within `EXIT_LIMIT_S` seconds.

    Args:
        code: The exit code.
        mark: A file to create first, so that the agent waits.
    """
    limit = threading.Timer(EXIT_LIMIT_S, os._exit, (code,))
    limit.daemon = True
    with contextlib.suppress(BaseException):
        mark.touch()
        limit.start()
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        _close_files()
    with contextlib.suppress(BaseException):
        _end_resource_tracker()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _close_files() -> None:
    """Close the files that are open for writing, those that write into others first."""
    files = [one for one in gc.get_objects() if isinstance(one, io.IOBase)]
    for file in sorted(files, key=_layer):
        with contextlib.suppress(Exception):
            if not file.closed and file.writable() and file.fileno() not in _DESCRIPTORS:
                file.close()


def _layer(file: io.IOBase) -> int:
    # Text goes into compressed files, and both into buffers.
    if isinstance(file, io.TextIOWrapper):
        return 0
    return 2 if isinstance(file, io.BufferedWriter | io.BufferedRandom) else 1


def _end_resource_tracker() -> None:
    """Close the pipe of multiprocessing's resource tracker, which then removes shared memory and semaphores."""
    module: Any = sys.modules.get("multiprocessing.resource_tracker")
    if module is not None:
        module._resource_tracker._stop()
