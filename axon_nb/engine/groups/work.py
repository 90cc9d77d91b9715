"""The handle of one collective: an abort ends its wait, and its future can be failed from another thread."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Work

from axon_nb.comm.errors import CommError, TensorError, TensorMismatchError
from axon_nb.comm.shared_memory.segment.errors import GroupLeftError
from axon_nb.comm.shared_memory.work import SharedWork
from axon_nb.engine.groups.abort import AbortedError
from axon_nb.engine.groups.activity import Call
from axon_nb.engine.groups.state import GroupsState
from axon_nb.errors import UsageError
from axon_nb.records.spans import is_suppressed, ring

_SLICE = timedelta(milliseconds=50)
_POLL_S = 0.05


class _Group(Protocol):
    state: GroupsState
    timeout: timedelta

    def settle(self, call: Call, error: BaseException | None) -> None: ...


class RecoverableWork(Work):
    """Wraps the work of the inner group.

    Args:
        inner: The inner group's work.
        call: The operation.
        group: Its group. Without the group's timeout, a recv on Gloo would use the one for connecting.
        sliced: Whether the inner wait may be cut into slices. A send or recv whose wait times out loses its
            connection, and reduce_scatter ignores the timeout: those are waited for in a helper thread.
        keep_alive: Objects that must live as long as the operation runs.
        on_finish: Called once with `call` when the operation has finished.
    """

    _done = False
    _future: Any = None

    def __init__(
        self,
        inner: Any,
        call: Call,
        *,
        group: _Group,
        sliced: bool,
        keep_alive: Any,
        on_finish: Callable[[Call], None],
    ) -> None:
        super().__init__()
        self._inner = inner
        self._call = call
        self._group = group
        self._state = group.state
        self._sliced = sliced
        self._keep_alive = keep_alive
        self._on_finish = on_finish
        if type(inner) is SharedWork and inner.runs_without_wait:  # its handle may be dropped, or only polled
            inner.when_done(functools.partial(group.settle, call))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the operation.

        Raises:
            AbortedError: the cell was aborted meanwhile, or a peer is gone.
            RuntimeError: the operation failed or timed out.
            UsageError: some of its ranks do not run the cell.
        """
        if self._done:
            return True
        if self._call.refusal:
            raise UsageError(self._call.refusal)
        end = None if not timeout or timeout <= timedelta(0) else time.monotonic() + timeout.total_seconds()
        self._state.slowdown.sleep()
        self._call.waiting_thread = threading.get_ident()
        if ring.watched and not is_suppressed("wait"):
            self._call.wait_started_ns = time.monotonic_ns()
        try:
            self._wait_sliced(end) if self._sliced else self._wait_in_helper(end)
        except Exception as error:
            if (described := self._describe(error)) is not error:
                raise described from None
            raise
        finally:
            self._call.waiting_thread = 0
            self._state.slowdown.skip()
        if not self._done:
            self._done = True
            self._on_finish(self._call)
        return True

    def _describe(self, error: Exception) -> Exception:
        """Return the error that a wait raises for one of the inner work, which may be the same."""
        if not isinstance(error, RuntimeError):  # a signal handler of the user raised it
            self._state.calls.note_left(self._call, error)
            return error
        name = self._call.name
        if isinstance(self._inner, SharedWork) and self._inner.is_completed():
            self._group.settle(self._call, error)  # it failed; otherwise, only this wait did
        if isinstance(error, AbortedError):
            return error
        if self._state.abort.is_set():
            return AbortedError(f"aborted while waiting in {name}")
        if isinstance(error, GroupLeftError):
            return AbortedError(f"lost a peer while waiting in {name}: {error}")
        if isinstance(error, CommError):  # all ranks raise it, and the group stays usable
            self._done = True
            if not never_began(error):
                self._on_finish(self._call)
        if "gloo" in str(error) and "timed out" not in str(error).lower():
            return AbortedError(f"lost a peer while waiting in {name}: {str(error)[-120:]}")
        return error

    def _wait_sliced(self, end: float | None) -> None:
        wait = self._inner.wait
        if isinstance(self._inner, SharedWork):
            wait = self._inner.wait_slice
            if end is not None:
                self._inner.leave_to_helper()
        while True:
            try:
                wait(_SLICE)
                return
            except RuntimeError as error:
                if "Operation timed out" not in str(error):
                    raise
            self._check(end)

    def _wait_in_helper(self, end: float | None) -> None:
        if self._inner.is_completed():
            self._inner.wait()
            return
        done = threading.Lock()  # setting an Event and waking from it takes several times as long
        done.acquire()
        failure: list[BaseException] = []

        def wait() -> None:
            try:
                # Without a timeout a send or recv uses the one for connecting, which a slow peer would exceed.
                self._inner.wait(self._group.timeout)
            except BaseException as error:
                failure.append(error)
            done.release()

        self._state.helpers.run(wait)
        while not done.acquire(timeout=_POLL_S):
            self._check(end)
        if failure:
            raise failure[0]

    def _check(self, end: float | None) -> None:
        if self._state.abort.is_set():
            raise AbortedError(f"aborted while waiting in {self._call.name}")
        if end is not None and time.monotonic() > end:
            raise RuntimeError(f"{self._call.name} timed out")

    def get_future(self) -> Any:
        """Return a future that an abort can fail.

        `Future.set_exception` sets a Python result that the C++ reducer reads as tensors, and crashes. An exception
        raised inside a `then` callback does become a C++ error.
        """
        if self._future is None:
            inner = self._inner.get_future()
            self._base = torch.futures.Future()  # type: ignore[var-annotated]
            self._lock = threading.Lock()
            self._fired = self._failed = False

            def unwrap(_: Any) -> Any:
                if self._failed:
                    raise AbortedError(f"aborted while waiting in {self._call.name}")
                try:
                    return inner.value()
                except RuntimeError as error:
                    if GroupLeftError.__name__ in str(error) or isinstance(error, GroupLeftError):
                        raise AbortedError(f"lost a peer while waiting in {self._call.name}: {error}") from None
                    raise

            self._future = self._base.then(unwrap)
            self._state.works_with_future.add(self)
            inner.add_done_callback(lambda _: self._resolve(failed=False))
        return self._future

    def _resolve(self, *, failed: bool) -> None:
        with self._lock:
            if self._fired:
                return
            self._fired, self._failed = True, failed
        if not failed and not self._done:
            self._done = True
            self._on_finish(self._call)
        self._base.set_result(None)

    def fail(self) -> None:
        """Fail the future from any thread: whatever waits for it raises `AbortedError`."""
        if self._future is not None:
            self._resolve(failed=True)

    def is_completed(self) -> bool:
        """Whether the operation has finished; a received tensor then has its values."""
        if not self._done and isinstance(self._inner, SharedWork) and self._inner.is_success():
            self._done = True
            self._on_finish(self._call)
        if self._done or not self._inner.is_completed():
            return self._done
        if self._call.sequence == 0 and not self._call.refusal:  # it may have to be copied back from host memory
            with contextlib.suppress(RuntimeError):  # `wait` raises it again
                self.wait()
        return True

    def is_success(self) -> bool:
        """Whether it succeeded."""
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        """Return its failure."""
        return self._inner.exception()

    def result(self) -> Any:
        """Return its output tensors."""
        return self._inner.result()

    def synchronize(self) -> None:
        """Do nothing: results on the CPU are complete after the wait."""

    def source_rank(self) -> int:
        """Return the sender of a recv from any rank."""
        return int(self._inner.source_rank())

    _source_rank = source_rank


def never_began(error: BaseException) -> bool:
    """Whether an operation over shared memory failed with it before it was announced: only this rank raises it."""
    return isinstance(error, TensorError) and not isinstance(error, TensorMismatchError)
