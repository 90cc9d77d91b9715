"""The private folder of each cluster, with its sockets, keys and logs, and a host's copy of the notebook's modules."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from axon_nb.errors import StartError
from axon_nb.records.environment import IPYTHON_DIR, RUNTIME_DIR, USER_RUNTIME_DIR

# sockaddr_un.sun_path has 108 bytes including the terminating zero on Linux, 104 elsewhere.
_MAX_SOCKET_PATH = 107 if sys.platform.startswith("linux") else 103
_CREATION_GRACE_S = 5.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_DRAFT = ".axon_nb-draft"


def base_dir() -> Path:
    """Return the user's folder for all clusters, mode 0700, on a local disk.

    Uses the first suitable one of `AXON_NB_RUNTIME_DIR`, `XDG_RUNTIME_DIR` and the temporary folder.

    Raises:
        StartError: no folder is private, writable and short enough.
    """
    roots, reasons = [RUNTIME_DIR.get(), USER_RUNTIME_DIR.get()], []
    with contextlib.suppress(FileNotFoundError):  # it writes a file to find out, and the disk may be full
        roots.append(tempfile.gettempdir())
    roots.append("/tmp")
    for root in roots:
        if not root:
            continue
        path = Path(root) / f"axon_nb-{os.getuid()}"
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            info = path.lstat()
        except OSError as error:
            reasons.append(f"{path}: {error.strerror}")
            continue
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            reasons.append(f"{path}: not owned by you")
        elif not os.access(path, os.W_OK):
            reasons.append(f"{path}: not writable")
        elif len(os.fsencode(path)) + 40 > _MAX_SOCKET_PATH:
            reasons.append(f"{path}: too long for a Unix socket path")
        else:
            path.chmod(0o700)
            return path
    raise StartError(
        f"No usable private folder for the cluster's sockets ({'; '.join(reasons)}). "
        f"Set {RUNTIME_DIR.name} to a short path on a local disk."
    )


class RunDir:
    """The folder of one cluster: `agent.sock`, `store.sock`, `agent.json`, `profile/` and `log/`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.agent_socket = path / "agent.sock"
        """The agent's command socket."""
        self.endpoint_socket = path / "notebook.sock"
        """The socket on which the notebook that uses the cluster answers other programs."""
        self.store_socket = path / "store.sock"
        """The socket of the rendezvous store."""
        self.channels = path / "channels" / "c"
        """What the paths of ipyparallel's Unix sockets begin with; a number follows."""
        self.profile = path / "profile"
        """Ipyparallel's profile folder: connection files and logs."""
        self.client_file = self.profile / "security" / "ipcontroller-client.json"
        """The connection file for ipyparallel clients."""
        self.engine_file = self.profile / "security" / "ipcontroller-engine.json"
        """The connection file for ipyparallel engines."""
        self._info_file = path / "agent.json"
        """The agent's description of the cluster."""

    @classmethod
    def create(cls) -> RunDir:
        """Create the folder of a new cluster, with a random name.

        Raises:
            StartError: there is no folder for clusters, or its disk is full.
        """
        run_dir = cls(base_dir() / secrets.token_hex(5))
        try:
            run_dir._fill()
        except OSError as error:
            shutil.rmtree(run_dir.path, ignore_errors=True)
            raise StartError(
                f"Cannot create the cluster's files in {run_dir.path.parent}: {error.strerror}. Free space there, or "
                f"set {RUNTIME_DIR.name} to a short path on another local disk."
            ) from error
        return run_dir

    def _fill(self) -> None:
        self.path.mkdir(mode=0o700)
        # Until the agent listens, this marker keeps others from removing the folder as stale.
        marker = self.path / "starter"
        marker.write_text(str(os.getpid()))
        marker.chmod(0o600)
        for sub in ("channels", "log", "profile", "profile/startup"):
            (self.path / sub).mkdir(mode=0o700)
        # Otherwise IPython would copy its own README there, with mode 0644.
        (self.path / "profile" / "startup" / "README").touch(mode=0o600)

    @property
    def name(self) -> str:
        """The cluster's name; empty while it is only prewarmed."""
        return str(self.read_info().get("name", ""))

    def ipython_env(self) -> dict[str, str]:
        """`IPYTHONDIR` if the home folder is read-only, where IPython would leave a folder per process; else empty."""
        usual = Path(IPYTHON_DIR.get() or os.path.expanduser("~/.ipython"))
        if os.access(usual if usual.exists() else usual.parent, os.W_OK | os.X_OK):
            return {}
        folder = self.path / "ipython"
        folder.mkdir(mode=0o700, exist_ok=True)
        return {"IPYTHONDIR": str(folder)}

    def rank_log(self, rank: int) -> Path:
        """The log of what `rank` wrote outside of cells."""
        return self.path / "log" / f"rank{rank}.log"

    def read_info(self) -> dict[str, Any]:
        """Read `agent.json`, the agent's description of the cluster; empty if missing or invalid."""
        try:
            info = json.loads(self._info_file.read_text())
        except (OSError, ValueError):
            return {}
        return info if isinstance(info, dict) else {}

    def write_info(self, info: dict[str, Any]) -> None:
        """Replace `agent.json` atomically; if that fails, keep it.

        It serves to list clusters. A full disk must not keep a notebook from ranks that live.
        """
        draft = self.path / "agent.json.new"
        with contextlib.suppress(OSError):
            draft.write_text(json.dumps(info))
            draft.chmod(0o600)
            draft.replace(self._info_file)

    def mark_active(self) -> None:
        """Record, as the time of `agent.json`, that a cell has started or ended."""
        with contextlib.suppress(OSError):
            os.utime(self._info_file)

    def last_activity(self) -> float | None:
        """Return the Unix time at which a cell last started or ended; None if unknown."""
        try:
            return self._info_file.stat().st_mtime
        except OSError:
            return None

    def is_alive(self) -> bool:
        """Whether an agent listens on the socket, or a live process is starting one."""
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.agent_socket))
            except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
                return self._is_starter_alive()
            except OSError:
                return True
            return True

    def _is_starter_alive(self) -> bool:
        if self.agent_socket.exists():
            return False
        pid = self.starter_pid()
        if pid is None:
            return False
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True

    def starter_pid(self) -> int | None:
        """Pid of the process that starts the agent; None if unknown."""
        try:
            return int((self.path / "starter").read_text())
        except (OSError, ValueError):
            return None

    @property
    def just_created(self) -> bool:
        """Whether another process may have just created the folder, and not yet written its pid."""
        if self.starter_pid() is not None:
            return False
        try:
            return time.time() - self.path.stat().st_mtime < _CREATION_GRACE_S
        except OSError:
            return False

    def remove(self) -> None:
        """Delete the folder and its contents."""
        shutil.rmtree(self.path, ignore_errors=True)


