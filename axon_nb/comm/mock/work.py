"""The handle of one communication in a mock world."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

__all__ = ["MockWork"]


class MockWork(Work):
    """Waiting for it lets the other ranks run.

    Args:
        ready: Whether it is over; may complete it.
        wait: Lets others run until `ready()`.
        output: The tensors that a future gives.
        source: Whom a message was from.
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
        """Wait for it."""
        self._wait(self._ready)
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._ready()

    def is_success(self) -> bool:
        """Whether it is over: in a mock world nothing else can happen to it."""
        return self._ready()

    def exception(self) -> Any:
        """None."""
        return None

    def result(self) -> Any:
        """The output tensors."""
        return self._output

    def synchronize(self) -> None:
        """Nothing."""

    def source_rank(self) -> int:
        """Whom a message was from; -1 where that was said in the call."""
        return self._source()

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future that has its value: whoever asks for one waits for it in C++, where no turn can be passed on."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._output)
        return future
