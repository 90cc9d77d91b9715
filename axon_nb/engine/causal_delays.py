"""Sleeps that `%timeline --advise --prove` asks for: before and during the collectives of each training step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from axon_nb.comm.shared_memory.work import SharedWork
from axon_nb.records.performance.delays import StepDelays

__all__ = ["CausalDelays"]

_SLICE_S = 0.05


class CausalDelays:
    """The delays of this rank; none until a cell brings some.

    Args:
        raise_if_aborted: Called every 50 ms while the rank sleeps.
    """

    def __init__(self, raise_if_aborted: Callable[[], None]) -> None:
        self._raise_if_aborted = raise_if_aborted
        self._before: tuple[float, ...] = ()
        self._during: tuple[float, ...] = ()
        self._number = -1
        """Of the next collective in the step; -1: the cell's first step is not over, and nothing is delayed."""
        self._debt_s = 0.0
        """What earlier sleeps lack; negative if they took longer than asked."""

    def begin_cell(self, delays: StepDelays, rank: int) -> None:
        """Delay the steps of this cell, from its second on."""
        self._before, self._during = delays.before[rank] if delays else (), delays.during
        self._number, self._debt_s = -1, 0.0

    def end_cell(self) -> None:
        """Delay nothing more."""
        self.begin_cell(StepDelays(), 0)

    def end_step(self) -> None:
        """Count collectives from 0 again."""
        self._number = 0

    def before_call(self) -> None:
        """Sleep before the next collective.

        Raises:
            AbortedError: the cell is aborted.
        """
        if 0 <= self._number < len(self._before):
            self._sleep(self._before[self._number], time.sleep)

    def during_call(self, work: Any, *, is_counted: bool = True) -> None:
        """Sleep after the collective was started, and let it move its data meanwhile.

        Args:
            work: Its handle.
            is_counted: Whether it is a collective; messages are not counted.

        Raises:
            AbortedError: the cell is aborted.
        """
        if self._number < 0 or not self._during or not is_counted:
            return
        number, self._number = self._number, self._number + 1
        if number < len(self._during):
            self._sleep(self._during[number], lambda seconds: _move(work, seconds))

    def _sleep(self, seconds: float, wait: Callable[[float], None]) -> None:
        if seconds <= 0:
            return
        start = time.monotonic()
        end = start + seconds + self._debt_s
        while (left := end - time.monotonic()) > 0:
            wait(min(left, _SLICE_S))
            self._raise_if_aborted()
        self._debt_s = end - time.monotonic()


def _move(work: Any, seconds: float) -> None:
    """Move a collective's data for so long, and sleep for what is left; in other groups, other threads move it."""
    end = time.monotonic() + seconds
    if isinstance(work, SharedWork) and not work.is_completed():
        work.leave_to_helper()
        with contextlib.suppress(RuntimeError):  # it takes longer, or it failed: the rank's own wait says so
            work.wait_slice(timedelta(seconds=seconds))
    time.sleep(max(0.0, end - time.monotonic()))
