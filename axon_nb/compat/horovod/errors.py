"""Exceptions, derived from the types that Horovod scripts catch.

HorovodInternalError    RuntimeError: a collective failed, or ranks called it differently
NotInitializedError     ValueError: call `hvd.init()` first
NotSupportedError       NotImplementedError: a part of Horovod that is not supported
StepOrderError          AssertionError: backward, `step` and `zero_grad` in an order that loses gradients
"""

from __future__ import annotations

from axon_nb.errors import AxonError, UsageError

__all__ = ["HorovodInternalError", "NotInitializedError", "NotSupportedError", "StepOrderError"]


class HorovodInternalError(AxonError, RuntimeError):
    """A collective failed, or ranks called it differently; raised on every rank that called it."""


class NotInitializedError(UsageError):
    """Horovod has not been initialized."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")


class NotSupportedError(UsageError, NotImplementedError):
    """A part of Horovod that is not supported; the message names an alternative."""


class StepOrderError(AxonError, AssertionError):
    """Backward, `step` and `zero_grad` were called in an order that would lose gradients."""
