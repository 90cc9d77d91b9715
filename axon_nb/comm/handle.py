"""The handle that `async_op=True` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Handle"]


class Handle:
    """One communication in progress.

    Args:
        work: torch's handle; None if there is nothing to wait for.
        finish: Called once, when the communication has completed; returns the result.
    """

    def __init__(self, work: Any, finish: Callable[[], Any]) -> None:
        self._work = work
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """Wait for completion and return what the call returns without `async_op`. Later calls return the same."""
        if self._finish is not None:
            if self._work is not None:
                self._work.wait()
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._finish is None or self._work is None or bool(self._work.is_completed())

    is_completed = done
