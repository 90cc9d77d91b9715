"""`--sync FOLDER`: bring the notebook's modules to hosts that do not share its disk, and before a cell what changed.

Each host keeps a copy in its agent's private folder, with the times of the original: `%autoreload`, and Python's own
caches, see a change there as they do here. Files travel on the agents' own connection.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import re
import site
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from axon_nb.cluster.failures import RankError
from axon_nb.errors import UsageError
from axon_nb.host.client import AgentClient
from axon_nb.records.protocol.agent import CompareFiles, GetInfo, WriteFile
from axon_nb.records.units import format_bytes

MAX_FILE = 10 << 20
MAX_FOLDER = 100 << 20
MAX_FILES = 10_000
_PART = 1 << 18
"""Small: a host that does not respond for 3 seconds, as behind a long message on a slow link, is lost."""
_GIT_TIMEOUT_S = 60.0
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")


class FolderSync:
    """The copies of one folder on the other hosts of a cluster.

    Args:
        agent: The cluster's host agent.
        folder: The folder.
    """

    def __init__(self, agent: AgentClient, folder: str) -> None:
        self.folder = Path(folder).expanduser().resolve()
        self._agent = agent
        self._seen: dict[str, tuple[int, int] | None] = {}
        """Of all files and folders that matter, what `_state` said when the hosts had all of it; empty: they do not."""
        self._left_out: set[str] = set()

    def update(self, *, again: bool = False) -> None:
        """Bring what has changed since the last time.

        Args:
            again: Whether to ask the hosts what they have, though nothing has changed here: one may be new.

        Raises:
            UsageError: the folder is too large by now.
            StartError: a host cannot write a file; the message says why.
        """
        if self._seen and not again and all(_state(path) == state for path, state in self._seen.items()):
            return
        self._seen = {}
        folders, names = _list(self.folder)
        seen = {str(path): _state(str(path)) for path in folders}
        files: dict[str, tuple[int, int]] = {}
        for name in names:
            path = self.folder / name
            if (state := _state(str(path))) is not None and state[1] >= 0:
                seen[str(path)] = state
                if state[1] <= MAX_FILE:
                    files[name] = state
                else:
                    self._leave_out(name, f"{format_bytes(state[1])}: a file may have {format_bytes(MAX_FILE)}")
            elif path.is_symlink():
                self._leave_out(name, "a link")
        self._check_size(files)
        self._send(files)
        self._seen = seen

    def _leave_out(self, name: str, reason: str) -> None:
        if name not in self._left_out:
            self._left_out.add(name)
            print(f"--sync leaves out {name} ({reason}).")

    def _check_size(self, files: Mapping[str, tuple[int, int]]) -> None:
        total = sum(size for _, size in files.values())
        if total > MAX_FOLDER or len(files) > MAX_FILES:
            raise UsageError(
                f"--sync {self.folder} would bring {len(files):,} files with {format_bytes(total)}; it brings at most "
                f"{MAX_FILES:,} with {format_bytes(MAX_FOLDER)}. Name a smaller folder, or list what ranks do not need "
                "in its .gitignore."
            )

    def _send(self, files: Mapping[str, tuple[int, int]]) -> None:
        hosts, path = self._agent.call(GetInfo()).hosts, self._import_path(files)
        asked = {host: self._agent.send(CompareFiles(host, str(self.folder), path, files)) for host in hosts}
        missing: dict[str, list[str]] = {}
        for host, future in asked.items():
            for name in self._agent.result(CompareFiles, future).names:
                missing.setdefault(name, []).append(host)
        for name, lacking in missing.items():
            with contextlib.suppress(OSError), open(self.folder / name, "rb") as file:  # gone: the next time says so
                for part in _parts(name, file):
                    sent = [self._agent.send(WriteFile(host, *part)) for host in lacking]
                    for one in sent:
                        self._agent.result(WriteFile, one)

    def _import_path(self, files: Iterable[str]) -> tuple[str, ...]:
        """Where in the folder this process looks for modules; at least in the folder itself."""
        with_files = {str(parent) for name in files for parent in Path(name).parents}
        found = []
        for entry in sys.path:
            with contextlib.suppress(ValueError):
                name = str(Path(entry).resolve().relative_to(self.folder))
                found += [name] if name in with_files else []
        return tuple(dict.fromkeys([*found, "."]))


def _state(path: str) -> tuple[int, int] | None:
    """Time and size of a file, time and -1 of a folder; None for anything else."""
    try:
        info = os.lstat(path)
    except OSError:
        return None
    if stat.S_ISREG(info.st_mode):
        return info.st_mtime_ns, info.st_size
    return (info.st_mtime_ns, -1) if stat.S_ISDIR(info.st_mode) else None


def _parts(name: str, file: BinaryIO) -> Iterator[tuple[str, bytes, int, int, bool]]:
    info = os.fstat(file.fileno())
    for offset in range(0, max(1, info.st_size), _PART):
        yield name, file.read(_PART), offset, info.st_mtime_ns, offset + _PART >= info.st_size


def _list(folder: Path) -> tuple[list[Path], list[str]]:
    """Return all folders in it that git does not ignore, and the names of the files.

    Raises:
        UsageError: git is missing, or takes too long.
    """
    with tempfile.TemporaryDirectory() as empty:
        options: tuple[str, ...] = ()
        if _git(folder, "rev-parse", "--is-inside-work-tree") != ["true\n"]:
            _git(folder, "init", "--quiet", "--bare", empty)
            options = (f"--git-dir={empty}", f"--work-tree={folder}")
        listing = (*options, "ls-files", "-z", "--exclude-standard", "--others")
        names = _git(folder, *listing, "--cached")
        ignored = {folder / name for name in _git(folder, *listing, "--ignored", "--directory")}
    folders = []
    for where, inner, _ in os.walk(folder):
        folders.append(Path(where))
        inner[:] = [name for name in inner if name not in (".git", "__pycache__") and folders[-1] / name not in ignored]
    return folders, [name for name in dict.fromkeys(names) if name and not name.endswith((".ipynb", ".pyc"))]


def _git(folder: Path, *words: str) -> list[str]:
    """Run git; return what it printed, up to each null character; nothing if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, check=False, timeout=_GIT_TIMEOUT_S
        )
    except FileNotFoundError:
        raise UsageError(
            "--sync needs git, which reads .gitignore: install it, such as by `apt install git`."
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"--sync {folder}: git needs more than {_GIT_TIMEOUT_S:.0f} s to list it. Name a smaller folder."
        ) from None
    return [] if done.returncode else os.fsdecode(done.stdout).split("\0")


