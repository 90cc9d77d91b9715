"""What a process of a cluster raises when it does not understand another one."""

from __future__ import annotations

from axon_nb.errors import AxonError

__all__ = ["ProtocolError"]


class ProtocolError(AxonError, RuntimeError):
    """A message does not have the fields that its record declares, or the other side could not make it."""
