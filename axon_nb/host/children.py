"""Child processes of the agent: the controller, the ranks, and what ranks left behind; and why one died.

Nothing else is ever signalled.

Parent death signal: Linux signals the children of a killed agent, so that none is left behind. Processes that a cell
started in a session of their own become the agent's children when their parent exits, and end with the cluster.

Why a process died is read from its last output, in files and the controller's log, and Linux's out-of-memory counters.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct, field

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None
"""Opened here: a process just forked from one with threads must not take the loader's lock."""
_MAX_BYTES = 32768
_MAX_LINE = 300
_RECENT_S = 2.0
"""Output older than this when a rank dies is unrelated to the death."""
_STDERR, _CRASH = ".err", ".crash"
"""File suffixes: what C code wrote to file descriptor 2, and faulthandler's report of a crash."""
_MOUNTS = Path("/proc/self/mountinfo")
_GROUPS = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/vmstat")
OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def _prctl(option: int, value: int) -> None:
    if _libc is not None:
        _libc.prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has exited (Linux only; elsewhere a no-op)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def run_controller() -> None:
    """Run the ipyparallel controller in this process; the one that it forks for heartbeats dies with it."""
    parent = os.getpid()

    def follow() -> None:
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    os.register_at_fork(after_in_child=follow)
    # By default a controller with CURVE has no key to sign with; the store and the links of other hosts derive theirs
    # from it. Here, because other users can read a process's command line.
    sys.argv.append(f"--Session.key={uuid.uuid4()}")
    runpy.run_module("ipyparallel.controller", run_name="__main__", alter_sys=True)


