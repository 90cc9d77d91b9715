"""Messages that are not complete: those that this rank sends, those that it receives, and those that arrive."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from axon_nb.comm.shared_memory.segment.rings import Head
from axon_nb.comm.shared_memory.work import SharedWork

__all__ = ["ANY", "Arrival", "Receive", "Send"]

ANY = -1
"""As the source of a receive: whoever sends first."""


@dataclass(slots=True, eq=False)
class Send:
    """A message that this rank sends."""

    work: SharedWork
    address: int
    size: int
    tag: int
    line: int
    number: int
    done: int = 0
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class Receive:
    """A receive for which no message has arrived."""

    work: SharedWork
    address: int
    size: int
    source: int
    tag: int
    finish: Callable[[], None] | None
    """Copies a received message to its destination; None: it is already there."""

    def fits(self, tag: int, source: int) -> bool:
        """Whether it is for messages with this tag from this rank."""
        return self.tag == tag and self.source in (ANY, source)


@dataclass(slots=True, eq=False)
class Arrival:
    """A message that is arriving, or has arrived before its receive."""

    source: int
    head: Head
    """Of its first piece."""
    receive: Receive | None
    kept: Any = None
    """Memory of this process, for a message that arrived before its receive."""
    done: int = 0

    def target(self) -> int:
        """Address for the next piece; 0: discard it, because the message is longer than expected."""
        if self.kept is not None:
            return ctypes.addressof(self.kept) + self.done
        assert self.receive is not None
        return self.receive.address + self.done if self.head.total <= self.receive.size else 0
