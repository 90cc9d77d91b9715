"""Operations in progress: their handles (torch's Work) and futures, their order, and how torch's tools see them.

A rank's collectives run in the order in which its threads started them. If the caller waits for a call at once and
nothing is queued, the call runs on the caller's thread. All others run on the group's helper thread, one after the
other, while the rank computes.

`torch.profiler` and `CommDebugMode` see operations like those of Gloo. torch records the calls of backends in C++: the
operator, such as ``c10d::allreduce_``, and in it ``gloo:all_reduce``. This records those of the groups here, where the
latter is ``shm:all_reduce``, on the thread that started them and until they are done, wherever they run.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.profiler import record_function
from torch.utils import _python_dispatch as python_dispatch

from axon_nb.comm.errors import CollectiveMismatchError, TensorError
from axon_nb.comm.shared_memory.segment.pages import GroupLeftError

_SLICE_S = 0.05
Job = Callable[[], None]
HARMLESS = (CollectiveMismatchError, TensorError)
"""These are raised before any data moves, so the group stays usable."""
is_profiling: Callable[[], bool] = (
    getattr(torch.autograd, "_profiler_enabled", lambda: False)
    if hasattr(record_function, "_call_end_callbacks_on_future")
    else lambda: False
)
"""Whether a profiler records this thread."""
_modes: Callable[[], list[Any]] = getattr(python_dispatch, "_get_current_dispatch_mode_stack", list)
_OPERATORS = {
    "all_reduce": "allreduce_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "all_gather": "allgather_",
    "all_gather_single": "_allgather_base_",
    "gather": "gather_",
    "scatter": "scatter_",
    "reduce_scatter": "reduce_scatter_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "all_to_all": "alltoall_",
    "all_to_all_single": "alltoall_base_",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv_",
}
"""By operation, the operator of c10d that calls it on Gloo."""


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


class Order:
    """The queue of one group.

    Args:
        name: Name of the helper thread.
        leave: Called with an error after which the group is unusable.
        has_left: Whether this rank has left the group.
    """

    def __init__(self, name: str, leave: Callable[[BaseException], None], has_left: Callable[[], bool]) -> None:
        self._name = name
        self.leave = leave
        self._has_left = has_left
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._jobs: deque[tuple[Job, SharedWork]] = deque()
        self._is_busy = False
        """Whether a thread is running a job. Set in the same step that takes a job, so that no later job can overtake
        it."""
        self._helper: threading.Thread | None = None
        self._closed = False

    def run_now(self, job: Job) -> bool:
        """Run `job` on this thread if nothing is queued; return whether it ran.

        An interrupt can arrive at any line, here and in the other methods that a caller's thread runs. What it leaves
        half-done is never continued: this rank leaves the group.
        """
        try:
            with self._lock:
                if self._is_busy or self._jobs:
                    return False
                self._is_busy = True
            self._run(job)
        except BaseException as error:
            self._leave_after(error)
            raise
        return True

    def _run(self, job: Job) -> None:
        """Run a job whose turn it is."""
        try:
            job()
        except BaseException as error:
            self._leave_after(error)  # before the next job begins
            raise
        finally:
            self._done()

    def _leave_after(self, error: BaseException) -> None:
        if not isinstance(error, HARMLESS):
            self.leave(error)

    def _done(self) -> None:
        with self._lock:
            self._is_busy = False
            if self._jobs or self._closed:
                self._changed.notify()

    def run_or_put(self, job: Job, work: SharedWork, deadline: float) -> None:
        """Run `job` as `run_now` does, or queue it as `put` does; called on the thread that waits for `work`."""
        try:
            if not self.run_now(job):
                work.run_in_wait(lambda _: None)
                self.put(job, work)
                return
            work.finish()
        except BaseException as error:
            work.finish(error)
            raise

    def put(self, job: Job, work: SharedWork, *, in_wait: bool = False) -> None:
        """Queue `job` for the helper thread; it runs after all earlier jobs and completes `work`.

        Args:
            job: The operation.
            work: Its handle.
            in_wait: Whether a thread that waits for `work` may run the job when its turn comes before the helper takes
                it.
        """
        try:
            if in_wait:
                work.run_in_wait(functools.partial(self._take_over, work), is_queued=True)
            with self._lock:
                self._jobs.append((job, work))
                # A callback of the helper's last job may wait for this one: a new helper takes its place.
                if self._helper in (None, threading.current_thread()):
                    helper = threading.Thread(target=self._serve, name=self._name, daemon=True)
                    helper.start()
                    self._helper = helper
                self._changed.notify()
        except BaseException as error:
            self.leave(error)
            work.finish(error)
            raise

    def _take_over(self, work: SharedWork, deadline: float) -> None:
        """Run the job of `work` on this thread if it is next."""
        try:
            with self._lock:
                if self._is_busy or not self._jobs or self._jobs[0][1] is not work:
                    return
                self._is_busy = True
                job, _ = self._jobs.popleft()
            self._run(job)
            work.finish()
        except BaseException as error:
            self._leave_after(error)
            work.finish(error)
            raise

    def close(self) -> None:
        """Stop the helper thread after the jobs that are queued."""
        with self._lock:
            self._closed = True
            helper = self._helper
            self._changed.notify_all()  # an interrupt may have left a second helper
        if helper is not None and helper is not threading.current_thread():
            helper.join(5)

    def _next(self) -> tuple[Job, SharedWork] | None:
        """Wait for the next job, and for the job before it to finish; None: closed, or there is a new helper."""
        with self._lock:
            while self._helper is threading.current_thread():
                if not self._jobs:
                    if self._closed:
                        return None
                    self._changed.wait()
                elif self._is_busy and not self._has_left():
                    # An interrupt may leave the queue busy; this rank has then left the group.
                    self._changed.wait(_SLICE_S)
                else:
                    self._is_busy = True
                    return self._jobs.popleft()
        return None

    def _serve(self) -> None:
        while (item := self._next()) is not None:
            job, work = item
            failure: Any = None
            try:
                self._run(job)
            except BaseException as error:
                failure = error
            work.finish(failure)
            del item, job, work, failure


def record(name: str, start: Callable[[], SharedWork], operator: str = "") -> SharedWork:
    """Start an operation, and record it from now until it is done.

    Args:
        name: The operation, such as ``all_reduce``.
        start: Starts it.
        operator: Its operator, if it is not the usual one of the operation.
    """
    with record_function(f"c10d::{operator or _OPERATORS[name]}"), record_function(f"shm:{name}") as event:
        work = start()
        if not work.is_completed():
            event._call_end_callbacks_on_future(work.get_future())
        return work


class _Operator:
    """Stands for an operator of c10d that a mode counts: calling it does nothing."""

    def __init__(self, name: str) -> None:
        self._overloadpacket = getattr(torch.ops.c10d, name, None)

    def __call__(self, *_: Any, **__: Any) -> None: ...

    def __str__(self) -> str:
        return f"{self._overloadpacket}.default"


def count(name: str, tensors: list[torch.Tensor], operator: str = "") -> None:
    """Have every active `CommDebugMode` count an operation; for the arguments see `record`."""
    debug = sys.modules.get("torch.distributed.tensor.debug")
    if debug is not None:
        for mode in _modes():
            if isinstance(mode, debug.CommDebugMode):
                mode.__torch_dispatch__(_Operator(operator or _OPERATORS[name]), (), (tensors,), {})
