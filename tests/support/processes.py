"""What a cluster consists of, seen from outside: its processes, folder and listening sockets."""

from __future__ import annotations

import contextlib
import glob
import os
import socket
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.kernel import Kernel


def until(condition: Callable[[], object], *, timeout: float = 60.0) -> bool:
    """Wait for a condition; whether it came true."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def ended(process: psutil.Process) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@dataclass(frozen=True)
class Footprint:
    """All that a running cluster has on this machine."""

    folder: Path
    agent: int
    controller: int
    pids: Mapping[int, int]
    """By rank, of those that are alive."""
    processes: tuple[psutil.Process, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The pids of all ranks, in their order."""
        return tuple(self.pids.values())

    def gone(self) -> bool:
        """Whether nothing of it is left."""
        return not self.folder.exists() and self.all_ended()

    def all_ended(self) -> bool:
        """Whether none of its processes runs any more."""
        return all(map(ended, self.processes))


def footprint(kernel: Kernel) -> Footprint:
    """Of the kernel's current cluster."""
    folder, agent, controller, pids = kernel.value(
        "(lambda c: (str(c.run_dir.path), *(lambda s: (s.pid, s.controller, dict(sorted(s.ranks.items()))))"
        "(c.agent.call(__import__('axon_nb.records.protocol.agent', fromlist=['x']).GetInfo()))))"
        "(__import__('axon_nb').cluster.current.get().connection)"
    )
    tree = psutil.Process(agent)
    return Footprint(Path(folder), agent, controller, pids, (tree, *tree.children(recursive=True)))


def listening(footprint: Footprint) -> list[psutil._common.sconn]:
    """The TCP sockets on which the cluster's processes listen."""
    sockets = []
    for process in footprint.processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # a helper that has ended since
            sockets += [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return sockets


def modes(folder: Path) -> dict[str, int]:
    """Permission bits of everything below a folder but links, which have none of their own."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a draft that has been put in its place since
            mode = os.lstat(path).st_mode
            if not stat.S_ISLNK(mode):
                found[str(path.relative_to(folder))] = stat.S_IMODE(mode)
    return found


def below(folder: Path, pattern: str) -> list[str]:
    """What is there of this pattern; unlike `Path.glob` it minds no folder that goes while it looks."""
    return glob.glob(str(folder / pattern))


def free_port() -> int:
    """Return an unused port below 32768: Linux never assigns those automatically."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as found:
            if found.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError("no port is free")
