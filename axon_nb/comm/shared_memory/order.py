"""Runs a rank's collectives in the order in which its threads started them.

If the caller waits for a call at once and nothing is queued, the call runs on the caller's thread. All others run on
the group's helper thread, one after the other, while the rank computes.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from axon_nb.comm.errors import CollectiveMismatchError, TensorError
from axon_nb.comm.shared_memory.work import SharedWork

_SLICE_S = 0.05

Job = Callable[[], None]
HARMLESS = (CollectiveMismatchError, TensorError)
"""These are raised before any data moves, so the group stays usable."""


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
