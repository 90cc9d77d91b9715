"""Messages that are not complete: those that this rank sends, those that it receives, and those that arrive."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from axon_nb.comm.shared_memory.segment.announcement import dtype_name
from axon_nb.comm.shared_memory.segment.rings import Head
from axon_nb.comm.shared_memory.work import SharedWork

ANY = -1
"""As the source of a receive: whoever sends first."""


@dataclass(slots=True, eq=False)
class Send:
    """A message that this rank sends."""

    work: SharedWork
    address: int
    size: int
    dtype: int
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
    dtype: int
    source: int
    tag: int
    finish: Callable[[], None] | None
    """Copies a received message to its destination; None: it is already there."""

    def fits(self, tag: int, source: int) -> bool:
        """Whether it is for messages with this tag from this rank."""
        return self.tag == tag and self.source in (ANY, source)

    def accepts(self, head: Head) -> bool:
        """Whether it has room for a message, and for its dtype."""
        return head.total <= self.size and head.dtype == self.dtype


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
        """Address for the next piece; 0: discard it, because the receive does not accept the message."""
        if self.kept is not None:
            return ctypes.addressof(self.kept) + self.done
        assert self.receive is not None
        return self.receive.address + self.done if self.receive.accepts(self.head) else 0


def refusal(source: int, target: int, line: int, *, sent: tuple[int, int], taken: tuple[int, int]) -> str:
    """Return why a message was not received.

    Args:
        source: Global rank of the sender.
        target: The receiver's target.
        line: Line of the cell that sends; 0: unknown.
        sent: Bytes of the message, and the number of its dtype.
        taken: What the receiver expects.
    """
    place = f"send at line {line}" if line else "send"
    ends = f"rank {source} sends {{}}, but rank {target} receives into {{}}; "
    if sent[1] != taken[1]:
        ends += "both tensors must have the same dtype."
        return f"{place}: {ends.format(dtype_name(sent[1]), dtype_name(taken[1]))}"
    ends += "the receiver's tensor must be as large as the sender's."
    return f"{place}: {ends.format(f'{sent[0]:,} bytes', f'{taken[0]:,} bytes')}"
