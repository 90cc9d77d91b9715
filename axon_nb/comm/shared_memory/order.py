"""Collectives of a rank in the order in which its threads began them.

A call that is waited for at once runs in the calling thread when nothing is before it. All others go to the group's
helper thread, which runs them one after the other, so that they proceed while the rank computes.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from axon_nb.comm.errors import CollectiveMismatchError, TensorError
from axon_nb.comm.shared_memory.work import SharedWork

__all__ = ["Order"]

_SLICE_S = 0.05

Job = Callable[[], None]
HARMLESS = (CollectiveMismatchError, TensorError)
"""These are raised before data move, so that the group can go on."""


class Order:
    """The order of one group.

    Args:
        name: Of the helper thread.
        leave: Called with an error after which the group cannot go on.
        has_left: Whether that is so.
    """

    def __init__(self, name: str, leave: Callable[[BaseException], None], has_left: Callable[[], bool]) -> None:
        self._name = name
        self.leave = leave
        self._has_left = has_left
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._begun = 0
        self._jobs: deque[tuple[Job, SharedWork]] = deque()
        self._more = threading.Semaphore(0)
        self._helper: threading.Thread | None = None
        self._closed = False

    def run_now(self, job: Job) -> bool:
        """Run `job` in this thread, if nothing is before it; whether that was so."""
        with self._lock:
            if self._begun:
                return False
            self._begun = 1
            self._turn.acquire()
        try:
            self._run(job)
        finally:
            self._turn.release()
            with self._lock:
                self._begun -= 1
        return True

    def run_or_put(self, job: Job, work: SharedWork, limit: float) -> None:
        """As `run_now`, or else as `put`; in the thread that waits for `work`."""
        try:
            if not self.run_now(job):
                work.run_in_wait(lambda _: None)
                self.put(job, work)
                return
        except BaseException as error:
            work.finish(error)
            raise
        work.finish()

    def put(self, job: Job, work: SharedWork, *, in_wait: bool = False) -> None:
        """Have the helper thread run `job` after all that were begun before, and finish `work`.

        Args:
            job: The operation.
            work: Its handle.
            in_wait: Whether a thread that waits for `work` may run it, when its turn has come and the helper has not.
        """
        if in_wait:
            work.run_in_wait(functools.partial(self._take_over, work))
        with self._lock:
            self._begun += 1
            self._jobs.append((job, work))
            if self._helper is None:
                self._helper = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._helper.start()
        self._more.release()

    def _take_over(self, work: SharedWork, limit: float) -> None:
        """Run the job of `work` in this thread, if it is the next."""
        with self._lock:
            if not self._jobs or self._jobs[0][1] is not work or not self._turn.acquire(blocking=False):
                return
            job, _ = self._jobs.popleft()
        failure: BaseException | None = None
        try:
            self._run(job)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._turn.release()
            with self._lock:
                self._begun -= 1
            work.finish(failure)

    def close(self) -> None:
        """End the helper thread when it has run what is there."""
        with self._lock:
            self._closed = True
            helper = self._helper
        self._more.release()
        if helper is not None and helper is not threading.current_thread():
            helper.join(5)

    def _run(self, job: Job) -> None:
        try:
            job()
        except HARMLESS:
            raise
        except BaseException as error:
            self.leave(error)
            raise

    def _serve(self) -> None:
        while True:
            self._more.acquire()
            with self._lock:
                if not self._jobs:
                    if self._closed:
                        return
                    continue
                job, work = self._jobs.popleft()
            failure: Any = None
            # An interrupt between two steps of `run_now` may keep the turn; the group is left then, and jobs fail.
            while not (mine := self._turn.acquire(timeout=_SLICE_S)) and not self._has_left():
                pass
            try:
                self._run(job)
            except BaseException as error:
                failure = error
            if mine:
                self._turn.release()
            with self._lock:
                self._begun -= 1
            work.finish(failure)
            del job, work, failure
