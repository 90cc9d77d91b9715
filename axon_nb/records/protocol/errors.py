"""The error of a message that does not follow the protocol."""

from __future__ import annotations

from axon_nb.errors import AxonError


class ProtocolError(AxonError, RuntimeError):
    """A message lacks a field of its record or has an invalid one, or the other side failed to answer."""
