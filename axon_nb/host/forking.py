"""The first moments of a forked rank: leave the agent behind, become a process of its own, run the engine."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from axon_nb.host.parentage import end_with_parent

__all__ = ["ForkRequest", "become_rank", "signals_held"]

_OOM_SCORE = "300"


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """What a new rank is to be."""

    rank: int
    env: dict[str, str]
    """The whole environment, taken at `start`."""
    cwd: str
    path: list[str]
    """`sys.path`, taken at `start`."""
    argv: list[str]
    """Arguments of the engine."""
    log: Path
    umask: int
    entry: str
    """The function that runs the engine, `module:function`; it takes `argv` and returns at the engine's end."""

    @classmethod
    def from_json(cls, message: dict[str, Any]) -> ForkRequest:
        """Read from a `fork` command."""
        names = ("rank", "env", "cwd", "path", "argv", "umask", "entry")
        return cls(log=Path(message["log"]), **{name: message[name] for name in names})


_HELD = {signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM}


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold signals while forking: a child that got one with the agent's handlers would end its siblings."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become_rank(request: ForkRequest, agent_pid: int, inherited: Iterable[Any]) -> NoReturn:
    """Runs in the child right after the fork; never returns."""
    code = 1
    try:
        _leave_agent(agent_pid, inherited)
        _redirect(request.log)
        _take_over(request)
        module, _, function = request.entry.partition(":")
        getattr(importlib.import_module(module), function)(request.argv)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _leave_agent(agent_pid: int, inherited: Iterable[Any]) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
    for resource in inherited:
        with contextlib.suppress(OSError):
            resource.close()
    os.setsid()
    end_with_parent(signal.SIGKILL)
    if os.getppid() != agent_pid:
        os._exit(1)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def _redirect(log: Path) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(null)
    os.close(out)


def _take_over(request: ForkRequest) -> None:
    os.environ.clear()
    os.environ.update(request.env)
    os.umask(request.umask)
    os.chdir(request.cwd)
    sys.path[:] = request.path
    sys.argv = ["ipengine", *request.argv]
    importlib.invalidate_caches()
    random.seed()
    if "numpy" in sys.modules:
        # NumPy's global generator was seeded once, in the agent: unseeded ranks would all draw the same numbers.
        sys.modules["numpy"].random.seed()
