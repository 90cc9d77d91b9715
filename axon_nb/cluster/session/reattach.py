"""After an attach: the cells that ran, or ended, while no notebook was connected, and groups left half-way.

Following a cell that a notebook before this one has sent: its output and its end are fetched from the ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.cells.driver import CellHandle
from axon_nb.cluster.cells.result import CellResult
from axon_nb.cluster.cells.run import CellRun
from axon_nb.cluster.output import NotebookSink
from axon_nb.cluster.recovery.recovery import next_epoch
from axon_nb.cluster.rpc.answers import Answer
from axon_nb.cluster.rpc.client import RankClient
from axon_nb.errors import CellError, CellInterrupt, ClusterLostError
from axon_nb.records.protocol.cells import AbortRequest, CellFacts, CellReport, CellsReply, CellsRequest, Cut
from axon_nb.records.ranks import format_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.cells.manager import CellManager
    from axon_nb.cluster.state import ClusterState

__all__ = ["Follower", "resume"]

_EVERY_S = 0.1
_NEVER_CAME_S = 2.0
"""A rank that is idle and does not know the cell for this long never got it."""


class Follower:
    """Asks the ranks of one cell ten times a second over the control channel, which answers while they are busy.

    Fetching, rather than listening, loses nothing and shows nothing twice: each answer begins where the one before
    ended. What came to be lost before anyone asked is told in a note.

    Args:
        client: The cluster's client.
        run: The cell in this notebook.
    """

    def __init__(self, client: RankClient, run: CellRun) -> None:
        self._client = client
        self._run = run
        self._last: dict[int, int] = {}
        self._asked: dict[int, Answer[CellsReply]] = {}
        self._due = 0.0
        self._idle_since: dict[int, float] = {}

    def step(self, now: float) -> None:
        """Hand on what has come, and ask again when it is due."""
        for rank, answer in list(self._asked.items()):
            if answer.done():
                del self._asked[rank]
                self._take(rank, answer.reply(), now)
        if now < self._due:
            return
        self._due = now + _EVERY_S
        for rank in self._run.unfinished:
            if rank not in self._asked:
                with contextlib.suppress(KeyError):  # it is gone; the host agent tells
                    since = self._last.get(rank, 0)
                    self._asked[rank] = self._client.request(rank, CellsRequest(self._run.token, since))

    def _take(self, rank: int, reply: CellsReply | None, now: float) -> None:
        if rank not in self._run.unfinished:
            return
        if reply is not None and reply.cells:
            self.feed(rank, reply.cells[0])
        elif reply is None or reply.running:
            self._idle_since.pop(rank, None)
        elif now - self._idle_since.setdefault(rank, now) > _NEVER_CAME_S:
            why = "the notebook went away before it had sent the cell to this rank"
            self._end(rank, {"status": "error", "ename": "CellLost", "evalue": why})

    def feed(self, rank: int, report: CellReport) -> None:
        """Hand on one rank's report."""
        run = self._run
        if note := _cut_note(report.cut, first=rank not in self._last):
            run.on_output(rank, "stream", {"name": "stderr", "text": note}, {})
        self._last[rank] = report.last
        for kind, content in report.messages:
            run.on_output(rank, kind, content, {})
        if report.outcome is not None:
            self._end(rank, dict(report.outcome))

    def _end(self, rank: int, outcome: dict[str, Any]) -> None:
        self._run.on_idle(rank)
        self._run.on_reply(rank, outcome)

    def wait_for_late(self, limit_s: float) -> None:
        """After the cell was given up: go on until its stuck ranks have come back, at most `limit_s` seconds."""
        end = time.monotonic() + limit_s
        while self._run.unfinished and not self._run.lost and time.monotonic() < end:
            self.step(time.monotonic())
            time.sleep(_EVERY_S)


def _cut_note(cut: Cut, *, first: bool) -> str:
    counts = ((cut.lines, "line"), (cut.displays, "display"))
    parts = [f"{count:,} {noun}{'s' * (count != 1)}" for count, noun in counts if count]
    if not (parts or cut.size):
        return ""
    when = "before the notebook came back" if first else "in between"
    return f"… {' and '.join(parts) or 'text'} ({cut.size / 1e3:.1f} kB) {when} not kept on the rank …\n"


_ANSWER_S = 10.0
"""A rank that has not answered by then is in C code that keeps Python's lock; all others answer in milliseconds, unless
the machine is busy, and what they are in would be lost if they were not waited for."""
_LOOK_S = 0.05
"""Between two looks whether a rank that is waited for still lives."""
_ENDED_S = 0.3
"""A cell that has ended already is shown before `attach` returns, if that takes no longer."""
_LATE_S = 3600.0
_RECOVERY_S = 40.0

