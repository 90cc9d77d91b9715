"""One process of a check: which rank it is, and where it meets the others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

__all__ = ["CheckProcess"]

_WAIT_S = 20.0
_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class CheckProcess:
    """One process of a check."""

    DIED_ON_PURPOSE: ClassVar[int] = 77
    """The exit status after which a newcomer is forked in its place."""

    folder: Path
    """Private to the check, and shared by its processes."""
    rank: int
    num_ranks: int
    newcomer: bool = False
    """Whether it takes the rank of one that died."""

    @property
    def log(self) -> Path:
        """What the process printed."""
        return self.folder / f"log{self.rank}"

    def die(self) -> NoReturn:
        """End this process at once, as a crash would; a newcomer takes its rank."""
        os._exit(self.DIED_ON_PURPOSE)

    def fail(self, error: BaseException) -> None:
        """Leave word of why this process fails."""
        self.note("failure", f"{type(error).__name__}: {str(error).strip()[:300]}" if str(error) else repr(error))

    def failure(self) -> str:
        """Why it failed; empty where it left no word."""
        path = self._path("failure")
        return path.read_text() if path.exists() else ""

    def note(self, name: str, text: str = "") -> None:
        """Leave a note that the other processes can wait for."""
        path = self._path(name)
        partial = path.with_name(f".{path.name}")
        partial.write_text(text)
        partial.rename(path)

    def wait_for(self, name: str, rank: int) -> str:
        """The note that another rank leaves.

        Raises:
            TimeoutError: it left none within 20 s.
        """
        path = self.folder / f"{name}{rank}"
        self.wait_until(path.exists, f"rank {rank} left no note {name!r}")
        return path.read_text()

    @staticmethod
    def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
        """Wait until a condition holds.

        Raises:
            TimeoutError: it did not within 20 s; the text is `otherwise`.
        """
        end = time.monotonic() + _WAIT_S
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"{otherwise} in {_WAIT_S:g} s")
            time.sleep(_POLL_S)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{self.rank}"
