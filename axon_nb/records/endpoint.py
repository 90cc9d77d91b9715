"""What programs outside a notebook ask its endpoint: one JSON object per line, and the codes of errors.

A request is ``{"do": "status", "with": {}}``; the reply is ``{"ok": …}`` or ``{"error": {"code": …, "message": …}}``.
"""

from __future__ import annotations

import enum
from typing import Any

from axon_nb.errors import AxonError


class ErrorCode(enum.StrEnum):
    """Why a request was not answered."""

    FAILED = "failed"
    """It was tried and failed, such as a cell that raised an exception."""
    BAD_REQUEST = "bad_request"
    """There is no such command, or its arguments are invalid."""
    NO_CLUSTER = "no_cluster"
    """There is no such cluster, or no notebook uses it."""
    REFUSED = "refused"
    """The notebook has not allowed it."""
    BUSY = "busy"
    """A cell is running; try again when it is done."""
    NO_REPLY = "no_reply"
    """The notebook did not reply in time."""

    @property
    def exit_status(self) -> int:
        """Exit status of `axon-nb` with this error."""
        return list(ErrorCode).index(self) + 1


class EndpointError(AxonError):
    """A request that was not answered.

    Args:
        code: Why.
        message: The same as a sentence, with the fix.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code

    def to_json(self) -> dict[str, Any]:
        """Return the error as programs read it."""
        return {"error": {"code": str(self.code), "message": str(self)}}
