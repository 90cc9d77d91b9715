"""One process of a check: its rank, and how it communicates with the others through files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

_TIMEOUT_S = 20.0
_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class CheckProcess:
    """One process of a check."""

    DIED_ON_PURPOSE: ClassVar[int] = 77
    """Exit status after which a replacement is forked."""

    folder: Path
    """Private to the check, and shared by its processes."""
    rank: int
    num_ranks: int
    is_replacement: bool = False
    """Whether it takes the rank of a process that died."""

    @property
    def log(self) -> Path:
        """The file with what the process printed."""
        return self.folder / f"log{self.rank}"

    def die(self) -> NoReturn:
        """Exit at once, as in a crash; a replacement takes the rank."""
        os._exit(self.DIED_ON_PURPOSE)

    def fail(self, error: BaseException) -> None:
        """Record why this process fails."""
        self.note("failure", f"{type(error).__name__}: {str(error).strip()[:300]}" if str(error) else repr(error))

    def failure(self) -> str:
        """Return why the process failed; empty if it recorded nothing."""
        path = self._path("failure")
        return path.read_text() if path.exists() else ""

    def note(self, name: str, text: str = "") -> None:
        """Write a note that the other processes can wait for."""
        path = self._path(name)
        partial = path.with_name(f".{path.name}")
        partial.write_text(text)
        partial.rename(path)

    def wait_for(self, name: str, rank: int) -> str:
        """Wait for the note of another rank and return it.

        Raises:
            TimeoutError: the rank wrote none within 20 s.
        """
        path = self.folder / f"{name}{rank}"
        self.wait_until(path.exists, f"rank {rank} wrote no note {name!r}")
        return path.read_text()

    @staticmethod
    def wait_until(condition: Callable[[], bool], message: str) -> None:
        """Wait until a condition holds.

        Raises:
            TimeoutError: it did not within 20 s; `message` starts the text.
        """
        end = time.monotonic() + _TIMEOUT_S
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"{message} within {_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{self.rank}"
