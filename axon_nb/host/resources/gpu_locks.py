"""Reserved GPUs: locked files in a folder that all users share, so that two clusters do not take the same card.

The agent of a cluster holds the locks. They are POSIX record locks: the system releases them when the agent ends,
however it does, and the ranks that it forks do not inherit them. Each user has files of their own, one per card, which
others can only read: nobody can write into them, hold their locks or follow a link out of the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from axon_nb.records.environment import RUNTIME_DIR
from axon_nb.records.protocol.agent import ReserveGpus, TakenGpus

_FLOCK = struct.Struct("hhqqi")
"""`struct flock` of Linux: type, whence, start, length, pid."""
_MAX_NAME = 256
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A file of another user may be a link, or a pipe that nobody writes to.
_FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class GpuOwner:
    """The cluster that has reserved a GPU."""

    name: str
    user: str
    """Empty: this process's own user."""
    pid: int
    """Its agent; 0 if that is in another container."""

    def __str__(self) -> str:
        if not self.user:
            return repr(self.name)
        return f"{self.name!r} of the user {self.user}{f', process {self.pid}' if self.pid else ''}"


@contextlib.contextmanager
def _folder() -> Iterator[int]:
    """Open the folder of the locks; create it where all users can add files, and only a file's owner removes it.

    Raises:
        OSError: it cannot be created, or is not a folder.
    """
    # Not the temporary folder, which may be a user's own.
    path = Path(RUNTIME_DIR.get() or "/tmp") / "axon_nb-gpus"
    with contextlib.suppress(FileExistsError):
        path.mkdir()
        path.chmod(0o1777)
    folder = os.open(path, _FOLDER_FLAGS)
    try:
        yield folder
    finally:
        os.close(folder)


def _name(gpu: str, uid: int | str) -> str:
    return f"{gpu.replace('/', '_')}.{uid}"


def gpu_owners(gpus: Iterable[str]) -> dict[str, GpuOwner]:
    """Return the clusters of all users that have reserved GPUs, by GPU; those that nobody has are left out.

    Not for GPUs that this process has reserved: to look releases its lock.

    Args:
        gpus: UUIDs of cards, or names of MIG instances.
    """
    return _owners(wanted, others_only=False) if (wanted := list(gpus)) else {}


def _owners(gpus: Iterable[str], *, others_only: bool) -> dict[str, GpuOwner]:
    owners: dict[str, GpuOwner] = {}
    with contextlib.suppress(OSError), _folder() as folder:
        files = os.listdir(folder)
        for gpu in gpus:
            for file in files:
                uid = file.rpartition(".")[2]
                if file == _name(gpu, uid) and not (others_only and uid == f"{os.getuid()}"):
                    with contextlib.suppress(OSError):
                        if owner := _owner(folder, file, uid):
                            owners.setdefault(gpu, owner)
    return owners


def _owner(folder: int, file: str, uid: str) -> GpuOwner | None:
    with open(os.open(file, os.O_RDONLY | _FILE_FLAGS, dir_fd=folder), "rb") as opened:
        info = os.fstat(opened.fileno())
        if not stat.S_ISREG(info.st_mode) or f"{info.st_uid}" != uid:
            return None
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(opened, fcntl.F_GETLK, wanted))
        if kind == fcntl.F_UNLCK:
            return None
        name = opened.read(_MAX_NAME).decode(errors="replace")
    return GpuOwner(name, "" if info.st_uid == os.getuid() else _user(info.st_uid), max(0, pid))


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"{uid}"


class GpuLocks:
    """The GPUs that the cluster of this process has reserved."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}

    def reserve(self, _: object, request: ReserveGpus) -> TakenGpus:
        """Reserve GPUs for this cluster; return those that other clusters have.

        If two users reserve the same one at the same moment, neither may get it, and never both.

        Args:
            _: Who asks.
            request: Which GPUs, and the cluster's name.
        """
        taken: dict[str, GpuOwner] = {}
        for gpu in request.gpus:
            if gpu in self._files:  # closing a second descriptor of the file would release the lock
                continue
            try:
                file = _open_own(gpu)
            except OSError:  # a full disk must not keep a cluster from starting
                continue
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                taken |= gpu_owners([gpu])
                continue
            if others := _owners([gpu], others_only=True):
                os.close(file)
                taken |= others
                continue
            self._files[gpu] = file
            with contextlib.suppress(OSError):
                os.ftruncate(file, 0)
                os.pwrite(file, request.owner.encode()[:_MAX_NAME], 0)
        return TakenGpus({gpu: str(owner) for gpu, owner in taken.items()})


def _open_own(gpu: str) -> int:
    with _folder() as folder:
        file = os.open(_name(gpu, os.getuid()), os.O_RDWR | os.O_CREAT | _FILE_FLAGS, 0o600, dir_fd=folder)
        try:
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
                raise PermissionError(f"{gpu}: the lock file is not this user's own")
            os.fchmod(file, 0o644)  # other users read the cluster's name
        except OSError:
            os.close(file)
            raise
    return file
