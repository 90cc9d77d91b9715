"""A folder that looks as cgroups do where they are mounted, and a file as /proc/self/cgroup."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class Cgroups:
    """Cgroups of some machine."""

    def __init__(self, folder: Path, listed: str) -> None:
        """Make them in `folder`; a process is in those `listed`."""
        self.root = folder / "cgroup"
        self.root.mkdir()
        self.own = folder / "own"
        self.own.write_text(listed)

    def set(self, group: str, files: Mapping[str, str]) -> None:
        """Write files of one cgroup, such as ``/user.slice``; on version 1 the mount's name comes first."""
        folder = self.root / group.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