class FolderCopy:
    """A copy of the folder that `--sync` names, in the folder of a joined host's agent; writes nothing outside of it.

    Args:
        path: Where it is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: set[str] = set()
        self._original: Path | None = None
        self._import_path: tuple[str, ...] = ()

    def compare(
        self, original: str, import_path: tuple[str, ...], files: Mapping[str, tuple[int, int]]
    ) -> tuple[str, ...]:
        """Delete what was written and is not in `files`, and return the names of those that are missing here.

        Args:
            original: The folder on the notebook's host.
            import_path: Where in it modules are.
            files: By name, time of change in nanoseconds, and size.

        Raises:
            StartError: a name leads out of the folder.
        """
        self._original, self._import_path = Path(original), import_path
        self._path.mkdir(mode=0o700, exist_ok=True)
        for name in self._names - files.keys():
            with contextlib.suppress(OSError), self._open_parent(name) as (folder, last):
                os.unlink(last, dir_fd=folder)
                for parent in list(Path(name).parents)[:-1]:
                    os.rmdir(self._path / parent)  # as long as they are empty
        self._names &= files.keys()
        return tuple(name for name, state in files.items() if self._state(name) != state)

    def write(self, name: str, content: bytes, *, offset: int, time_ns: int, is_last: bool) -> None:
        """Write a part of a file; nobody sees the file before the last one.

        Raises:
            StartError: that is not possible; the message says why.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (0 if offset else os.O_TRUNC)
        try:
            with self._open_parent(name, create=True) as (folder, last), self._open(_DRAFT, flags) as draft:
                if os.pwrite(draft, content, offset) < len(content):
                    raise OSError(0, "no space left")
                if is_last:
                    os.utime(draft, ns=(time_ns, time_ns))
                    os.replace(self._path / _DRAFT, last, dst_dir_fd=folder)
                    self._names.add(name)
        except OSError as error:
            raise StartError(
                f"The host {socket.gethostname()!r} cannot write its copy of {name}, which `--sync` brings: "
                f"{error.strerror} (in {self._path})."
            ) from None

    def _state(self, name: str) -> tuple[int, int] | None:
        try:
            with self._open_parent(name) as (folder, last):
                info = os.stat(last, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return None
        return (info.st_mtime_ns, info.st_size) if stat.S_ISREG(info.st_mode) else None

    @contextlib.contextmanager
    def _open_parent(self, name: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """Open the folder of a file; a link on the way, which a rank may have made, is an error."""
        *folders, last = name.split("/")
        if {"", ".", ".."} & {*folders, last} or "\0" in name:
            raise StartError(f"{name!r} is not the name of a file in the folder that `--sync` brings.")
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(self._open(".", _FOLDER))
            for inner in folders:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(inner, 0o700, dir_fd=folder)
                folder = stack.enter_context(self._open(inner, _FOLDER, folder))
            yield folder, last

    @contextlib.contextmanager
    def _open(self, name: str, flags: int, folder: int | None = None) -> Iterator[int]:
        descriptor = os.open(self._path / name if folder is None else name, flags, 0o600, dir_fd=folder)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def of(self, folder: str) -> Path | None:
        """The copy of a folder of the notebook's host; None if it is not in the original."""
        if self._original is None or not Path(folder).is_relative_to(self._original):
            return None
        copy = self._path / Path(folder).relative_to(self._original)
        copy.mkdir(mode=0o700, parents=True, exist_ok=True)
        return copy

    @property
    def import_path(self) -> tuple[str, ...]:
        """Where modules are."""
        return tuple(str(self._path / entry) for entry in self._import_path)


def list_run_dirs() -> list[RunDir]:
    """Return the folders of this user's live clusters, and remove those of dead ones."""
    found = []
    for path in sorted(base_dir().iterdir()):
        run_dir = RunDir(path)
        if path.is_symlink() or not path.is_dir():
            continue
        is_new = run_dir.just_created  # asked first: a pid that is written in between makes it alive
        if run_dir.is_alive():
            found.append(run_dir)
        elif not is_new:
            run_dir.remove()
    return found


def all_run_dirs() -> list[RunDir]:
    """Return the folders of all of this user's clusters, dead ones included; create and remove nothing.

    A notebook server's `XDG_RUNTIME_DIR` or temporary folder often differs from a shell's. So unless
    `AXON_NB_RUNTIME_DIR` is set, this searches all usual places.
    """
    usual = [USER_RUNTIME_DIR.get(), f"/run/user/{os.getuid()}", tempfile.gettempdir(), "/tmp"]
    chosen = RUNTIME_DIR.get()
    found: dict[Path, RunDir] = {}
    for root in [chosen] if chosen else filter(None, usual):
        base = Path(root) / f"axon_nb-{os.getuid()}"
        with contextlib.suppress(OSError):  # missing or not readable
            info = base.lstat()
            if stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid():
                paths = [path for path in sorted(base.iterdir()) if path.is_dir() and not path.is_symlink()]
                found |= {path.resolve(): RunDir(path) for path in paths}
    return list(found.values())
