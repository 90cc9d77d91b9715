"""What can go wrong, as types that Horovod's scripts catch.

HorovodInternalError         RuntimeError: a collective that failed, or that ranks did not call alike
NotInitializedError               ValueError: `hvd.init()` comes first
NotSupportedError                 NotImplementedError: a part of Horovod that is not here
StepOrderError                    AssertionError: backward, `step` and `zero_grad` in an order that loses gradients
"""

from __future__ import annotations

from axon_nb.errors import AxonError, UsageError

__all__ = ["HorovodInternalError", "NotInitializedError", "NotSupportedError", "StepOrderError"]


class HorovodInternalError(AxonError, RuntimeError):
    """A collective that failed, or that ranks did not call alike; every rank that called it gets it."""


class NotInitializedError(UsageError):
    """Horovod has not been initialized."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")


class NotSupportedError(UsageError, NotImplementedError):
    """A part of Horovod that is not here; the message says what is."""


class StepOrderError(AxonError, AssertionError):
    """Backward, `step` and `zero_grad` were called in an order in which gradients would be lost."""
