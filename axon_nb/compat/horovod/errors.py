"""Exceptions, derived from the types that Horovod scripts catch."""

from __future__ import annotations

from axon_nb.errors import AxonError, UsageError


class HorovodInternalError(AxonError, RuntimeError):
    """Ranks called Horovod differently; raised on every rank that called it."""


class NotInitializedError(UsageError):
    """Horovod has not been initialized."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")


class NotOfferedError(UsageError, NotImplementedError):
    """A part of Horovod that is not offered; the message names an alternative."""
