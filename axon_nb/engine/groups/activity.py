"""What this rank does in its groups right now: read by the sampler, the status and the recovery."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

__all__ = ["Call", "begin", "begin_cell", "collectives", "current_wait", "end", "forget_all", "pending", "started"]


@dataclass(slots=True, eq=False)
class Call:
    """One communication call that has begun and not ended."""

    name: str
    """The operation, such as ``allreduce``."""
    group: str
    """Name of the process group."""
    sequence: int
    """How many collectives this rank has begun in the group, this one included; 0 for send and recv."""
    peer: int
    """Group rank of the other side for send and recv, -1 otherwise."""
    bytes: int
    """Payload on this rank."""
    started_ns: int
    number: int
    """Running number of communication calls on this rank."""
    waited_by: int = 0
    """Identifier of the thread that waits for it, 0 while none does."""
    waited_ns: int = 0
    """Since when it is waited for, on the clock of `started_ns`; 0: not, or nobody watches."""
    refusal: str = ""
    """Why waiting for it is in vain; empty when it is not."""


_numbers = itertools.count(1)
_open: dict[int, Call] = {}
_started = 0
_collectives = 0


def begin_cell() -> None:
    """A cell begins: its collectives are counted from here."""
    global _collectives
    _collectives = 0


def begin(name: str, group: str, sequence: int, peer: int, size: int) -> Call:
    """A call begins; see `Call`."""
    global _started, _collectives
    _collectives += sequence > 0
    call = Call(name, group, sequence, peer, size, time.monotonic_ns(), next(_numbers))
    _open[call.number] = call
    _started = call.number
    return call


def end(call: Call) -> None:
    """A call has ended."""
    _open.pop(call.number, None)


def started() -> int:
    """How many calls have begun since the rank joined."""
    return _started


def collectives() -> int:
    """How many collectives of any group the cell has begun."""
    return _collectives


def pending() -> list[Call]:
    """The calls that have begun and not ended, oldest first."""
    calls = list(_open.values())  # copied first: other threads begin and end calls
    return sorted(calls, key=lambda call: call.number)


def current_wait(thread: int) -> Call | None:
    """The call that `thread` waits for."""
    return next((call for call in pending() if call.waited_by == thread), None)


def forget_all() -> None:
    """The groups are formed anew: nothing is under way."""
    _open.clear()
