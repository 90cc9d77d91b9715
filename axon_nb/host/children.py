"""The processes that the agent started: the controller and the ranks. Nothing else is ever signalled."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axon_nb.host.parentage import end_with_parent

__all__ = ["Children", "Death"]


@dataclass(frozen=True, slots=True)
class Death:
    """One child that ended."""

    pid: int
    rank: int | None
    """None for the controller."""
    code: int
    """Exit code, or minus the signal's number."""


@dataclass
class Children:
    """Starts, signals and reaps."""

    ranks: dict[int, int] = field(default_factory=dict)
    """pid of each living rank, by rank."""
    controller: int | None = None
    """pid of the ipyparallel controller while it lives."""

    def spawn_controller(self, argv: list[str], log: Path) -> None:
        """Start the ipyparallel controller in a session of its own; what it writes goes to `log`."""
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as out:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(signal.SIGTERM),
            )
        process.returncode = 0  # reaped here, by pid: Popen must not wait for it as well
        self.controller = process.pid

    def add_rank(self, rank: int, pid: int) -> None:
        """Note a rank that was just forked."""
        self.ranks[rank] = pid

    def signal_rank(self, rank: int, number: int) -> bool:
        """Send a signal to one rank; False when it is gone."""
        pid = self.ranks.get(rank)
        if pid is None:
            return False
        os.kill(pid, number)
        return True

    def reap(self) -> list[Death]:
        """The children that have ended since the last call, each with its process group cleared away."""
        deaths = []
        while True:
            try:
                # Leaves the zombie, so that its pid still names its group when what it left behind is ended.
                ended: Any = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if ended is None:
                break
            pid = ended.si_pid
            rank = next((r for r, p in self.ranks.items() if p == pid), None)
            if rank is not None or pid == self.controller:
                _signal_group(pid, signal.SIGKILL)
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
        """Ask every rank to end, with its whole process group."""
        for pid in self.ranks.values():
            _signal_group(pid, signal.SIGTERM)

    def kill(self) -> None:
        """End every child that still lives, with its whole process group."""
        for pid in [*self.ranks.values(), *([self.controller] if self.controller else [])]:
            _signal_group(pid, signal.SIGKILL)

    @property
    def any_left(self) -> bool:
        """Whether a child still lives."""
        return bool(self.ranks) or self.controller is not None


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