def child_pids(parent: int) -> list[int]:
    """Return the pids of the children of a process that have not exited (Linux only; elsewhere none)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):  # it has just exited
            state, ppid, _ = _state(path)
            if int(ppid) == parent and state not in (b"Z", b"X"):
                found.append(int(path.parent.name))
    return found


def signal_started(number: int) -> None:
    """Send a signal to all other processes in this process's group: the children that it has started (Linux only)."""
    own = os.getpgrp()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):  # it has just exited, or belongs to another user
            pid = int(path.parent.name)
            if _state(path)[2] == str(own).encode() and pid != os.getpid():
                os.kill(pid, number)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP (Linux only; elsewhere False)."""
    with contextlib.suppress(OSError, ValueError):  # it has just exited
        return _state(Path(f"/proc/{pid}/stat"))[0] in (b"T", b"t")
    return False


def _state(stat: Path) -> list[bytes]:
    """State, parent and process group."""
    # pid (command) state ppid pgrp …: the command may contain anything
    return stat.read_bytes().rpartition(b")")[2].split()[:3]


def set_parent_death_signal(number: int) -> None:
    """Request the signal `number` for this process when its parent dies (Linux only; elsewhere a no-op)."""
    _prctl(_PR_SET_PDEATHSIG, int(number))


class Wakeup:
    """Signals of this process as a file that becomes readable.

    Args:
        stop: Called with SIGTERM.
        at_terminal: Whether Ctrl-C and a closed terminal stop it as well; otherwise they are ignored.
    """

    def __init__(self, stop: Callable[[], None], *, at_terminal: bool) -> None:
        self.sockets = socket.socketpair()
        for one in self.sockets:
            one.setblocking(False)
        signal.set_wakeup_fd(self.sockets[1].fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: stop())
        for number in (signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as after nohup
                signal.signal(number, (lambda *_: stop()) if at_terminal else signal.SIG_IGN)

    def fileno(self) -> int:
        """Return what a selector waits for."""
        return self.sockets[0].fileno()

    def clear(self) -> None:
        """Forget the signals that arrived."""
        with contextlib.suppress(BlockingIOError):
            self.sockets[0].recv(4096)


class Death(Struct, frozen=True):
    """Exit of one child process."""

    pid: int
    rank: int | None
    """None for the controller."""
    code: int
    """Exit code, or minus the signal number."""


class Children(Struct):
    """Starts, signals and reaps the agent's children."""

    ranks: dict[int, int] = field(default_factory=dict)
    """Pid of each live rank, by rank."""
    controller: int | None = None
    """Pid of the ipyparallel controller while it runs."""
    exit_marks: dict[int, Path] = field(default_factory=dict)
    """By rank, the file that exists once it has begun to exit by itself."""

    def spawn_controller(self, argv: list[str], log: Path) -> None:
        """Start the ipyparallel controller in its own session, with its output in `log`."""
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as out:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=lambda: set_parent_death_signal(signal.SIGTERM),
            )
        process.returncode = 0  # `reap` waits for it by pid: Popen must not wait as well
        self.controller = process.pid

    def add_rank(self, rank: int, pid: int, exit_mark: Path) -> None:
        """Register a forked rank, which creates the file `exit_mark` when it begins to exit by itself."""
        self.ranks[rank] = pid
        self.exit_marks[rank] = exit_mark

    def exiting(self, limit_s: float) -> bool:
        """Whether a rank began to exit by itself less than `limit_s` seconds ago."""
        marks = [self.exit_marks[rank] for rank in self.ranks]
        return any(mark.exists() and time.time() - mark.stat().st_mtime < limit_s for mark in marks)

    def stopped_ranks(self) -> tuple[int, ...]:
        """Return the live ranks that are stopped, as by SIGSTOP."""
        return tuple(rank for rank, pid in self.ranks.items() if is_stopped(pid))

    @property
    def controller_stopped(self) -> bool:
        """Whether the controller is stopped, as by SIGSTOP."""
        return self.controller is not None and is_stopped(self.controller)

    def signal_rank(self, rank: int, number: int) -> bool:
        """Send a signal to one rank; return False if it is gone."""
        pid = self.ranks.get(rank)
        if pid is None:
            return False
        os.kill(pid, number)
        return True

    def reap(self) -> list[Death]:
        """Return the children that exited since the last call; kill what is left of their process groups."""
        deaths = []
        while True:
            try:
                # Keep the zombie for now, so that its pid still names its process group when that is killed.
                exited: Any = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if exited is None:
                break
            pid = exited.si_pid
            rank = next((r for r, p in self.ranks.items() if p == pid), None)
            if rank is not None or pid == self.controller:
                signal_group(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if rank is not None:
                del self.ranks[rank]
            elif pid == self.controller:
                self.controller = None
            else:
                continue
            deaths.append(Death(pid, rank, os.waitstatus_to_exitcode(status)))
        return deaths

    def terminate_ranks(self) -> None:
        """Send SIGTERM to every rank's process group."""
        for pid in self.ranks.values():
            signal_group(pid, signal.SIGTERM)

    def kill_all(self) -> None:
        """Send SIGKILL to the process group of every live child, and to orphans that were adopted from ranks."""
        started = {*self.ranks.values(), *([self.controller] if self.controller else [])}
        for pid in started:
            signal_group(pid, signal.SIGKILL)
        for pid in child_pids(os.getpid()):
            if pid not in started:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    @property
    def any_alive(self) -> bool:
        """Whether any child is alive, or an orphan that was adopted from a rank."""
        return bool(self.ranks) or self.controller is not None or bool(child_pids(os.getpid()))


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the process group of this pid; does nothing if there is none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


class LastOutput(Struct):
    """Reads what each rank wrote since it started, by the sizes that its files had then."""

    _start_sizes: dict[int, tuple[Path, dict[str, int]]] = field(default_factory=dict)

    def rank_starting(self, rank: int, log: Path) -> None:
        """Note the file sizes before a rank starts: the rank that it replaces wrote to the same files."""
        self._start_sizes[rank] = (log, {suffix: _size(log.with_suffix(suffix)) for suffix in (_STDERR, _CRASH)})

    def of(self, rank: int) -> dict[str, str]:
        """`last_output` and `crash`: what the rank wrote just before it died, at most 32 KiB each; may be empty."""
        if rank not in self._start_sizes:
            return {}
        log, sizes = self._start_sizes[rank]
        # Linux may take seconds to end a crashed process while it writes a core file.
        crash, crashed = _text(log.with_suffix(_CRASH), sizes[_CRASH])
        output, written = _text(log.with_suffix(_STDERR), sizes[_STDERR])
        is_recent = (crashed if crash else time.time()) - written <= _RECENT_S
        return {"last_output": output if is_recent else "", "crash": crash}


def last_line(log: Path) -> str:
    """The last non-empty line of a log, at most 300 characters; empty if there is none."""
    lines = _text(log, 0)[0].split("\n")
    return next((line.strip()[:_MAX_LINE] for line in reversed(lines) if line.strip()), "")


def describe_controller_exit(code: int, last_output: str) -> str:
    """Describe the controller's exit in one sentence; `code` is its exit status, or minus a signal's number."""
    how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    return f"The ipyparallel controller {how}" + (f": {last_output}" if last_output else " without any output.")


def _text(path: Path, start: int) -> tuple[str, float]:
    """The tail of what was written after the first `start` bytes, and the Unix time of the last write."""
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            begin = start if start <= info.st_size else 0  # the rank truncates files that grow too long
            if info.st_size <= begin:
                return "", 0.0
            file.seek(max(begin, info.st_size - _MAX_BYTES))
            return file.read(_MAX_BYTES).decode(errors="replace"), info.st_mtime
    except OSError:
        return "", 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class OomCounter:
    """Tracks out-of-memory kills in this cgroup, or on the whole machine if the cgroup has no counter.

    Linux counts before it sends SIGKILL, so the counter has already changed when the death is seen.
    """

    def __init__(self, own: Path | None = None, machine: Path = _MACHINE) -> None:
        self._own = own or counter_file(_GROUPS, _MOUNTS)
        self._machine = machine
        self._before = self._counts()

    def _counts(self) -> tuple[int | None, int | None]:
        own = None if self._own is None else read_number(self._own, OOM_KILLS)
        return own, read_number(self._machine, OOM_KILLS)

    def poll(self) -> bool | None:
        """Whether a process was killed for lack of memory since the last call; None if unknown."""
        before, now = self._before, self._counts()
        self._before = now
        for verdict, old, new in zip((True, None), before, now, strict=True):
            if old is not None and new is not None:
                # The machine-wide counter may have counted someone else's process: an increase proves nothing.
                return verdict if new > old else False
        return None


def read_number(file: Path, pattern: re.Pattern[str]) -> int | None:
    """Return the number that a pattern's group finds in a file of the system; None: there is no such file or line."""
    try:
        match = pattern.search(file.read_text())
    except OSError:
        return None
    return int(match[1]) if match else None


def counter_file(groups: Path, mounts: Path) -> Path | None:
    """Find the file with the counter of the cgroup in `groups` (a /proc/<pid>/cgroup file); None if there is none.

    Args:
        groups: A file such as /proc/self/cgroup.
        mounts: A file such as /proc/self/mountinfo: where, and with which root, the hierarchies are mounted.
    """
    try:
        entries = [line.split(":", 2) for line in groups.read_text().splitlines()]
        mounted = [_mount(line) for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in sorted(entries, key=lambda entry: entry[1]):  # version 2 first
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        kind, name = ("cgroup", "memory.oom_control") if controllers else ("cgroup2", "memory.events")
        for found, root, point, options in mounted:
            if found != kind or (controllers and "memory" not in options):
                continue
            inside = path if root == "/" else path.removeprefix(root)
            for folder in (Path(point + inside), Path(point)):
                if read_number(folder / name, OOM_KILLS) is not None:
                    return folder / name
    return None


def _mount(line: str) -> tuple[str, str, str, list[str]]:
    """(type, root within the hierarchy, mount point, superblock options) of one line of mountinfo."""
    before, _, after = line.partition(" - ")
    fields, rest = before.split(), after.split()
    return rest[0], fields[3], fields[4], rest[-1].split(",")