Replies = Mapping[int, CellsReply]


def resume(cells: CellManager, *, left_ns: int) -> CellHandle | None:
    """Take up what the notebook before this one has left on the ranks.

    Args:
        cells: Those of a cluster just attached to.
        left_ns: When that notebook left: monotonic time of the host in nanoseconds.

    Returns:
        The cell that runs last, or has ended since; None: no cell was under way.
    """
    answers = _ask(cells.state, left_ns)
    harmed = _harmed(cells.state, answers)
    next_epoch(above=max((answer.epoch for answer in answers.values()), default=0))
    reports: dict[str, dict[int, CellReport]] = {}
    for rank, answer in answers.items():
        for report in answer.cells:
            reports.setdefault(report.run, {})[rank] = report
    handles = [_adopt(cells, run, by_rank, answers, harmed=harmed) for run, by_rank in reports.items()]
    if harmed and not handles:
        _recover(cells, answers)
    return handles[-1] if handles else None


def _ask(state: ClusterState, left_ns: int) -> dict[int, CellsReply]:
    client = state.connection.client
    ranks = [rank for rank in client.registered if rank not in state.health.dead]
    asked = {rank: client.request(rank, CellsRequest(after_ns=left_ns)) for rank in ranks}
    end = time.monotonic() + _ANSWER_S
    answers = {}
    for rank, answer in asked.items():
        while not answer.wait(_LOOK_S) and rank not in state.health.dead and time.monotonic() < end:
            pass
        if (reply := answer.reply()) is not None:
            answers[rank] = reply
    return answers


def _harmed(state: ClusterState, answers: Replies) -> bool:
    """Whether the groups cannot be used as they are: a rank is dead, or an abort or a forming was cut short."""
    if state.backend != "gloo":
        return False
    halfway = any(answer.aborted or answer.forming for answer in answers.values())
    return bool(state.health.dead) or halfway or len({answer.epoch for answer in answers.values()}) > 1


def _adopt(
    cells: CellManager, name: str, reports: Mapping[int, CellReport], answers: Replies, *, harmed: bool
) -> CellHandle:
    facts = next(iter(reports.values())).facts or CellFacts()
    ranks = list(facts.ranks)
    title = f"Cell In[{facts.cell}]"
    running = [rank for rank in ranks if rank not in reports or reports[rank].outcome is None]
    if running:
        print(f"{title} still runs on ranks {format_ranks(running)}: its output goes on here.")
    else:
        print(f"{title} has ended on ranks {format_ranks(ranks)} while no notebook was connected.")
    run = cells.new_run(ranks, {"quiet": facts.quiet, "timeout": facts.timeout, "show_value": facts.show_value})
    run.harmed = harmed
    follower = Follower(cells.state.connection.client, run)
    run.adopt(name, follower.step, seconds=max(report.elapsed_ns for report in reports.values()) / 1e9)
    for rank, report in reports.items():
        follower.feed(rank, report)
    cells.state.health.tell(run)
    if any(answers[rank].aborted for rank in reports) and not run.errors:
        run.interrupt()  # somebody has pressed the stop button, and the notebook went away before it had its effect
    end = _ending(cells, run, follower, title, values=facts.token is not None)
    handle = CellHandle(run, end)
    if not running:
        handle.wait(_ENDED_S)
    return handle


def _ending(
    cells: CellManager, run: CellRun, follower: Follower, title: str, *, values: bool
) -> Callable[[], CellResult]:
    def end() -> CellResult:
        sink = NotebookSink()
        try:
            result = cells.end(run, {"values": values})
        except (CellError, CellInterrupt, ClusterLostError) as error:
            sink.stream("stderr", f"{title} failed.\n" + "\n".join(error._render_traceback_()) + "\n")
            if run.unfinished and not run.lost:
                threading.Thread(target=follower.wait_for_late, args=(_LATE_S,), daemon=True).start()
            raise
        sink.stream("stdout", f"{title} is done: {max(run.seconds.values()):.3g} s.\n")
        return result

    return end


def _recover(cells: CellManager, answers: Replies) -> None:
    for rank, answer in answers.items():
        if answer.forming:  # it may wait for ranks that were never told to form their groups
            cells.state.connection.client.request(rank, AbortRequest())
    recovery = cells.recovery()
    end = time.monotonic() + _RECOVERY_S
    while not recovery.step() and time.monotonic() < end:
        time.sleep(0.005)
