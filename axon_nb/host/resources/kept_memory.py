"""Memory that outlives a rank: one anonymous file per rank, which the host agent opens before it forks the rank.

A rank inherits the descriptor, and so does its replacement after a death. Nobody else can open the file, and when the
agent exits nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
from io import FileIO
from pathlib import Path

_NAME = "axon_nb-kept-memory-{rank}"


class KeptMemory:
    """The files of all ranks that this agent has forked. An empty one takes no memory."""

    def __init__(self) -> None:
        self._files: dict[int, FileIO] = {}

    def prepare(self, rank: int) -> None:
        """Create the file of a rank, unless there is one. Without it the rank works, and cannot be protected."""
        if rank not in self._files and hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):  # too many open files
                self._files[rank] = FileIO(os.memfd_create(_NAME.format(rank=rank), os.MFD_CLOEXEC), "r+")

    def of_others(self, rank: int) -> list[FileIO]:
        """Return the files that a new process for this rank closes."""
        return [file for other, file in self._files.items() if other != rank]


def find_kept_memory(rank: int) -> int | None:
    """Return the descriptor that this process, a rank, has inherited; None: there is none."""
    name = f"/memfd:{_NAME.format(rank=rank)} (deleted)"
    with contextlib.suppress(FileNotFoundError):  # not Linux
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the one that lists the folder
                if os.readlink(entry) == name:
                    return int(entry.name)
    return None
