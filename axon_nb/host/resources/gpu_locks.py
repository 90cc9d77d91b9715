"""Reserved GPUs: a locked file per GPU in the user's folder of clusters, so that two clusters do not take the same one.

The agent of a cluster holds the locks. They are POSIX record locks: the system releases them when the agent ends,
however it does, and the ranks that it forks do not inherit them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from axon_nb.host.run_dir import base_dir
from axon_nb.records.protocol.agent import ReserveGpus, TakenGpus

__all__ = ["GpuLocks", "gpu_owners"]

_FLOCK = struct.Struct("hhqqi")
"""`struct flock` of Linux: type, whence, start, length, pid."""
_MAX_NAME = 256


def _file(gpu: str) -> Path:
    return base_dir() / "gpus" / gpu.replace("/", "_")


def gpu_owners(gpus: Iterable[str]) -> dict[str, str]:
    """Return the names of the clusters that have reserved GPUs, by GPU; those that nobody has are left out.

    Args:
        gpus: UUIDs of cards, or names of MIG instances.
    """
    owners = {}
    for gpu in gpus:
        with contextlib.suppress(OSError), _file(gpu).open("r+b") as file:
            free = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            if _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, free))[0] != fcntl.F_UNLCK:
                owners[gpu] = file.read(_MAX_NAME).decode(errors="replace")
    return owners


class GpuLocks:
    """The GPUs that the cluster of this process has reserved."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}

    def reserve(self, _: object, request: ReserveGpus) -> TakenGpus:
        """Reserve GPUs for this cluster; return those that other clusters have.

        Args:
            _: Who asks.
            request: Which GPUs, and the cluster's name.
        """
        taken = []
        for gpu in request.gpus:
            if gpu in self._files:  # closing a second descriptor of the file would release the lock
                continue
            path = _file(gpu)
            try:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError:  # a full disk must not keep a cluster from starting
                continue
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                taken.append(gpu)
                continue
            self._files[gpu] = file
            with contextlib.suppress(OSError):
                os.ftruncate(file, 0)
                os.pwrite(file, request.owner.encode()[:_MAX_NAME], 0)
        return TakenGpus(gpu_owners(taken))
