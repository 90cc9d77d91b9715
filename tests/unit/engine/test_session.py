"""Two sessions in one process do not see each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from axon_nb.engine.debugger import Pager, PostMortem
from axon_nb.engine.groups.abort import AbortedError
from axon_nb.engine.inspection.telemetry import TrainingJob
from axon_nb.engine.output import NestedErrors
from axon_nb.records.protocol.cells import AbortLocation
from axon_nb.records.protocol.inspection import FailureRequest
from tests.support.records.rank_session import session_of_rank


def test_abort_reaches_one_session_only() -> None:
    first, second = session_of_rank(0), session_of_rank(1)
    first.groups.abort.set()
    with pytest.raises(AbortedError):
        first.groups.abort.raise_if_set("all_reduce")
    second.groups.abort.raise_if_set("all_reduce")


def test_pending_call_is_in_one_session_only() -> None:
    first, second = session_of_rank(0), session_of_rank(1)
    call = first.groups.calls.start("allreduce", "0", 1, -1, 4)
    assert first.groups.calls.pending() == [call]
    assert second.groups.calls.pending() == []


def test_steps_are_counted_per_session() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizers = [torch.optim.SGD([weight], lr=0.1), torch.optim.Adam([weight])]

    def train(steps: int) -> None:
        for _ in range(steps):
            for optimizer in optimizers:
                optimizer.step()

    first, second = (TrainingJob(session_of_rank(rank)) for rank in range(2))
    with first.count_steps():
        train(5)  # each step steps both optimizers
        with second.count_steps():
            train(2)
        optimizers[1].step()  # the same one again: another step
    assert (first.steps.steps, second.steps.steps) == (8, 2)


def test_failure_is_saved_by_one_session_only() -> None:
    first, second = PostMortem(Pager()), PostMortem(Pager())
    first.save(ValueError("odd"), "odd")
    assert first.report(FailureRequest()).failure == "ValueError: odd"
    assert second.report(FailureRequest()).failure == ""
    assert second.start() == ""


def test_swallowed_error_fails_the_cell_of_one_session_only(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = NestedErrors(), NestedErrors()
    replies: list[dict[str, Any]] = [{"status": "ok"}, {"status": "ok"}]
    try:
        raise ValueError("odd")
    except ValueError as error:
        first.note(error, "odd", ["the traceback"], AbortLocation(1, "", ""))
    assert capsys.readouterr().err == "the traceback\n"
    for errors, reply in zip((first, second), replies, strict=True):
        assert errors.fail(reply, None) is None
    assert [reply["status"] for reply in replies] == ["error", "ok"]
    assert (replies[0]["ename"], replies[0]["evalue"]) == ("ValueError", "odd")
    following = {"status": "ok"}
    first.fail(following, None)
    assert following == {"status": "ok"}
