"""The handle of one operation: what torch calls a Work, and its future."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

__all__ = ["JoinedWork", "SharedWork", "done_work"]

_SLICE_S = 0.05


class SharedWork(Work):
    """An operation that has begun.

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
        self._base: Any = None
        self._future: Any = None
        self.source = -1
        """Whom a receive from any rank was from."""
        self.keep: Any = None
        """What must live as long as the operation."""

    def run_in_wait(self, drive: Callable[[float], None]) -> None:
        """Have the thread that waits take the operation forward.

        Args:
            drive: Does so until the operation is over or a limit on `time.monotonic` has come.
        """
        self._drive = drive

    def finish(self, error: BaseException | None = None) -> None:
        """The operation is over; from any thread, once."""
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
        if base is not None:
            base.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is over.

        Raises:
            RuntimeError: it failed, or `timeout` is over; then it goes on.
        """
        if not self._over:
            limit = float("inf")
            if timeout is not None and timeout > timedelta(0):
                limit = time.monotonic() + timeout.total_seconds()
            self._sleep(limit)
        if self._error is not None:
            raise self._error
        return True

    def _sleep(self, limit: float) -> None:
        if (drive := self._drive) is not None:
            drive(limit)
        sleeper = threading.Lock()
        sleeper.acquire()
        with self._lock:
            if self.is_completed():
                return
            self._sleepers.append(sleeper)
        while not sleeper.acquire(timeout=max(0.0, min(_SLICE_S, limit - time.monotonic()))):
            if time.monotonic() >= limit:
                with self._lock:
                    if sleeper in self._sleepers:
                        self._sleepers.remove(sleeper)
                raise RuntimeError("Operation timed out: it has not ended within the limit of its wait")

    def get_future(self) -> Any:
        """A future of the outputs.

        An exception that `Future.set_exception` sets makes C++ code that waits, such as DDP's, crash; one that is
        raised in a `then` callback becomes an error there.
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
        """The output tensors.

        Raises:
            RuntimeError: the operation failed.
        """
        if self._error is not None:
            raise self._error
        return self._outputs

    def is_completed(self) -> bool:
        """Whether the operation is over."""
        return self._over

    def is_success(self) -> bool:
        """Whether it is over and has not failed."""
        return self._over and self._error is None

    def exception(self) -> BaseException | None:
        """Why it failed."""
        return self._error

    def synchronize(self) -> None:
        """Nothing: what it wrote is there when the wait is over."""

    def source_rank(self) -> int:
        """Whom a receive was from."""
        return self.source

    _source_rank = source_rank


class _Done(SharedWork):
    """An operation that was over before its handle was needed: one for all of them."""

    def finish(self, error: BaseException | None = None) -> None:
        """Do nothing."""


_done: list[SharedWork] = []


def done_work() -> SharedWork:
    """The handle of operations that are over and have no result."""
    if not _done:
        work = _Done([])
        work._over = True
        _done.append(work)
    return _done[0]


class JoinedWork(SharedWork):
    """Several operations that were begun together.

    Args:
        works: Their handles.
    """

    def __init__(self, works: list[SharedWork]) -> None:
        super().__init__([])
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all are over.

        Raises:
            RuntimeError: one failed, or `timeout` is over.
        """
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all are over."""
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[torch.Tensor]:
        """The output tensors of all."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Any:
        """A future of the outputs."""
        joined = torch.futures.collect_all([work.get_future() for work in self._works])
        return joined.then(lambda _: self.result())
