"""What comes back from ranks for a request: replies, refusals, failures, and nothing in time."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from ipyparallel.client.futures import MessageFuture

from axon_nb.cluster.rpc import Answer, RefusedError, request_all
from axon_nb.records.protocol.inspection import MeshReply, MeshRequest
from axon_nb.records.protocol.wire import FAILURE, REFUSAL, REPLY, ProtocolError, Request

NO_MESH = (REPLY, {"mesh": None})
ANSWERS: dict[int, tuple[str, dict[str, Any]] | None] = {
    0: NO_MESH,
    1: (REFUSAL, {"reason": "there is no such variable"}),
    2: (FAILURE, {"reason": "KeyError: 'x'"}),
    3: (REPLY, {"mesh": []}),
    4: ("apply_reply", {"status": "error"}),
    5: None,
}
"""By rank: type and content of its message; None: it does not answer."""


def answer(reported: tuple[str, dict[str, Any]] | None) -> Answer[MeshReply]:
    future: Future[Any] = MessageFuture("id")
    if reported is not None:
        future.set_result({"header": {"msg_type": reported[0]}, "content": reported[1]})
    return Answer(MeshRequest, future)


class Ranks:
    """A client whose ranks answer as `ANSWERS` says."""

    def request(self, rank: int, request: Request[MeshReply]) -> Answer[MeshReply]:
        """Ask one of them; one that is not there has unregistered."""
        return answer(ANSWERS[rank])


def test_reply_has_the_declared_record_type() -> None:
    reported = answer(NO_MESH)
    assert reported.done()
    assert reported.result() == reported.reply() == MeshReply(None)
    seen: list[Answer[MeshReply]] = []
    reported.add_done_callback(seen.append)
    assert seen == [reported]


@pytest.mark.parametrize(
    ("rank", "error", "says"),
    [
        (1, RefusedError, "^there is no such variable$"),
        (2, ProtocolError, r"^MeshRequest failed on the rank: KeyError: 'x'$"),
        (3, ProtocolError, r"^MeshReply: Expected `object \| null`, got `array`"),
        (4, ProtocolError, r"^MeshRequest failed on the rank: it sent apply_reply$"),
    ],
)
def test_invalid_reply_raises_with_cause(rank: int, error: type[Exception], says: str) -> None:
    reported = answer(ANSWERS[rank])
    with pytest.raises(error, match=says):
        reported.result()
    assert reported.reply() is None


def test_missing_reply_is_reported() -> None:
    late = answer(None)
    assert not late.done()
    assert not late.wait(0.0)
    assert late.reply() is None


def test_refusal_failure_and_silence_are_distinguished() -> None:
    ranks: Any = Ranks()
    answers = request_all(ranks, [*ANSWERS, 99], MeshRequest(), timeout_s=0.01)
    assert answers == {0: MeshReply(None)}
    assert answers.refused == {1: "there is no such variable"}
    assert answers.missing([0, 1, 2, 5, 99])[:2] == [
        "Rank 2 did not reply: MeshRequest failed on the rank: KeyError: 'x'.",
        "Ranks 5,99 did not reply.",
    ]
