"""Forks ranks: those that wait for it, the modules that are imported first, and how a forked rank begins and ends.

A rank begins detached from the agent, with its environment. It must not return into the agent's code, so it ends with
`os._exit`, after what Python does when a process ends: exit handlers run, and open files are written.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from axon_nb.host.children import Children, LastOutput, set_parent_death_signal
from axon_nb.host.shared_memory import KeptMemory
from axon_nb.records.protocol.agent import Fork, Forked, failure
from axon_nb.records.protocol.wire import encode

_REQUIRED = (
    "torch",
    "torch.distributed",
    "ipykernel.ipkernel",
    "ipykernel.displayhook",
    "ipyparallel.engine.app",
    "ipyparallel.engine.kernel",
    # What a rank imports when it starts its engine and joins: here the ranks share it.
    "tornado.platform.asyncio",
    "tornado.queues",
    "sqlite3",
    "IPython.core.completerlib",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "axon_nb.comm.shared_memory.group",
    "axon_nb.engine.bootstrap",
)
# Imported while the agent is idle. The first optimizer alone makes a rank import torch._dynamo, which takes
# longer than everything else together, and four ranks would do it at once.
_OPTIONAL = (
    "IPython.core.completer",
    "psutil",
    "numpy.random",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.data",
)  # not matplotlib's inline backend: it shows figures only in a shell that exists when it is imported
MODULES = (*_REQUIRED, *_OPTIONAL)
"""What an agent imports for its ranks."""
_OOM_SCORE = "300"
EXIT_LIMIT_S = 5.0
"""How long the exit handlers of a rank may take, in seconds."""
_DESCRIPTORS = (0, 1, 2)
_BLOCKED_SIGNALS = {signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM}


class ForkQueue:
    """Forks ranks, as soon as the modules that they need are imported.

    Args:
        entry: What ranks run, as `module:function`; empty: this agent forks none.
        children: Gets the new processes.
        last_output: Notes where their output begins.
        inherited: Returns what a new process closes.
        imports_later: Whether nothing is imported before a rank is to be forked.
    """

    def __init__(
        self,
        entry: str,
        children: Children,
        last_output: LastOutput,
        inherited: Callable[[], Iterable[Any]],
        *,
        imports_later: bool,
    ) -> None:
        self._entry = entry
        self._children = children
        self._last_output = last_output
        self._inherited = inherited
        self._required = list(_REQUIRED) if entry else []
        self._optional = list(_OPTIONAL) if entry else []
        self._imports_later = imports_later
        self._kept_memory = KeptMemory()
        self._waiting: list[tuple[Fork, Callable[[Mapping[str, Any]], None]]] = []

    @property
    def ready(self) -> bool:
        """Whether ranks can be forked."""
        return not self._required

    @property
    def idle(self) -> bool:
        """Whether everything is imported, including the optional modules."""
        return not self._required and not self._optional

    def put(self, command: Fork, reply: Callable[[Mapping[str, Any]], None]) -> None:
        """Fork a rank when that is possible, then call `reply` with the fields of the answer."""
        self._waiting.append((command, reply))

    def step(self, *, busy: bool) -> bool:
        """Import the next module, or fork the ranks that wait; return whether there is nothing left to import now.

        Args:
            busy: Whether there are ranks: what they may never need is not imported, since nothing is handled meanwhile.
        """
        if self._imports_later and not self._waiting:
            return True
        self._imports_later = False
        idle = not self._import_next(busy=busy or bool(self._waiting))
        if self.ready and self._waiting:
            waiting, self._waiting = self._waiting, []
            if (bootstrap := sys.modules.get(_REQUIRED[-1])) is not None:  # absent if its import failed
                bootstrap.before_forks()
            gc.freeze()
            for command, reply in waiting:
                reply(self._fork(command))
        return idle

    def _import_next(self, *, busy: bool) -> bool:
        """Import the next module, optional ones only while not `busy`; return whether there was one to import.

        A failing import is left to the rank, which reports it where it uses the module.
        """
        if self._required:
            name = self._required.pop(0)
        elif self._optional and not busy:
            name = self._optional.pop(0)
        else:
            return False
        gc.disable()  # nearly all of what an import makes stays; to look it through takes a fifth of the time
        try:
            module = importlib.import_module(name)
            if name == _REQUIRED[-1]:
                module.prepare()
        except Exception:
            traceback.print_exc()
        finally:
            gc.enable()
        if name == _REQUIRED[-1]:
            gc.collect()
        return True

    def _fork(self, command: Fork) -> Mapping[str, Any]:
        rank, log, agent_pid = command.rank, Path(command.log), os.getpid()
        try:
            self._last_output.rank_starting(rank, log)
            self._kept_memory.prepare(rank)
            with signals_blocked():
                pid = os.fork()
                if pid == 0:
                    inherited = [*self._inherited(), *self._kept_memory.of_others(rank)]
                    become_rank(command, self._entry, agent_pid, inherited)
        except OSError as error:
            return failure(f"{type(error).__name__}: {error}")
        self._children.add_rank(rank, pid, exit_mark(log))
        return dict(encode(Forked(pid)))


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals while forking: a child that ran the agent's handlers would terminate its siblings."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become_rank(command: Fork, entry: str, agent_pid: int, inherited: Iterable[Any]) -> NoReturn:
    """Run the engine in a freshly forked child; never returns.

    Args:
        command: Its environment and arguments.
        entry: Function that runs the engine, as `module:function`: takes `argv`, returns when the engine exits.
        agent_pid: The process that forked this one.
        inherited: What to close.
    """
    code, mark = 1, exit_mark(Path(command.log))
    try:
        _detach_from_agent(agent_pid, inherited)
        _redirect_stdio(command.log)
        mark.unlink(missing_ok=True)
        _apply(command)
        module, _, function = entry.partition(":")
        getattr(importlib.import_module(module), function)(list(command.argv))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)  # the engine's own stream sends over a connection that is closed
    finally:
        _end_process(code, mark)


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


def _redirect_stdio(log: str) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(null)
    os.close(out)


def _apply(command: Fork) -> None:
    os.environ.clear()
    os.environ.update(command.env)
    os.umask(command.umask)
    os.chdir(command.cwd)
    sys.path[:] = command.path
    sys.argv = ["ipengine", *command.argv]
    # Not that of package metadata: it sees changes by itself, and to clear it takes each rank 1 MiB.
    for finder in sys.path_importer_cache.values():
        getattr(finder, "invalidate_caches", int)()
    random.seed()
    if "numpy.random" in sys.modules:
        # NumPy's global generator was seeded in the agent: without this all ranks would draw the same numbers.
        sys.modules["numpy.random"].seed()
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
