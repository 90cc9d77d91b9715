"""What comes back from ranks for a request, and what completions and memory forms make of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from ipyparallel.client.futures import MessageFuture

from axon_nb.cluster.inspection.completion import NameSnapshot
from axon_nb.cluster.inspection.memory import WhatIf
from axon_nb.cluster.rpc import Answer, RefusedError, request_all
from axon_nb.engine.inspection.memory import CallRecorder
from axon_nb.engine.inspection.memory_plan import Planner, model_key
from axon_nb.parallel.models import GPT, GPTConfig
from axon_nb.records.memory import WhatIfState
from axon_nb.records.protocol.cells import KnownName
from axon_nb.records.protocol.inspection import MeshReply, MeshRequest, PlanReply
from axon_nb.records.protocol.wire import FAILURE, REFUSAL, REPLY, ProtocolError, Request
from tests.support.records.rank_session import session_of_rank

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

LIMIT_S = 150.0


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


@pytest.fixture
def snapshot() -> NameSnapshot:
    known = NameSnapshot()
    known.update(
        {
            "model": KnownName("Net", own=("head", "_hidden")),
            "table": KnownName("dict", keys=("'alpha'", '"it\'s"', "7")),
            "modes": KnownName(),
        },
        {"Net": ["forward", "half"], "dict": ["items"]},
    )
    return known


@pytest.mark.parametrize(
    ("before", "fragment", "found"),
    [
        ("mod", "mod", ["model", "modes"]),
        ("y = mode", "mode", ["model", "modes"]),
        ("model.h", "h", ["half", "head"]),
        ("f(model.f", "f", ["forward"]),
        ("model._h", "_h", ["_hidden"]),
        ("table['a", "a", ["alpha"]),
        ("table[", "", ["'alpha'", '"it\'s"', "7"]),
        ("table.it", "it", ["items"]),
        ("other.x", "x", []),
        ("model.head.x", "", []),
        ("print('mod", "", []),
        ("whil", "whil", ["while"]),
    ],
)
def test_snapshot_completions(snapshot: NameSnapshot, before: str, fragment: str, found: list[str]) -> None:
    assert snapshot.complete(before) == (fragment, found)


def test_no_completions_before_the_first_snapshot() -> None:
    assert not NameSnapshot()
    assert NameSnapshot().complete("zzz") == ("zzz", [])


class Shown:
    """What a panel receives."""

    def __init__(self) -> None:
        self.states: list[WhatIfState] = []
        self.changed = threading.Condition()

    def __call__(self, state: WhatIfState) -> None:
        """Take a state."""
        with self.changed:
            self.states.append(state)
            self.changed.notify_all()

    def wait(self, reached: Any) -> WhatIfState:
        """The last state, once it is as wanted."""
        with self.changed:
            assert self.changed.wait_for(lambda: bool(self.states) and reached(self.states[-1]), LIMIT_S), self.states
            return self.states[-1]


@pytest.fixture
def calls() -> CallRecorder:
    return CallRecorder(session_of_rank())


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=32, context=8, hidden=16, heads=2, blocks=2))


def asked_of(model: GPT, calls: CallRecorder, asked: list[Any]) -> Any:
    """A rank with this model, and its optimizer; what it is asked is kept."""
    optimizer, planner = torch.optim.AdamW(model.parameters()), Planner(session_of_rank(), calls)

    def ask(setup: Mapping[str, Any] | None, known: str) -> PlanReply:
        asked.append((setup, known))
        return planner.inputs(model, [optimizer], what_if=setup, known_key=known)

    return ask


def test_formula_states_and_error_sentences(calls: CallRecorder, model: GPT) -> None:
    asked: list[Any] = []
    shown, busy = Shown(), threading.Event()
    what_if = WhatIf(asked_of(model, calls, asked), shown, busy.is_set)
    # As long as nobody has called the model there is the formula, and the reason.
    what_if.request(None)
    state = shown.wait(lambda state: state.estimate is not None and not state.doing)
    assert state.as_is is not None
    assert (state.as_is.strategy, state.as_is.world_size, state.as_is.optimizer) == ("full_shard", 2, "adamw")
    assert not state.is_trained_so
    assert state.estimate is not None
    assert not state.estimate.is_whole
    assert "learns how the model is called from its next forward" in state.estimate.notes[0]
    states = state.estimate.persistent[0]
    assert states["optimizer"] == 2 * states["parameters"]
    # What cannot be is one sentence, and the next question is answered.
    what_if.request({"world_size": "0"})
    assert shown.wait(lambda state: bool(state.error)).error.startswith("ranks: '0': must be an integer")
    what_if.request({"cpu_offload": "full", "strategy": "ddp"})
    state = shown.wait(lambda state: "ddp" in state.error)
    assert "\n" not in state.error
    assert (state.doing, state.estimate) == ("", None)
    what_if.request({"optimizer": "sgd"})
    state = shown.wait(lambda state: state.estimate is not None and not state.doing and not state.error)
    assert state.estimate is not None
    assert "optimizer" not in state.estimate.persistent[0]
    assert asked[0][1] == ""
    assert asked[-1][1], "the model is sent once"
    # Called once, it can be simulated; what nobody has asked for waits for the cell.
    model_key(model, calls)
    model(torch.zeros(3, 8, dtype=torch.int64))
    assert calls.inputs_of(model) == [{"shape": [3, 8], "dtype": "int64"}]
    assert not model._forward_pre_hooks
    busy.set()
    what_if.request(None)
    state = shown.wait(lambda state: state.doing == "waiting for the running cell")
    assert state.as_is is not None
    assert state.as_is.batch == 3
    what_if.close()


@pytest.mark.slow
def test_newest_question_wins(calls: CallRecorder, model: GPT) -> None:
    shown = Shown()
    what_if = WhatIf(asked_of(model, calls, []), shown, lambda: False)
    model_key(model, calls)
    model(torch.zeros(3, 8, dtype=torch.int64))
    what_if.request({"strategy": "ddp"})
    what_if.request({"world_size": "4", "strategy": "shard_grad_op", "batch": "2", "activation_checkpointing": True})
    state = shown.wait(lambda state: state.estimate is not None and state.estimate.is_whole)
    assert state.setup is not None
    assert (state.setup.world_size, state.setup.strategy) == (4, "shard_grad_op")
    assert state.setup.activation_checkpointing
    whole = [own.estimate.setup.strategy for own in shown.states if own.estimate is not None and own.estimate.is_whole]
    assert set(whole) == {"shard_grad_op"}
    estimate = state.estimate
    assert estimate is not None
    assert len(estimate.peak) == 4
    assert sum(estimate.peak[0].values()) > sum(estimate.persistent[0].values())
    assert any("simulating" in own.doing and own.share is not None for own in shown.states)
    what_if.close()


def test_failing_rank_is_reported_in_one_sentence() -> None:
    def ask(setup: Mapping[str, Any] | None, known: str) -> PlanReply:
        raise ValueError("first line\nsecond line")

    shown = Shown()
    what_if = WhatIf(ask, shown, lambda: False)
    what_if.request(None)
    assert shown.wait(lambda state: bool(state.error)).error == "ValueError: first line"
    what_if.close()
