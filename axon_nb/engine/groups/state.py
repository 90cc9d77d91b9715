"""What all groups of a rank share: the abort flag, the log of calls in progress, the slowdown, the epoch of the groups.

The call log refuses communication with ranks that do not run the cell, if it is certain that it could never complete.
This is certain if the notebook says that the cell is exclusive: it was sent in blocking form, so that none follows, no
other cell runs, and no rank outside has a pending call or a user thread that might communicate. All else (background
cells that communicate with each other, threads that serve) is left to the deadlock watch, which sees both sides.
Starting a call without waiting for it is legitimate: a later cell may start the other side. Such a call is refused when
this cell waits for it.

The slowdown (`%distributed slow`) slows computing, and messages over slow links. Computing is the CPU time of the main
thread between two waits. The rank sleeps (factor - 1) times as long at its next call, step or recorded forward or
backward, or at the end of the cell. A message is sent as ever, and its operation ends later: on a helper thread, so
that a rank that does not wait computes meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct

from axon_nb.engine.frames import describe_call, public_call
from axon_nb.engine.groups.abort import AbortFlag, HelperThreads, NativeGroups
from axon_nb.engine.groups.gloo import GlooTransport
from axon_nb.errors import UsageError
from axon_nb.records.ranks import name_ranks
from axon_nb.records.slowness import Slowness, collective_delay_s, message_delay_s
from axon_nb.records.waits import PUBLIC_NAMES

_SLICE_S = 0.05
_SHORTEST_S = 0.001
"""Shorter sleeps are put off: they take longer than asked."""


class Call(Struct, eq=False):
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


def payload_bytes(name: str, args: tuple[Any, ...]) -> int:
    """Return the bytes of an operation's whole tensor: an all_gather's output, a reduce_scatter's input."""
    first = args[0] if args else None
    if "reduce_scatter" in name or (name == "gather" and not first):  # only the root of a gather passes outputs
        first = args[1]
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


class Slowdown:
    """What is slowed on this rank; nothing until a cell says so.

    Args:
        raise_if_aborted: Called every 50 ms while the rank sleeps.
        run_in_thread: Runs a function on another thread.
    """

    def __init__(self, raise_if_aborted: Callable[[], None], run_in_thread: Callable[[Callable[[], None]], None]):
        self._raise_if_aborted = raise_if_aborted
        self.run_in_thread = run_in_thread
        self._slowness = Slowness()
        self._rank = 0
        self._factor = 1.0
        self._counted_ns = 0
        self._debt_s = 0.0
        """How long to sleep; negative if earlier sleeps took longer than asked."""
        self._lock = threading.Lock()
        self._free_at: dict[object, float] = {}
        """By group or peer: when its link has carried all earlier messages."""

    def begin_cell(self, slowness: Slowness, rank: int) -> None:
        """Slow what this cell of this rank does."""
        self._slowness, self._rank, self._factor = slowness, rank, slowness.factor_of(rank)
        self._debt_s, self._counted_ns = 0.0, time.thread_time_ns()
        self._free_at.clear()

    def end_cell(self) -> None:
        """Sleep for the rest of the cell's computing, unless it is interrupted, and slow nothing more."""
        with contextlib.suppress(KeyboardInterrupt, RuntimeError):
            self.sleep()
        self._slowness, self._factor = Slowness(), 1.0

    def sleep(self) -> None:
        """Sleep for what the main thread has computed since the last wait or sleep.

        Raises:
            AbortedError: the cell is aborted.
        """
        if self._factor == 1.0 or threading.current_thread() is not threading.main_thread():
            return
        now_ns = time.thread_time_ns()
        self._debt_s += (self._factor - 1.0) * (now_ns - self._counted_ns) / 1e9
        self._counted_ns = now_ns
        if self._debt_s >= _SHORTEST_S:
            start = time.monotonic()
            self._sleep_until(start + self._debt_s)
            self._debt_s -= time.monotonic() - start
            self._counted_ns = time.thread_time_ns()

    def skip(self) -> None:
        """Do not count what the main thread has done since the last sleep: it waited, and moved data."""
        if self._factor != 1.0 and threading.current_thread() is threading.main_thread():
            self._counted_ns = time.thread_time_ns()

    def _sleep_until(self, end: float) -> None:
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _SLICE_S))
            self._raise_if_aborted()

    def late(self, work: Any, name: str, args: tuple[Any, ...], group: Any, size: int) -> Any:
        """Return a handle of an operation that ends when a slow link has carried its message; `work`, if none does.

        Args:
            work: Handle of the operation that was started.
            name: The operation, such as ``allreduce``.
            args: Its arguments.
            group: The process group.
            size: Payload on this rank, in bytes.
        """
        if not self._slowness.links or name in ("send", "monitored_barrier"):
            return work
        ranks, timeout = dist.get_process_group_ranks(group), group.timeout
        if name in ("recv", "recv_anysource"):

            def delay_s() -> float:
                source = args[1] if name == "recv" else work.source_rank()
                return message_delay_s(self._slowness, ranks[int(source)], self._rank, size)

            return LateWork(work, self, ("from", args[1] if name == "recv" else -1), delay_s, timeout)
        delay = self._collective_delay_s(PUBLIC_NAMES.get(name, name), args, ranks, size)
        return LateWork(work, self, tuple(ranks), lambda: delay, timeout) if delay else work

    def _collective_delay_s(self, name: str, args: tuple[Any, ...], ranks: list[int], size: int) -> float:
        root = next((int(option.rootRank) for option in args if hasattr(option, "rootRank")), 0)
        if name in ("gather", "scatter"):  # the root's list of parts comes first, or is empty elsewhere
            size = sum(one.nbytes for one in args[1 if name == "gather" else 0])
        return collective_delay_s(self._slowness, name, ranks, self._rank, size, root=ranks[root])

    def carry(self, link: object, seconds: float) -> None:
        """Sleep until a link has carried a message, after those before it.

        Args:
            link: What carries one message after the other.
            seconds: How long it takes.
        """
        with self._lock:
            end = max(self._free_at.get(link, 0.0), time.monotonic()) + seconds
            self._free_at[link] = end
        self._sleep_until(end)


