"""A running cell: its states, when it is ended from outside, when a rank is done, and its record for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.resources import files
from threading import Thread
from typing import Any, cast

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from axon_nb.cluster.cells import transitions
from axon_nb.cluster.cells.abort import AbortController, DeadlockWatch
from axon_nb.cluster.cells.options import RankProgress
from axon_nb.cluster.cells.result import MAX_RECORD_BYTES, CellResult, cell_record
from axon_nb.cluster.cells.run import CellRun
from axon_nb.cluster.cells.transitions import Cell, State, transition
from axon_nb.cluster.failures import RankError, cell_error, interrupt_error
from axon_nb.cluster.output import CellOutput
from axon_nb.cluster.output.sinks import RecordingSink
from axon_nb.cluster.rpc import Answer
from axon_nb.errors import CellError, CellInterrupt
from axon_nb.records.protocol.cells import AbortLocation, AbortReply, AbortRequest, CellEnd, CellOutcome
from axon_nb.records.protocol.inspection import WaitsReply
from axon_nb.records.protocol.wire import REPLY, Request, encode
from axon_nb.records.telemetry import Activity
from axon_nb.records.waits import PeerCall, PendingCall, RankWaits

OK, RAISED = CellOutcome("ok"), CellOutcome("error", "ValueError", "bad", end=CellEnd(calls=1))
STUCK = {rank: RankError(rank, "stuck", "", "is still busy") for rank in range(3)}

WAITING, REPLIED = RankProgress(), RankProgress(replied_at=1.0, end=CellEnd())
CELLS = {
    "sent": Cell({0: WAITING, 1: WAITING}),
    "running": Cell({0: WAITING, 1: REPLIED}, State.RUNNING),
    "aborting": Cell({0: WAITING, 1: REPLIED}, State.ABORTING, aborting=True),
    "draining": Cell({0: REPLIED, 1: REPLIED}, State.DRAINING),
    "recovering": Cell({0: WAITING, 1: REPLIED}, State.RECOVERING, aborting=True, gave_up=True),
    "done": Cell({0: WAITING, 1: REPLIED}, State.DONE, aborting=True, gave_up=True),
}
"""A cell in each state; rank 0 is the one that events are about. In the last two it was given up."""

EVENTS: dict[str, transitions.Event] = {
    "output": transitions.Output(0, "stream", {"text": "x"}, {}),
    "processed": transitions.Processed(5.0, 0),
    "idle": transitions.Idle(0),
    "reply": transitions.Reply(5.0, 0, OK, aborting=False),
    "full reply": transitions.Reply(5.0, 0, OK, aborting=False, idle=True),
    "failure": transitions.Reply(5.0, 0, RAISED, aborting=False),
    "death": transitions.Death(5.0, 0, "was killed"),
    "interrupt": transitions.Interrupt(5.0),
    "second interrupt": transitions.Interrupt(5.0),
    "timeout": transitions.Timeout(),
    "aborted": transitions.Aborted(),
    "lost": transitions.Lost("lost its host agent"),
    "recovered": transitions.Recovered(),
    "tick": transitions.Tick(5.0, aborted_at=4.0, stuck=STUCK),
    "late tick": transitions.Tick(20.0, aborted_at=4.0, stuck=STUCK),
}

# The next state (`=`: the same), the effects, and in brackets which facts of the cell change.
# A reply to a cell that is recovering or done is a late one. What the live view then shows is in small letters.
TABLE = """
event            | in                                        | then
output           | sent                                      | running Show
output           | running aborting draining                 | = Show
output           | recovering done                           | = ShowLate
processed        | sent running aborting                     | =
processed        | draining recovering done                  | =
idle             | sent                                      | running RankDone
idle             | running aborting recovering done          | = RankDone
idle             | draining                                  | = RankDone
reply            | sent                                      | running done
reply            | running aborting                          | draining Wake done
reply            | draining                                  | = Wake done
reply            | recovering done                           | = Wake LateReply done
full reply       | sent                                      | running RankDone done
full reply       | running aborting                          | draining RankDone Wake done
full reply       | draining                                  | = RankDone Wake done
full reply       | recovering done                           | = RankDone Wake LateReply done
failure          | sent                                      | running Wake failed [failed]
failure          | running aborting                          | draining Wake failed [failed]
failure          | draining                                  | = Wake failed [failed]
failure          | recovering done                           | = Wake LateReply failed [failed]
death            | sent                                      | running RankDone Wake dead [failed]
death            | running aborting                          | draining RankDone Wake dead [failed]
death            | draining                                  | =
death            | recovering done                           | = RankDone Wake dead [failed]
interrupt        | sent running aborting draining            | = ResendAbort Wake [interrupted_at]
interrupt        | recovering done                           | = [interrupted_at]
second interrupt | sent running aborting draining            | = ResendAbort Wake [second_interrupt_at]
second interrupt | recovering done                           | = [second_interrupt_at]
timeout          | sent running                              | = [timed_out]
timeout          | aborting draining recovering done         | =
aborted          | sent running                              | aborting
aborted          | aborting draining recovering done         | =
lost             | sent running aborting draining recovering | done Wake [lost]
lost             | done                                      | = Wake [lost]
recovered        | sent running aborting draining done       | =
recovered        | recovering                                | done
tick             | sent running aborting draining            | = Abort
tick             | recovering done                           | =
late tick        | sent running                              | done [failed, gave_up]
late tick        | aborting                                  | recovering Recover Wake [failed, gave_up]
late tick        | draining                                  | done [gave_up]
late tick        | recovering done                           | =
"""
FACTS = ("failed", "interrupted_at", "second_interrupt_at", "timed_out", "gave_up", "lost")

BARRIER = PendingCall(number=7, name="barrier", group="0", ranks=(0, 1, 2), sequence=1, peer=-1, bytes=0, seconds=2.0)

SCHEMA = json.loads((files("axon_nb") / "records" / "cell_result.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
TRACEBACK = (
    "\x1b[31mIndexError\x1b[39m                   Traceback (most recent call last)",
    "\x1b[36mCell\x1b[39m\x1b[36m \x1b[39m\x1b[32mIn[7]\x1b[39m\x1b[32m, line 3\x1b[39m\n----> 3 total = f(scales)",
    "\x1b[36mFile\x1b[39m\x1b[36m \x1b[39m\x1b[32m/home/ada/scaling.py:12\x1b[39m, in \x1b[36mf\x1b[39m(x)\n     11 \n",
)
ERROR = RankError(3, "raised", "IndexError", "list index out of range", TRACEBACK)


def describe(state: str, name: str) -> str:
    cell, event = CELLS[state], EVENTS[name]
    if name == "second interrupt":
        cell = replace(cell, interrupted_at=3.0)
    after, effects = transition(cell, event)
    parts = ["=" if after.state is cell.state else after.state.value]
    for effect in effects:
        if isinstance(effect, transitions.RankEnded):
            parts.append(effect.activity.value)
            continue
        is_late = isinstance(effect, transitions.ShowOutput) and effect.is_late
        parts.append("ShowLate" if is_late else type(effect).__name__.removesuffix("Output"))
    changed = [name for name in FACTS if getattr(after, name) != getattr(cell, name)]
    return " ".join(parts) + (f" [{', '.join(changed)}]" if changed else "")


def test_every_state_and_event() -> None:
    rows = [[part.strip() for part in line.split("|")] for line in TABLE.strip().splitlines()[1:]]
    expected = {(name, state): then for name, states, then in rows for state in states.split()}
    assert expected == {(name, state.value): describe(state.value, name) for name in EVENTS for state in State}


class Play:
    """One cell on three ranks, with a controller that aborts as soon as it is asked and has a reason."""

    def __init__(self) -> None:
        self.cell = Cell({rank: RankProgress() for rank in range(3)})
        self.now = 100.0
        self.aborted_at: float | None = None
        self.after_done: list[transitions.Effect] = []
        self.late: list[int] = []
        self.ends: dict[int, CellEnd] = {}

    def process(self, event: transitions.Event) -> None:
        was_done = self.cell.state is State.DONE
        self.cell, effects = transition(self.cell, event)
        self.after_done += effects if was_done else ()
        for effect in effects:
            if isinstance(effect, transitions.LateReply):
                self.late.append(effect.rank)
            if isinstance(effect, transitions.Abort) and (effect.interrupted or effect.timed_out or effect.failed_at):
                self.aborted_at = self.aborted_at or self.now
                self.process(transitions.Aborted())

    def reply(self, rank: int, outcome: CellOutcome) -> None:
        if rank in self.ends:  # a rank replies once
            return
        self.ends[rank], gave_up = outcome.end, self.cell.gave_up
        self.process(transitions.Reply(self.now, rank, outcome, aborting=self.cell.aborting))
        assert self.cell.ranks[rank].end is outcome.end
        assert rank not in self.cell.unfinished
        assert (rank in self.late) == gave_up

    def tick(self, seconds: float, *, drained: bool = True, acknowledged: bool = True) -> None:
        self.now += seconds
        in_c = frozenset(self.cell.unfinished)
        self.process(transitions.Tick(self.now, drained, acknowledged, self.aborted_at, STUCK, unresponsive=in_c))

    def act(self, action: str, rank: int, seconds: float) -> None:
        self.now += seconds
        match action:
            case "reply":
                self.reply(rank, CellOutcome("ok", end=CellEnd(seconds=self.now)))
            case "failure":
                self.reply(rank, RAISED)
            case "death":
                self.process(transitions.Death(self.now, rank, "was killed"))
            case "interrupt":
                self.process(transitions.Interrupt(self.now))
            case "output":
                self.process(transitions.Output(rank, "stream", {}, {}))
                self.process(transitions.Processed(self.now, rank))
            case "tick":
                self.tick(seconds)
            case "slow tick":
                self.tick(seconds, drained=False, acknowledged=False)
            case name:
                self.process(EVENTS[name] if rank == 0 or name != "idle" else transitions.Idle(rank))


ACTIONS = ["reply", "failure", "death", "interrupt", "output", "idle", "timeout", "lost", "recovered", "tick"]
SECONDS = st.sampled_from([0.0, 0.01, 0.1, 1.5, 6.0, 11.0])


@given(st.lists(st.tuples(st.sampled_from([*ACTIONS, "slow tick"]), st.integers(0, 2), SECONDS), max_size=25))
def test_runs_end_keep_replies_and_spare_the_next_cell(actions: list[tuple[str, int, float]]) -> None:
    play = Play()
    for action in actions:
        play.act(*action)
    play.process(transitions.Interrupt(play.now))
    for _ in range(150):  # 15 s
        play.tick(0.1)
        play.process(transitions.Recovered())
    assert play.cell.state is State.DONE
    for rank in play.cell.unfinished:
        assert play.cell.lost or play.cell.errors[rank].kind == "stuck"
    for rank in range(3):
        play.reply(rank, OK)
        play.process(transitions.Output(rank, "stream", {}, {}))
        play.process(transitions.Idle(rank))
    play.process(transitions.Interrupt(play.now))
    play.tick(20.0)
    assert not play.cell.unfinished
    assert {rank: progress.end for rank, progress in play.cell.ranks.items()} == play.ends
    for effect in play.after_done:  # the ranks run the next cell: nothing is sent to them, nothing shown in this one
        assert not isinstance(effect, transitions.Abort | transitions.ResendAbort | transitions.Recover)
        assert not isinstance(effect, transitions.ShowOutput) or effect.is_late


def test_late_output_is_waited_for() -> None:
    assert not RankProgress().is_done(1000.0)
    assert not RankProgress(replied_at=1000.0).is_done(1004.0)
    assert RankProgress(replied_at=1000.0, idle=True).is_done(1004.0)


def test_output_that_is_still_being_processed_is_waited_for() -> None:
    assert not RankProgress(replied_at=1000.0, processing=True).is_done(1050.0)
    assert not RankProgress(replied_at=1000.0, processed_at=1020.0).is_done(1024.0)


def test_every_wait_is_bounded() -> None:
    assert RankProgress(replied_at=1000.0).is_done(1006.0)
    assert RankProgress(replied_at=1000.0, processed_at=1020.0).is_done(1026.0)
    assert RankProgress(replied_at=1000.0, processing=True).is_done(1061.0)
    assert RankProgress(replied_at=1000.0, processed_at=1060.0).is_done(1061.0)


def test_rank_lost_after_its_reply_is_waited_for_briefly() -> None:
    progress = RankProgress(replied_at=1000.0, gone_at=1003.0)
    assert not progress.is_done(1003.1)
    assert progress.is_done(1004.0)


class Ranks:
    """What ranks answer on the control channel; `late` ones have not answered yet."""

    def __init__(self) -> None:
        self.answers: dict[int, WaitsReply] = {}
        self.late: list[Future[Any]] = []
        self.silent: set[int] = set()

    def request(self, rank: int, request: Request[Any]) -> Answer[Any]:
        future: Future[Any] = Future()
        if isinstance(request, AbortRequest) or rank in self.silent:
            self.late.append(future)
        else:
            future.set_result(message(self.answers[rank]))
        return Answer(type(request), future)


def message(reply: Any) -> dict[str, Any]:
    return {"header": {"msg_type": REPLY}, "content": encode(reply)}


NOTICED = message(AbortReply(interrupted=True, pending=0, line=None))


def waits(rank: int) -> WaitsReply:
    return WaitsReply(RankWaits(rank, True, 2, "barrier", (BARRIER,), {"0": 1}), 1)


def runs_nothing(rank: int) -> WaitsReply:
    return WaitsReply(RankWaits(rank, False, None, "", (), {"0": 0}), 0)


def test_rank_that_has_not_started_is_not_taken_as_finished() -> None:
    ranks: Any = Ranks()
    ranks.answers = {0: waits(0), 1: waits(1), 2: runs_nothing(2)}
    watch, now = DeadlockWatch(ranks, [0, 1, 2], [0, 1, 2]), time.monotonic()
    assert [watch.step(now + seconds, [0, 1, 2]) for seconds in range(10)] == [""] * 10
    reported = [watch.step(now + seconds, [0, 1]) for seconds in range(10, 14)]
    assert "ranks 0-1 wait in barrier at line 2 for rank 2, which has finished the cell." in reported


def test_dead_rank_outside_the_cell_is_not_waited_for() -> None:
    ranks: Any = Ranks()
    ranks.answers = {0: waits(0), 1: waits(1), 2: runs_nothing(2), 3: runs_nothing(3)}
    ranks.silent = {3}
    dead: set[int] = set()
    watch, now = DeadlockWatch(ranks, [0, 1, 2, 3], [0, 1, 2], dead=lambda: dead), time.monotonic()
    assert [watch.step(now + seconds, [0, 1]) for seconds in range(10)] == [""] * 10
    dead.add(3)
    reported = [watch.step(now + seconds, [0, 1]) for seconds in range(10, 16)]
    assert "ranks 0-1 wait in barrier at line 2 for rank 2, which has finished the cell." in reported


def test_suspended_rank_is_named_and_blocks_deadlock_proofs() -> None:
    ranks: Any = Ranks()
    peer = PeerCall(2, "all_reduce", 4, is_waiting=True, is_stopped=True)
    blocked = replace(BARRIER, seconds=5.0)
    for rank in (0, 1):
        own = replace(waits(rank).waits, pending=(blocked,))
        ranks.answers[rank] = replace(waits(rank), waits=own, peers=(peer,))
    ranks.silent = {2}
    watch, now = DeadlockWatch(ranks, [0, 1, 2], [0, 1, 2]), time.monotonic()
    assert [watch.step(now + seconds, [0, 1, 2]) for seconds in range(12)] == [""] * 12
    stopped = "Waiting for rank 2 (stopped in all_reduce at line 4): ranks 0-1 have been in barrier at line 2 for 5.0 s"
    assert watch.slow == stopped
    assert len(ranks.late) == 1, "requests do not pile up"
    controller = AbortController(ranks, [0, 1, 2], watch=watch)
    assert controller.stuck(2).evalue == "is stopped (SIGSTOP) and does not react to interrupts"
    ranks.silent.clear()
    ranks.answers[2] = runs_nothing(2)
    ranks.late[0].set_result(message(runs_nothing(2)))
    reported = [watch.step(now + seconds, [0, 1]) for seconds in range(12, 18)]
    assert "ranks 0-1 wait in barrier at line 2 for rank 2, which has finished the cell." in reported
    assert controller.stuck(2).evalue == "is still busy and does not react to interrupts"


def test_timeout_of_a_group_holds_while_a_rank_does_not_reply() -> None:
    ranks: Any = Ranks()
    late = "recv from rank 2 has been in progress for 1801 s, and its group's timeout is 1800 s"
    ranks.answers = {0: replace(waits(0), overdue=late), 1: waits(1)}
    ranks.silent = {2}
    watch, now = DeadlockWatch(ranks, [0, 1, 2], [0, 1, 2]), time.monotonic()
    reported = [watch.step(now + seconds, [0, 1, 2]) for seconds in range(8)]
    assert f"rank 0: {late}. Nothing shows what it waits for, but rank 2 does not reply." in reported


def test_mismatch_of_started_collectives_ends_the_cell() -> None:
    """As on NCCL, where the ranks may wait for them anywhere."""
    ranks: Any = Ranks()
    for rank, size in ((0, 40), (1, 40), (2, 80)):
        call = PendingCall(9, "allreduce", "0", (0, 1, 2), 4, -1, size, 2.0)
        ranks.answers[rank] = WaitsReply(RankWaits(rank, True, 2, "", (), {"0": 4}), 1, started=(call,))
    watch, now = DeadlockWatch(ranks, [0, 1, 2], [0, 1, 2]), time.monotonic()
    reported = [watch.step(now + seconds, [0, 1, 2]) for seconds in range(8)]
    assert "Size mismatch in all_reduce: rank 0 passed 40 bytes, rank 2 80." in reported


def test_started_collective_of_ranks_outside_the_cell_is_named() -> None:
    ranks: Any = Ranks()
    call = PendingCall(9, "allreduce", "0", (0, 1, 2), 4, -1, 40, 5.0)
    ranks.answers = {rank: runs_nothing(rank) for rank in (1, 2)}
    ranks.answers[0] = WaitsReply(RankWaits(0, True, 2, "", (), {"0": 4}), 1, started=(call,))
    watch, now = DeadlockWatch(ranks, [0, 1, 2], [0]), time.monotonic()
    assert [watch.step(now + seconds, [0]) for seconds in range(8)] == [""] * 8, "a later cell may call it"
    assert watch.slow == (
        "Rank 0 started all_reduce, which needs ranks 1-2, which do not run this cell: pass `group=subgroup` to use "
        "the ranks of the cell alone"
    )


def test_pending_aborts_are_waited_for() -> None:
    ranks: Any = Ranks()
    controller, now = AbortController(ranks, [0, 1]), 100.0
    controller.step(now, [0, 1], transitions.Abort(timed_out=True))
    assert len(ranks.late) == 2
    ranks.late[0].set_result(NOTICED)
    assert not controller.acknowledged(now + 5.0, set())
    assert not controller.acknowledged(now + 1.0, {1})
    assert controller.acknowledged(now + 5.0, {1}), "one that has died answers no more"
    ranks.late[1].set_result(NOTICED)
    assert controller.acknowledged(now + 0.1, set())


def test_output_of_an_aborted_cell_is_awaited_after_replies() -> None:
    ranks: Any = Ranks()
    controller = AbortController(ranks, [0])
    run = CellRun(ranks, [0], CellOutput([0], RecordingSink()), controller)
    earlier = time.monotonic() - 2.0  # longer ago than stopped ranks are waited for
    controller.step(earlier, [0], transitions.Abort(timed_out=True))
    ranks.late[0].set_result(NOTICED)
    run.on_outcome(0, CellOutcome("ok"))
    assert not run.step()
    run.on_idle(0)
    assert run.step()


def test_interrupt_after_the_last_step_counts() -> None:
    ranks: Any = Ranks()
    run = CellRun(ranks, [0], CellOutput([0], RecordingSink()), AbortController(ranks, [0]))
    run.on_outcome(0, CellOutcome("ok"))
    run.on_idle(0)
    assert run.step()
    assert run.interrupted_at is None
    run.interrupt()
    assert run.interrupted_at is not None


class SlowView:
    """While it notes how the cell ended on a rank, another thread steps the cell."""

    run: CellRun
    was_over = True

    def flush(self) -> None:
        """Nothing is shown."""

    def rank_ended(self, rank: int, activity: Activity, at: AbortLocation | None) -> None:
        stepping = Thread(target=self.run.step)
        stepping.start()
        stepping.join(0.5)
        self.was_over = self.run.cell.state is State.DONE


def test_cell_is_over_only_when_its_view_knows_how_the_last_rank_ended() -> None:
    ranks, view = cast("Any", Ranks()), SlowView()
    run = CellRun(ranks, [0], CellOutput([0], RecordingSink()), AbortController(ranks, [0]), view=view)
    view.run = run
    run.on_outcome(0, CellOutcome("ok", end=CellEnd(outputs=0)))
    assert not view.was_over
    while not run.step():
        time.sleep(0.01)


@dataclass
class FinishedRun:
    """What of a run its record needs."""

    ranks: list[int]
    errors: Mapping[int, RankError] = field(default_factory=dict)
    explanation: str = ""
    number: int | None = 7

    @property
    def cell(self) -> FinishedRun:
        return self

    @property
    def seconds(self) -> dict[int, float]:
        return {rank: 0.25 * rank for rank in self.ranks}


def record(run: FinishedRun, failure: BaseException | None = None) -> dict[str, Any]:
    made = cell_record(cast(CellRun, run), failure)
    VALIDATOR.validate(made)
    assert len(json.dumps(made)) <= MAX_RECORD_BYTES
    return made


def failed(*errors: RankError, explanation: str = "", ranks: int = 4, timeout_s: float | None = None) -> dict[str, Any]:
    by_rank = {error.rank: error for error in errors}
    error = cell_error(by_rank, first=[errors[0].rank], explanation=explanation, timeout_s=timeout_s)
    return record(FinishedRun([*range(ranks)], by_rank, explanation), error)


def test_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_cell_that_worked() -> None:
    made = record(FinishedRun([0, 1, 2, 3]))
    assert (made["state"], made["cell"], made["ranks"], made["seconds"]) == ("ok", 7, "0-3", 0.75)
    assert (made["cause"], made["next"], made["verdict"]) == (None, [], "")
    assert made["groups"] == [{"ranks": "0-3", "did": "finished", "text": ""}]
    assert CellResult(record=made).to_dict() == made


def test_cause_has_the_innermost_line_of_user_code() -> None:
    made = failed(ERROR, *(RankError(rank, "aborted", "", "waited in all_reduce at line 4") for rank in range(3)))
    assert made["state"] == "failed"
    cause = made["cause"]
    assert (cause["ranks"], cause["type"], cause["message"]) == ("3", "IndexError", "list index out of range")
    assert (cause["file"], cause["line"]) == ("/home/ada/scaling.py", 12)
    assert {"ranks": "0-2", "did": "aborted", "text": "waited in all_reduce at line 4"} in made["groups"]
    assert made["next"][0]["command"] == "%distributed debug --ranks 3"


def test_deadlock_has_a_verdict_and_where_the_ranks_waited() -> None:
    why = "Ranks 0-1 wait in barrier at line 5 for rank 2, which has finished the cell."
    made = failed(*(RankError(rank, "aborted", "", "waited in barrier at line 5") for rank in (0, 1)), explanation=why)
    assert made["verdict"] == why
    assert (made["cause"]["file"], made["cause"]["line"]) == ("Cell In[7]", 5)
    assert {group["did"] for group in made["groups"]} == {"aborted", "finished"}


def test_timeout_and_interrupt_are_states() -> None:
    assert failed(RankError(0, "aborted", "", "was interrupted"), timeout_s=2.0)["state"] == "timed_out"
    assert record(FinishedRun([0, 1]), interrupt_error({}, [0, 1]))["state"] == "interrupted"


@pytest.mark.parametrize("letter", ["x", "\N{SNOWMAN}", '"'])
def test_large_failures_are_cut(letter: str) -> None:
    errors = [RankError(rank, "raised", f"Error{rank}", letter * 10_000, TRACEBACK) for rank in range(0, 256, 2)]
    made = failed(*errors, explanation=letter * 9_000, ranks=256)
    assert made["groups"][-1]["did"] == "other"
    assert made["cause"]["message"].endswith("…")


def test_errors_without_a_cell_follow_the_schema() -> None:
    for error in (CellError("The ranks stopped."), CellInterrupt("No rank stopped.")):
        VALIDATOR.validate(error.to_dict())
        assert error.to_dict()["verdict"] == str(error)
