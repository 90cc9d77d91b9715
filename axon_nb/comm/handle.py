"""What `async_op=True` returns: the result when it is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Handle"]


class Handle:
    """One communication that has begun.

    Args:
        work: torch's handle; None when there is nothing to wait for.
        finish: Called once, when the communication is over; gives the result.
    """

    def __init__(self, work: Any, finish: Callable[[], Any]) -> None:
        self._work = work
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """Wait for the communication; returns what the call without `async_op` returns. A second call does nothing."""
        if self._finish is not None:
            if self._work is not None:
                self._work.wait()
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result

    def done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._finish is None or self._work is None or bool(self._work.is_completed())

    is_completed = done