class LateWork:
    """The handle of an operation that ends late.

    Args:
        inner: Handle of the operation; a thread waits for it.
        slowdown: What slows it.
        link: What carries one message after the other.
        delay_s: Returns how much later it ends, once `inner` has ended.
        timeout: Timeout of the group's operations; without it, a recv on Gloo uses the timeout for connecting.
    """

    def __init__(
        self, inner: Any, slowdown: Slowdown, link: object, delay_s: Callable[[], float], timeout: timedelta
    ) -> None:
        self._inner = inner
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._base: Any = torch.futures.Future()
        self._future = self._base.then(lambda _: self.result())

        def finish() -> None:
            try:
                inner.wait(timeout)
                slowdown.carry(link, delay_s())
            except BaseException as error:
                self._error = error
            self._done.set()
            self._base.set_result(None)

        slowdown.run_in_thread(finish)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; a wait that timed out can be repeated.

        Raises:
            RuntimeError: the operation failed, or the wait timed out.
        """
        if not self._done.wait(timeout.total_seconds() if timeout else None):
            raise RuntimeError("Operation timed out: a slow link has not carried it yet")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it has ended and has not failed."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return its failure."""
        return self._error

    def result(self) -> Any:
        """Return its output tensors.

        Raises:
            RuntimeError: it failed.
        """
        if self._error is not None:
            raise self._error
        return self._inner.get_future().value()

    def get_future(self) -> Any:
        """Return a future of the output tensors."""
        return self._future

    def source_rank(self) -> int:
        """Return the sender of a recv from any rank."""
        return int(self._inner.source_rank())


class GroupsState:
    """State that all groups of a rank share."""

    def __init__(self) -> None:
        self.abort = AbortFlag()
        self.calls = CallLog()
        self.gloo = GlooTransport()
        self.helpers = HelperThreads()
        """Threads for waits that cannot be cut into slices."""
        self.slowdown = Slowdown(self.abort.raise_if_set, self.helpers.run)
        """Slows what the cell computes and sends, if it is to be slow, or if a change is to be proven."""
        self.epoch = 0
        """How often the groups have been rebuilt."""
        self.installed = False
        """Whether torch creates recoverable groups."""
        self.rebuilding = False
        """Whether the last rebuild has not completed: it is running, or it failed."""
        self.creating: tuple[str, list[int], int] | None = None
        """The group that `new_group` creates on the main thread: name, global ranks, start in monotonic nanoseconds."""
        self.joined: Counter[str] = Counter()
        """How often this rank has begun to wait for others outside any group, by function, such as ``init_rpc``."""
        self.joining: tuple[str, tuple[int, ...], int] | None = None
        """The one it is in: function, global ranks, start in monotonic nanoseconds."""
        self.native: NativeGroups | None = None
        """The NCCL groups; None on a Gloo rank."""
        self.works_with_future: weakref.WeakSet[Any] = weakref.WeakSet()
        """Works of recoverable groups."""
        self.run = 0
        """Number of the cell that runs: the same on all its ranks, up to 2 ** 18."""
        self.skips_rendezvous = False
        """Whether new groups do not wait for their ranks; see `without_rendezvous`."""

    def begin_run(self, run: str) -> None:
        """Note that another cell runs from now on.

        Args:
            run: Its identifier, in hexadecimal digits; the same on all ranks that run it. Empty: unknown.
        """
        self.run = int(run[:8] or "0", 16) & 0x3FFFF

    @contextlib.contextmanager
    def without_rendezvous(self) -> Iterator[None]:
        """Skip `wait_for_peers` within, on a replacement: the other ranks have its groups and only rebuild them."""
        before, self.skips_rendezvous = self.skips_rendezvous, True
        try:
            yield
        finally:
            self.skips_rendezvous = before

    def fail_all_futures(self) -> None:
        """Fail every future in use, from any thread."""
        for work in list(self.works_with_future):
            work.fail()


_current = [GroupsState()]


def current_groups() -> GroupsState:
    """The state of the groups that torch knows: its registry of groups is the process's, and so is this slot."""
    return _current[0]


def set_current_groups(state: GroupsState) -> None:
    """Make `state` that of the groups that torch creates from now on."""
    _current[:] = [state]
