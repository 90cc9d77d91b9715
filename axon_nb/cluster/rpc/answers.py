"""A rank's answer to one request: a future of the record that the request declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from axon_nb.errors import AxonError
from axon_nb.records.protocol.errors import ProtocolError
from axon_nb.records.protocol.messages import REFUSAL, REPLY, Request, decode_reply

R_co = TypeVar("R_co", covariant=True)


class RefusedError(AxonError):
    """The rank refused the request; the message says why."""


class Answer(Generic[R_co]):
    """A future of the reply to one request.

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
        """Whether the answer has arrived."""
        return bool(self._future.done())

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds; return whether the answer has arrived."""
        return bool(self._future.wait(timeout_s))

    def result(self, timeout_s: float | None = None) -> R_co:
        """Wait for the reply, at most `timeout_s` seconds.

        Raises:
            RefusedError: the rank refused the request.
            ProtocolError: the rank failed to answer, or a field of the reply is missing or invalid.
            TimeoutError: there is no answer in time.
        """
        message = self._future.result(timeout_s)
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == REFUSAL:
            raise RefusedError(content["reason"])
        if kind != REPLY:
            reason = content.get("reason", f"it sent {kind}")
            raise ProtocolError(f"{self._kind.__name__} failed on the rank: {reason}")
        return decode_reply(self._kind, content)

    def reply(self) -> R_co | None:
        """Return the reply; None if it has not arrived, or the rank refused or failed."""
        try:
            return self.result() if self.done() else None
        except (RefusedError, ProtocolError):
            return None

    def add_done_callback(self, callback: Callable[[Answer[R_co]], None]) -> None:
        """Call `callback` with this answer once it has arrived: on the client's thread, or at once."""
        self._future.add_done_callback(lambda _: callback(self))
