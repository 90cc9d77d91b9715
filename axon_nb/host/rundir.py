"""Where a cluster keeps its socket, keys and logs while it lives: one private folder a cluster."""

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
from pathlib import Path
from typing import Any

from axon_nb.errors import StartError
from axon_nb.records.environment import IPYTHON_DIR, RUNTIME_DIR, USER_RUNTIME_DIR

__all__ = ["RunDir", "all_run_dirs", "base_dir", "list_run_dirs"]

# Linux: struct sockaddr_un.sun_path is 108 bytes with the closing zero, elsewhere 104.
_MAX_SOCKET_PATH = 107 if sys.platform.startswith("linux") else 103
_MAKING_S = 5.0


def base_dir() -> Path:
    """The user's folder for all clusters, mode 0700, on a local disk.

    The first of `AXON_NB_RUNTIME_DIR`, `XDG_RUNTIME_DIR` and the temporary folder that can hold it.

    Raises:
        StartError: the folder is not ours alone, or cannot be made.
    """
    roots = [RUNTIME_DIR.get(), USER_RUNTIME_DIR.get(), tempfile.gettempdir(), "/tmp"]
    reasons = []
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
            reasons.append(f"{path}: belongs to someone else")
        elif not os.access(path, os.W_OK):
            reasons.append(f"{path}: not writable")
        elif len(os.fsencode(path)) + 40 > _MAX_SOCKET_PATH:
            reasons.append(f"{path}: longer than a Unix socket's path may be")
        else:
            path.chmod(0o700)
            return path
    raise StartError(
        f"No private folder for the cluster's sockets ({'; '.join(reasons)}): "
        f"set {RUNTIME_DIR.name} to a short path on a local disk."
    )


class RunDir:
    """The folder of one cluster: `agent.sock`, `store.sock`, `agent.json`, `profile/` and `log/`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls) -> RunDir:
        """Make the folder of a new cluster, under a random name."""
        run_dir = cls(base_dir() / secrets.token_hex(5))
        run_dir.path.mkdir(mode=0o700)
        # This process is about to start the agent: until it listens, nobody may take the folder for a leftover.
        marker = run_dir.path / "starter"
        marker.write_text(str(os.getpid()))
        marker.chmod(0o600)
        for sub in ("log", "profile", "profile/startup"):
            (run_dir.path / sub).mkdir(mode=0o700)
        # IPython copies a text of mode 0644 to where there is none.
        (run_dir.path / "profile" / "startup" / "README").touch(mode=0o600)
        return run_dir

    @property
    def name(self) -> str:
        """What the user calls the cluster; empty while it is only warmed up."""
        return str(self.read_info().get("name", ""))

    @property
    def agent_socket(self) -> Path:
        """Where the agent takes commands."""
        return self.path / "agent.sock"

    @property
    def store_socket(self) -> Path:
        """Where the agent serves the rendezvous store."""
        return self.path / "store.sock"

    @property
    def profile(self) -> Path:
        """The profile folder of ipyparallel: connection files and logs."""
        return self.path / "profile"

    @property
    def client_file(self) -> Path:
        """The connection file for ipyparallel clients."""
        return self.profile / "security" / "ipcontroller-client.json"

    @property
    def engine_file(self) -> Path:
        """The connection file for ipyparallel engines."""
        return self.profile / "security" / "ipcontroller-engine.json"

    def ipython_env(self) -> dict[str, str]:
        """Where IPython keeps its files when the home folder cannot be written: it would leave a folder a process."""
        usual = Path(IPYTHON_DIR.get() or os.path.expanduser("~/.ipython"))
        if os.access(usual if usual.exists() else usual.parent, os.W_OK | os.X_OK):
            return {}
        folder = self.path / "ipython"
        folder.mkdir(mode=0o700, exist_ok=True)
        return {"IPYTHONDIR": str(folder)}

    def rank_log(self, rank: int) -> Path:
        """What rank `rank` wrote outside of cells."""
        return self.path / "log" / f"rank{rank}.log"

    def read_info(self) -> dict[str, Any]:
        """What the agent says of itself (`agent.json`); empty when it is not there yet."""
        try:
            info = json.loads((self.path / "agent.json").read_text())
        except (OSError, ValueError):
            return {}
        return info if isinstance(info, dict) else {}

    def write_info(self, info: dict[str, Any]) -> None:
        """Replace `agent.json` in one step."""
        draft = self.path / "agent.json.new"
        draft.write_text(json.dumps(info))
        draft.chmod(0o600)
        draft.replace(self.path / "agent.json")

    def alive(self) -> bool:
        """Whether an agent answers on the socket, or is just being started by a living process."""
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.agent_socket))
            except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
                return self._starter_alive()
            except OSError:
                return True
            return True

    def _starter_alive(self) -> bool:
        if self.agent_socket.exists():
            return False
        pid = self.starter()
        if pid is None:
            return False
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True

    def starter(self) -> int | None:
        """Pid of the process that starts the agent; None when it has not been noted."""
        try:
            return int((self.path / "starter").read_text())
        except (OSError, ValueError):
            return None

    @property
    def just_made(self) -> bool:
        """Whether its maker may still be between making the folder and saying so."""
        if (self.path / "starter").exists():
            return False
        try:
            return time.time() - self.path.stat().st_mtime < _MAKING_S
        except OSError:
            return False

    def remove(self) -> None:
        """Delete the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def list_run_dirs() -> list[RunDir]:
    """The folders of all clusters of this user whose agent answers; leftovers of dead ones are removed."""
    found = []
    for path in sorted(base_dir().iterdir()):
        run_dir = RunDir(path)
        if path.is_symlink() or not path.is_dir():
            continue
        if run_dir.alive():
            found.append(run_dir)
        elif not run_dir.just_made:
            run_dir.remove()
    return found


def all_run_dirs() -> list[RunDir]:
    """The folders of all clusters of this user, those of dead agents too; makes and removes nothing.

    A notebook server often has another `XDG_RUNTIME_DIR` or temporary folder than a shell: unless
    `AXON_NB_RUNTIME_DIR` names the place, all usual ones are looked at.
    """
    usual = [USER_RUNTIME_DIR.get(), f"/run/user/{os.getuid()}", tempfile.gettempdir(), "/tmp"]
    chosen = RUNTIME_DIR.get()
    found: dict[Path, RunDir] = {}
    for root in [chosen] if chosen else filter(None, usual):
        base = Path(root) / f"axon_nb-{os.getuid()}"
        with contextlib.suppress(OSError):  # not there, or not for us to read
            info = base.lstat()
            if stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid():
                paths = [path for path in sorted(base.iterdir()) if path.is_dir() and not path.is_symlink()]
                found |= {path.resolve(): RunDir(path) for path in paths}
    return list(found.values())
