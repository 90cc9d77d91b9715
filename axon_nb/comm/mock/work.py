"""The work handle of one communication in a mock world."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work


class MockWork(Work):
    """A communication in progress; waiting for it lets the other ranks run.

    Args:
        ready: Whether it has completed; the call may complete it.
        wait: Lets other ranks run until `ready()`.
        output: The tensors that the future returns.
        source: Returns the sender's rank.
    """

    def __init__(
        self,
        ready: Callable[[], bool],
        wait: Callable[[Callable[[], bool]], None],
        output: Any,
        source: Callable[[], int] = lambda: -1,
    ) -> None:
        super().__init__()
        self._source = source
        self._ready = ready
        self._wait = wait
        self._output = output

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for completion."""
        self._wait(self._ready)
        return True

    def is_completed(self) -> bool:
        """Whether it has completed."""
        return self._ready()

    def is_success(self) -> bool:
        """Whether it has completed: communication in a mock world cannot fail."""
        return self._ready()

    def exception(self) -> Any:
        """Return None: communication in a mock world cannot fail."""
        return None

    def result(self) -> Any:
        """Return the output tensors."""
        return self._output

    def synchronize(self) -> None:
        """Do nothing."""

    def source_rank(self) -> int:
        """Return the sender's rank; -1 if the call named it."""
        return self._source()

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a completed future: its users wait in C++, where no other rank could be scheduled."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._output)
        return future
