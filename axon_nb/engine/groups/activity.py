"""What this rank is doing in its groups right now; read by the sampler, the status and the recovery.

Refuses communication with ranks that do not run the cell, if it is certain that it could never complete.

This is certain if the notebook says that the cell is exclusive: it was sent in blocking form, so that none follows, no
other cell runs, and no rank outside has a pending call or a user thread that might communicate. All else (background
cells that communicate with each other, threads that serve) is left to the deadlock watch, which sees both sides.
Starting a call without waiting for it is legitimate: a later cell may start the other side. Such a call is refused when
this cell waits for it.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.engine.collective_names import describe_call, public_call
from axon_nb.errors import UsageError
from axon_nb.records.ranks import name_ranks


@dataclass(slots=True, eq=False)
class Call:
    """A communication call in progress."""

    name: str
    """The operation, such as ``allreduce``."""
    group: str
    """Name of the process group."""
    sequence: int
    """Number of collectives started by this rank in the group, including this one; 0 for send and recv."""
    peer: int
    """Group rank of the peer for send and recv, -1 otherwise."""
    bytes: int
    """Payload on this rank."""
    started_ns: int
    number: int
    """Sequence number of communication calls on this rank."""
    line: int = 0
    """Line of the cell that called it; 0 if unknown, or nobody watches."""
    waiting_thread: int = 0
    """Identifier of the thread that waits for it; 0 if none does."""
    wait_started_ns: int = 0
    """When the wait started, on the clock of `started_ns`; 0 if nothing waits, or nobody watches."""
    refusal: str = ""
    """Why waiting for it would never end; empty if it may end."""


def peer_of(name: str, args: tuple[Any, ...]) -> int:
    """Return the group rank of the peer of a send or recv; -1: any."""
    return int(args[1]) if name in ("send", "recv") and len(args) > 1 else -1


def payload_bytes(args: tuple[Any, ...]) -> int:
    """Return the bytes of an operation's first argument: a tensor, or lists of them."""
    first = args[0] if args else None
    if type(first) is list and len(first) == 1:
        first = first[0]  # as in most calls
    if type(first) is torch.Tensor:
        return first.nbytes
    if isinstance(first, (list, tuple)) and first and isinstance(first[0], (list, tuple)):
        first = first[0]
    if isinstance(first, (list, tuple)):
        return sum(item.nbytes for item in first if isinstance(item, torch.Tensor))
    return first.nbytes if isinstance(first, torch.Tensor) else 0


class CallLog:
    """The communication calls of a rank, and whether its cell may communicate with all ranks."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, Call] = {}
        self._threads: set[str] = set()
        self._left: list[str] = []
        self.before: Callable[[str], None] | None = None
        """Called with the name of each operation before it starts; None: nothing is."""
        self.num_calls = 0
        """Number of calls started since the rank joined."""
        self.num_collectives = 0
        """Number of collectives, in any group, that the cell has started."""
        self._earlier = 0
        self.exclusive: frozenset[int] | None = None
        """The cell's ranks, if communication with others can never complete; None if it may."""

    def begin_cell(self) -> None:
        """Count collectives from zero."""
        self.num_collectives, self._earlier = 0, self.num_calls
        self._threads.clear()
        self._left.clear()

    def begin_exclusive(self, ranks: Sequence[int] | None) -> None:
        """Start a cell on these ranks, if no others can take part; None: others may, or all ranks run the cell."""
        self.exclusive = None if ranks is None else frozenset(ranks)

    def end_exclusive(self) -> None:
        """Finish the cell; calls that it started may be waited for in the next one."""
        if self.exclusive is not None:
            self.exclusive = None
            for call in self.pending():
                call.refusal = ""

    def start(self, name: str, group: str, sequence: int, peer: int, size: int) -> Call:
        """Record that a call starts; for the arguments see `Call`."""
        if self.before is not None:
            self.before(name)
        self.num_collectives += sequence > 0
        if threading.get_ident() != threading.main_thread().ident:
            self._threads.add(threading.current_thread().name)
        call = Call(name, group, sequence, peer, size, time.monotonic_ns(), next(self._numbers))
        self._open[call.number] = call
        self.num_calls = call.number
        return call

    def finish(self, call: Call) -> None:
        """Record that a call finished."""
        self._open.pop(call.number, None)

    def retract(self, call: Call) -> bool:
        """Forget a call that failed before it began; return whether it was in progress.

        The others take this rank's next collective for it, so later ones of the group have the number before theirs.
        """
        if self._open.pop(call.number, None) is None or not call.sequence:
            return False
        self.num_collectives -= call.number > self._earlier
        for later in self.pending():
            if later.group == call.group and later.sequence > call.sequence:
                later.sequence -= 1
        return True

    def note_left(self, call: Call, error: BaseException) -> None:
        """Record that this rank has left a call before its end, because a signal handler of the user raised `error`."""
        self._left.append(f"{describe_call(call.name)} ({type(error).__name__})")

    def left(self) -> tuple[str, ...]:
        """Return the calls that this rank has left in this cell, such as ``all_reduce at line 3 (TimeoutError)``."""
        return tuple(self._left)

    def calling_threads(self) -> tuple[str, ...]:
        """Return the names of the user's threads that communicated in this cell, besides the main thread."""
        # Autograd's threads, which Python does not know, communicate for the main thread.
        return tuple(sorted(name for name in self._threads if not name.startswith(("Dummy-", "axon_nb"))))

    def pending(self) -> list[Call]:
        """Return the calls in progress, oldest first."""
        calls = list(self._open.values())  # copied first: other threads start and finish calls
        return sorted(calls, key=lambda call: call.number)

    def current_wait(self, thread: int) -> Call | None:
        """Return the call that `thread` waits for."""
        return next((call for call in self.pending() if call.waiting_thread == thread), None)

    def clear(self) -> None:
        """Forget all calls: the groups are rebuilt."""
        self._open.clear()

    def refusal_reason(self, group: dist.ProcessGroup, name: str, peer: int) -> str:
        """Explain why an operation cannot complete; empty if it can, or if that is not known.

        Args:
            group: The process group.
            name: The operation, such as ``allreduce``.
            peer: Group rank of the peer of a send or recv; -1: any, or none.

        Raises:
            UsageError: it cannot complete, and the caller would wait for it at once.
        """
        cell = self.exclusive
        if cell is None or threading.current_thread() is not threading.main_thread():
            return ""
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


def _sentence(what: str, members: Sequence[int], cell: frozenset[int], outside: set[int], *, one_to_one: bool) -> str:
    where = f"with {name_ranks(outside)}" if one_to_one else f"on the group of {name_ranks(members)}"
    verb = "does" if len(outside) == 1 else "do"
    fix = "Run the cell on all ranks"
    if one_to_one:
        fix = f"Run the cell on {name_ranks(cell | outside)}"
    elif len(cell) > 1:
        fix = "Use `group=subgroup`, the group of this cell's ranks, or run the cell on all ranks"
    return f"{what} {where} in a cell on {name_ranks(cell)}: {name_ranks(outside)} {verb} not run this cell. {fix}."
