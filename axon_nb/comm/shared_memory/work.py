"""The handle of one operation (torch's Work), and its future."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from axon_nb.comm.shared_memory.segment.errors import GroupLeftError

_SLICE_S = 0.05


class SharedWork(Work):
    """An operation in progress.

    Args:
        outputs: The tensors that it writes.
    """

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs
        self._drive: Callable[[float], None] | None = None
        self._error: BaseException | None = None
        self._over = False
        self._lock = threading.Lock()
        self._sleepers: list[threading.Lock] = []
        self._is_queued = False
        self.end = 0.0
        """When a wait for a message times out, on `time.monotonic`; 0: nobody has waited yet."""
        self.checked_at = 0.0
        """When such a wait last checked which ranks are dead."""
        self._base: Any = None
        self._future: Any = None
        self.source = -1
        """The sender of a message that was received from any rank."""
        self.keep: Any = None
        """Objects that must live as long as the operation."""
        self._when_done: Callable[[BaseException | None], None] | None = None

    @property
    def runs_without_wait(self) -> bool:
        """Whether the operation is done, or continues if nobody waits for it."""
        return self._over or self._is_queued or self.keep is not None

    def when_done(self, function: Callable[[BaseException | None], None]) -> None:
        """Call `function` with the failure, if any, once the operation is done: from any thread, or now if it is."""
        with self._lock:
            if not self._over:
                self._when_done = function
                return
        function(self._error)

    def run_in_wait(self, drive: Callable[[float], None], *, is_queued: bool = False) -> None:
        """Let the thread that waits drive the operation.

        Args:
            drive: Drives the operation until it is done, or until a deadline on `time.monotonic`.
            is_queued: Whether the helper thread runs the operation otherwise. Such a drive may exceed its deadline.
        """
        self._drive, self._is_queued = drive, is_queued

    def leave_to_helper(self) -> None:
        """Let the helper thread run a queued operation, so that a wait with a timeout can end before it."""
        if self._is_queued:
            self._drive = None

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the operation as done; the first call counts, from any thread."""
        if error is not None and not isinstance(error, Exception):  # an interrupt is for the thread that it interrupted
            error = GroupLeftError(f"this rank left the group after a {type(error).__name__}")
        with self._lock:
            if self._over:
                return
            self._error = error
            self._over = True
            sleepers, base = self._sleepers, self._base
            self._sleepers = []
        self._drive = self.keep = None
        for sleeper in sleepers:
            sleeper.release()
        if self._when_done is not None:
            self._when_done(error)
        if base is not None:
            base.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is done.

        Raises:
            RuntimeError: it failed, or `timeout` expired; the operation then continues.
        """
        if not self._over and timeout is not None and timeout > timedelta(0):
            self.leave_to_helper()
        return self.wait_slice(timeout)

    def wait_slice(self, timeout: timedelta | None = None) -> bool:
        """Wait as `wait` does, but run the operation on this thread, even if that takes longer than `timeout`."""
        if not self._over:
            deadline = float("inf")
            if timeout is not None and timeout > timedelta(0):
                deadline = time.monotonic() + timeout.total_seconds()
            self._sleep(deadline)
        if self._error is not None:
            raise self._error
        return True

    def _sleep(self, deadline: float) -> None:
        if (drive := self._drive) is not None:
            drive(deadline)
        sleeper = threading.Lock()
        sleeper.acquire()
        with self._lock:
            if self.is_completed():
                return
            self._sleepers.append(sleeper)
        while not sleeper.acquire(timeout=max(0.0, min(_SLICE_S, deadline - time.monotonic()))):
            if self.is_completed():  # an interrupt ended `finish`
                return
            if time.monotonic() >= deadline:
                with self._lock:
                    if sleeper in self._sleepers:
                        self._sleepers.remove(sleeper)
                raise RuntimeError("Operation timed out: it did not finish within the timeout of its wait")

    def get_future(self) -> Any:
        """Return a future of the outputs.

        An exception set with `Future.set_exception` crashes C++ code that waits, such as DDP's; an exception raised in
        a `then` callback becomes an ordinary error there.
        """
        with self._lock:
            if self._future is None:
                base: Any = torch.futures.Future()
                self._future = base.then(lambda _: self.result())
                self._base = base
                over = self._over
            else:
                over = False
        if over:
            base.set_result(None)
        return self._future

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors.

        Raises:
            RuntimeError: the operation failed.
        """
        if self._error is not None:
            raise self._error
        return self._outputs

    def is_completed(self) -> bool:
        """Whether the operation is done."""
        return self._over

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return self._over and self._error is None

    def exception(self) -> BaseException | None:
        """Why it failed."""
        return self._error

    def synchronize(self) -> None:
        """Do nothing: after the wait, the results are in memory."""

    def source_rank(self) -> int:
        """Whom a receive was from."""
        return self.source

    _source_rank = source_rank


class _Done(SharedWork):
    """The handle of all operations that were done before a handle was needed."""

    def finish(self, error: BaseException | None = None) -> None:
        """Do nothing."""


@functools.cache
def done_work() -> SharedWork:
    """Return the handle of operations that are done and have no result."""
    work = _Done([])
    work._over = True
    return work


class JoinedWork(SharedWork):
    """Several operations that were started together.

    Args:
        works: Their handles.
    """

    def __init__(self, works: list[SharedWork]) -> None:
        super().__init__([])
        self._works = works

    def leave_to_helper(self) -> None:
        """Let helper threads run all operations."""
        for work in self._works:
            work.leave_to_helper()

    def wait_slice(self, timeout: timedelta | None = None) -> bool:
        """Wait until all are done, as `SharedWork.wait_slice` does."""
        for work in self._works:
            work.wait_slice(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all are done."""
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors of all."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Any:
        """A future of the outputs."""
        joined = torch.futures.collect_all([work.get_future() for work in self._works])
        return joined.then(lambda _: self.result())
