"""What this rank does in its groups right now: read by the sampler, the status and the recovery.

Communication with ranks that do not run the cell: refused before it begins, when it can be known to be in vain.

It can be known when the notebook says that the cell is alone: it was sent in blocking form, so that none is sent
beside it, no other cell runs, and no rank outside has an open call or a thread of the user's that might communicate.
Everything else (cells in the background that meet, threads that serve) is left to the deadlock watch, which sees both
sides. A call that is begun without waiting for it is legitimate, too: a later cell may bring the other side; it is
refused when this cell waits for it.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from axon_nb.engine.collective_names import describe_call, public_call
from axon_nb.errors import UsageError
from axon_nb.records.ranks import format_ranks

__all__ = [
    "Call",
    "begin",
    "begin_cell",
    "collectives",
    "current_wait",
    "end",
    "enter",
    "forget_all",
    "is_alone",
    "leave",
    "pending",
    "refusal",
    "started",
]


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


_alone: list[frozenset[int]] = []


def enter(ranks: Sequence[int] | None) -> None:
    """A cell begins; `ranks`: those that run it, when no others can take part; None: others can, or all run it."""
    _alone[:] = [] if ranks is None else [frozenset(ranks)]


def leave() -> None:
    """The cell is over; what it has begun may be waited for in the next."""
    if _alone:
        _alone.clear()
        for call in pending():
            call.refusal = ""


def is_alone() -> bool:
    """Whether communication with ranks outside the cell is in vain."""
    return bool(_alone)


def refusal(group: dist.ProcessGroup, name: str, peer: int) -> str:
    """Why an operation cannot end; empty when it can, or when that is not known.

    Args:
        group: The group.
        name: The operation, such as ``allreduce``.
        peer: Group rank of the other side of a send or recv; -1: any, or none.

    Raises:
        UsageError: it cannot end, and the caller would wait for it at once.
    """
    if not _alone or threading.current_thread() is not threading.main_thread():
        return ""
    cell = _alone[0]
    members = dist.get_process_group_ranks(group)
    if name in ("recv", "send"):
        needed = {members[peer]}
    elif name == "recv_anysource":
        needed = set() if len(cell.intersection(members)) > 1 else set(members) - cell
    else:
        needed = set(members)
    if not (outside := needed - cell):
        return ""
    text = _sentence(describe_call(name), members, cell, outside, one_to_one=name in ("recv", "send"))
    if public_call(sys._getframe(1))[1]:
        raise UsageError(text)
    return text


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"


def _sentence(what: str, members: Sequence[int], cell: frozenset[int], outside: set[int], *, one_to_one: bool) -> str:
    where = f"with {_named(sorted(outside))}" if one_to_one else f"on the group of {_named(sorted(members))}"
    verb = "does" if len(outside) == 1 else "do"
    fix = "Run the cell on all ranks"
    if one_to_one:
        fix = f"Run the cell on {_named(sorted(cell | outside))}"
    elif len(cell) > 1:
        fix = "Use `group=subgroup`, the group of this cell's ranks, or run the cell on all ranks"
    absent = f"{_named(sorted(outside))} {verb} not run this cell"
    return f"{what}, {where}, in a cell of {_named(sorted(cell))}: {absent}. {fix}."
