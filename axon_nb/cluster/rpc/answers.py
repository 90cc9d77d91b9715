"""A rank's answer to one request, as a future of the record that the request declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from axon_nb.errors import AxonError
from axon_nb.records.protocol.errors import ProtocolError
from axon_nb.records.protocol.messages import REFUSAL, REPLY, Request, decode_reply

__all__ = ["Answer", "RefusedError"]

R_co = TypeVar("R_co", covariant=True)


class RefusedError(AxonError):
    """The rank cannot answer this request; the message says why."""


class Answer(Generic[R_co]):
    """What comes back for one request.

    Args:
        kind: The request's class.
        future: ipyparallel's future of the whole message.
    """

    def __init__(self, kind: type[Request[R_co]], future: Any) -> None:
        self._kind = kind
        self._future = future

    @property
    def msg_id(self) -> str:
        """The request's message id, for `RankClient.forget`."""
        return str(self._future.msg_id)

    def done(self) -> bool:
        """Whether it is there."""
        return bool(self._future.done())

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds; return whether it is there."""
        return bool(self._future.wait(timeout_s))

    def result(self, timeout_s: float | None = None) -> R_co:
        """Wait for the reply, at most `timeout_s` seconds.

        Raises:
            RefusedError: the rank cannot answer this.
            ProtocolError: the rank failed to answer, or the reply does not have the fields that it must have.
            TimeoutError: the time is over.
        """
        message = self._future.result(timeout_s)
        reply, content = message["header"]["msg_type"], message["content"]
        if reply == REFUSAL:
            raise RefusedError(content["reason"])
        if reply != REPLY:
            why = content.get("reason", f"it sent {reply}")
            raise ProtocolError(f"A rank failed to answer {self._kind.__name__}: {why}")
        return decode_reply(self._kind, content)

    def reply(self) -> R_co | None:
        """The reply if it is there; None if it is not, or if the rank refused or failed."""
        try:
            return self.result() if self.done() else None
        except (RefusedError, ProtocolError):
            return None

    def when_done(self, call: Callable[[Answer[R_co]], None]) -> None:
        """Have `call` called with this answer when it is there: on the client's thread, or at once."""
        self._future.add_done_callback(lambda _: call(self))