def missing_on_host(errors: Iterable[RankError], hosts: Mapping[int, str], sync: FolderSync | None) -> str:
    """Say which fix a module needs that only the notebook's host has; empty if no rank misses one.

    Args:
        errors: The failures of a cell.
        hosts: Of the ranks on other hosts, the host.
        sync: What `--sync` brings, if anything.
    """
    for error in errors:
        match = _NO_MODULE.search(error.evalue) if error.ename == "ModuleNotFoundError" else None
        if match is None or error.rank not in hosts or (found := _own_file(match[1])) is None:
            continue
        file, folder = found
        where = f"`{match[1]}` is in {file} here, and not on the host {hosts[error.rank]!r}"
        if sync is not None:
            return f"{where}: `--sync {sync.folder}` does not bring it (it is outside, ignored by git, or too large)."
        return f"{where}: `%distributed start --hosts … --sync {folder}` brings the modules of that folder."
    return ""


def _own_file(module: str) -> tuple[str, str] | None:
    """Return the file of a module of the user, and the folder in which Python finds its package; imports nothing."""
    search: list[str] | None = None
    folder = ""
    names = module.split(".")
    for number in range(len(names)):
        spec = importlib.machinery.PathFinder.find_spec(".".join(names[: number + 1]), search)
        if spec is None:
            return None
        search = list(spec.submodule_search_locations or ())
        file = os.path.abspath(spec.origin or next(iter(search), ""))
        folder = folder or str(Path(file).parent.parent if search and spec.origin else Path(file).parent)
    installed = [*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("stdlib")]
    return None if any(Path(file).is_relative_to(one) for one in installed) else (file, folder)
