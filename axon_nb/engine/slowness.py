"""Slows this rank down while a cell runs, as `%distributed slow` asks.

It slows computing, and messages over slow links. Computing is the CPU time of the main thread between two waits.
The rank sleeps (factor - 1) times as long at its next call, step or recorded forward or backward, or at the end of the
cell. A message is sent as ever, and its operation ends later: on a helper thread, so that a rank that does not wait
computes meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.records.performance.slowness import Slowness, collective_delay_s, message_delay_s
from axon_nb.records.waits.functions import PUBLIC_NAMES

_SLICE_S = 0.05
_SHORTEST_S = 0.001
"""Shorter sleeps are put off: they take longer than asked."""


class Slowdown:
    """What is slowed on this rank; nothing until a cell says so.

    Args:
        raise_if_aborted: Called every 50 ms while the rank sleeps.
        run_in_thread: Runs a function on another thread.
    """

    def __init__(self, raise_if_aborted: Callable[[], None], run_in_thread: Callable[[Callable[[], None]], None]):
        self._raise_if_aborted = raise_if_aborted
        self._run_in_thread = run_in_thread
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
            self._pay(time.sleep)
            self._counted_ns = time.thread_time_ns()

    def skip(self) -> None:
        """Do not count what the main thread has done since the last sleep: it waited, and moved data."""
        if self._factor != 1.0 and threading.current_thread() is threading.main_thread():
            self._counted_ns = time.thread_time_ns()

    def _pay(self, wait: Callable[[float], None]) -> None:
        start = time.monotonic()
        self._sleep_until(start + self._debt_s, wait)
        self._debt_s -= time.monotonic() - start

    def _sleep_until(self, end: float, wait: Callable[[float], None] = time.sleep) -> None:
        while (left := end - time.monotonic()) > 0:
            wait(min(left, _SLICE_S))
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
        elif name.startswith("reduce_scatter"):
            size *= len(ranks)
        return collective_delay_s(self._slowness, name, ranks, self._rank, size, root=ranks[root])

    def start(self, work: Callable[[], None]) -> None:
        """Run a function on another thread."""
        self._run_in_thread(work)

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

        slowdown.start(finish)

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
