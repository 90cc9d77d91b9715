"""A running cell: every state meets every event, and cells end in any order of events without losing or leaking any."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from axon_nb.cluster.cells import transitions
from axon_nb.cluster.cells.options import RankProgress
from axon_nb.cluster.cells.transitions import Cell, State, transition
from axon_nb.cluster.failures import RankError
from axon_nb.records.protocol.cells import CellEnd, CellOutcome

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
