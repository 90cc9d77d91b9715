"""Reattach to the cells that ran, or finished, while no notebook was connected, and repair groups left half-way.

The output and the outcome of such a cell, sent by an earlier kernel, are fetched from the ranks.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from axon_nb.cluster.cells.driver import CellHandle
from axon_nb.cluster.cells.result import CellResult
from axon_nb.cluster.cells.run import CellRun
from axon_nb.cluster.output import NotebookSink
from axon_nb.cluster.recovery.resize import settle
from axon_nb.cluster.rpc import Answer, RankClient
from axon_nb.errors import CellError, CellInterrupt, ClusterLostError
from axon_nb.records.protocol import cells as protocol
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import count_of

if TYPE_CHECKING:
    from axon_nb.cluster.cells.manager import CellManager
    from axon_nb.cluster.state import ClusterState

_POLL_INTERVAL_S = 0.1
_NEVER_SENT_AFTER_S = 2.0
"""A rank that has been idle for this long and does not know the cell never got it."""
_REPLY_TIMEOUT_S = 10.0
"""A rank that has not replied by then is in C code that holds the GIL. All others reply in milliseconds, unless the
machine is busy; without waiting for them, their cells would be lost."""
_DEATH_POLL_S = 0.05
"""How often to check whether a rank that has not replied is still alive."""
_SHOW_RESULT_S = 0.3
"""A cell that has already finished is shown before `attach` returns, if that takes no longer."""
_LATE_TIMEOUT_S = 3600.0
_RECOVERY_TIMEOUT_S = 40.0

Replies = Mapping[int, protocol.CellsReply]


class OutputReplay:
    """Polls the ranks of one cell ten times per second over the control channel, which replies while they are busy.

    Polling, rather than listening, loses nothing and shows nothing twice: each reply starts where the previous one
    ended. Output that the rank had to discard before is reported in a note.

    Args:
        client: The cluster's client.
        run: The cell in this notebook.
    """

    def __init__(self, client: RankClient, run: CellRun) -> None:
        self._client = client
        self._run = run
        self._last: dict[int, int] = {}
        self._requests: dict[int, Answer[protocol.CellsReply]] = {}
        self._due = 0.0
        self._idle_since: dict[int, float] = {}

    def step(self, now: float) -> None:
        """Pass on what has arrived, and send the requests that are due."""
        for rank, answer in list(self._requests.items()):
            if answer.done():
                del self._requests[rank]
                self._process(rank, answer.reply(), now)
        if now < self._due:
            return
        self._due = now + _POLL_INTERVAL_S
        for rank in self._run.unfinished:
            if rank not in self._requests:
                with contextlib.suppress(KeyError):  # it is gone; the host agent reports that
                    since = self._last.get(rank, 0)
                    self._requests[rank] = self._client.request(rank, protocol.CellsRequest(self._run.token, since))

    def _process(self, rank: int, reply: protocol.CellsReply | None, now: float) -> None:
        if rank not in self._run.unfinished:
            return
        if reply is not None and reply.cells:
            self.feed(rank, reply.cells[0])
        elif reply is None or reply.running:
            self._idle_since.pop(rank, None)
        elif now - self._idle_since.setdefault(rank, now) > _NEVER_SENT_AFTER_S:
            why = "the notebook disconnected before sending the cell to this rank"
            self._finish(rank, protocol.CellOutcome("error", "CellLostError", why))

    def feed(self, rank: int, report: protocol.CellReport) -> None:
        """Pass on one rank's report."""
        run = self._run
        if note := _omission_note(report.omitted, first=rank not in self._last):
            run.on_output(rank, "stream", {"name": "stderr", "text": note}, {})
        self._last[rank] = report.last
        for kind, content in report.messages:
            run.on_output(rank, kind, content, {})
        if report.outcome is not None:
            self._finish(rank, report.outcome)

    def _finish(self, rank: int, outcome: protocol.CellOutcome) -> None:
        self._run.on_idle(rank)
        self._run.on_outcome(rank, outcome)

    def wait_for_late(self, timeout_s: float) -> None:
        """Go on until the stuck ranks of a failed cell have replied, at most `timeout_s` seconds."""
        end = time.monotonic() + timeout_s
        while self._run.unfinished and not self._run.cell.lost and time.monotonic() < end:
            self.step(time.monotonic())
            time.sleep(_POLL_INTERVAL_S)


def _omission_note(omitted: protocol.Omitted, *, first: bool) -> str:
    counts = ((omitted.lines, "line"), (omitted.displays, "display"))
    parts = [count_of(*each) for each in counts if each[0]]
    if not (parts or omitted.size):
        return ""
    when = "before the notebook reconnected" if first else "in between"
    return f"… {' and '.join(parts) or 'text'} ({omitted.size / 1e3:.1f} kB) printed {when}: discarded …\n"


def reattach_cells(cells: CellManager, *, left_ns: int) -> CellHandle | None:
    """Reattach to the cells that the previous kernel left on the ranks.

    Args:
        cells: The cells of a cluster just attached to.
        left_ns: When that kernel disconnected: monotonic time of the host in nanoseconds.

    Returns:
        The last cell that is running, or has finished since; None if there is none.
    """
    replies = _request_cells(cells.state, left_ns)
    needs_recovery = _needs_recovery(cells.state, replies)
    if any(reply.resized_from or reply.staged_size for reply in replies.values()):
        settle(cells.state, {rank: reply.resized_from for rank, reply in replies.items()})
        needs_recovery = True
    cells.state.next_epoch(above=max((reply.epoch for reply in replies.values()), default=0))
    reports: dict[str, dict[int, protocol.CellReport]] = {}
    for rank, reply in replies.items():
        for report in reply.cells:
            reports.setdefault(report.run, {})[rank] = report
    handles = [
        _reattach(cells, run, by_rank, replies, needs_recovery=needs_recovery) for run, by_rank in reports.items()
    ]
    if needs_recovery and not handles:
        _recover(cells, replies)
    return handles[-1] if handles else None


def _request_cells(state: ClusterState, left_ns: int) -> dict[int, protocol.CellsReply]:
    client = state.connection.client
    ranks = [rank for rank in client.registered if rank not in state.health.dead]
    requests = {rank: client.request(rank, protocol.CellsRequest(after_ns=left_ns)) for rank in ranks}
    end = time.monotonic() + _REPLY_TIMEOUT_S
    replies = {}
    for rank, answer in requests.items():
        while not answer.wait(_DEATH_POLL_S) and rank not in state.health.dead and time.monotonic() < end:
            pass
        if (reply := answer.reply()) is not None:
            replies[rank] = reply
    return replies


def _needs_recovery(state: ClusterState, replies: Replies) -> bool:
    """Whether the groups are unusable: a rank is dead, or an abort or a rebuild did not complete."""
    if state.backend == "nccl":
        return False
    half_way = any(reply.aborted or reply.rebuilding for reply in replies.values())
    return bool(state.health.dead) or half_way or len({reply.epoch for reply in replies.values()}) > 1


def _reattach(
    cells: CellManager, name: str, reports: Mapping[int, protocol.CellReport], replies: Replies, *, needs_recovery: bool
) -> CellHandle:
    facts = next(iter(reports.values())).facts or protocol.CellFacts()
    ranks = list(facts.ranks)
    title = f"Cell In[{facts.cell}]"
    running = [rank for rank in ranks if rank not in reports or reports[rank].outcome is None]
    if running:
        print(f"{title} is still running on {name_ranks(running)}. Its output continues {_place_of_output()}.")
    else:
        print(f"{title} finished on {name_ranks(ranks)} while no notebook was connected.")
    run = cells.new_run(ranks, {"quiet": facts.quiet, "timeout": facts.timeout, "show_value": facts.show_value})
    cells.add(run)
    run.number = facts.cell
    replay = OutputReplay(cells.state.connection.client, run)
    seconds = max(report.elapsed_ns for report in reports.values()) / 1e9
    run.reattach(name, replay.step, seconds=seconds, must_recover=needs_recovery)
    for rank, report in reports.items():
        replay.feed(rank, report)
    cells.state.health.report_to(run)
    if any(replies[rank].aborted for rank in reports) and not run.errors:
        run.interrupt()  # the user interrupted the cell, and the kernel disconnected before that had its effect
    finish = _finisher(cells, run, replay, title, values=facts.token is not None)
    handle = CellHandle(run, finish)
    if not running:
        handle.wait(_SHOW_RESULT_S)
    return handle


def _place_of_output() -> str:
    """Where a kernel shows what threads print: its streams, from ipykernel 6.29 on, know the cell of each thread."""
    stream = type(sys.stdout)
    is_shared = stream.__module__ == "ipykernel.iostream" and not hasattr(stream, "parent_header")
    return "below the cell that ran last" if is_shared else "here"


def _finisher(
    cells: CellManager, run: CellRun, replay: OutputReplay, title: str, *, values: bool
) -> Callable[[], CellResult]:
    def finish() -> CellResult:
        sink = NotebookSink()
        try:
            result = cells.finish(run, {"values": values})
        except (CellError, CellInterrupt, ClusterLostError) as error:
            sink.stream("stderr", f"{title} failed.\n" + "\n".join(error._render_traceback_()) + "\n")
            if run.unfinished and not run.cell.lost:
                threading.Thread(target=replay.wait_for_late, args=(_LATE_TIMEOUT_S,), daemon=True).start()
            raise
        sink.stream("stdout", f"{title} is done: {max(run.cell.seconds.values()):.3g} s.\n")
        return result

    return finish


def _recover(cells: CellManager, replies: Replies) -> None:
    for rank, reply in replies.items():
        if reply.rebuilding:  # it may wait for ranks that were never asked to rebuild their groups
            cells.state.connection.client.request(rank, protocol.AbortRequest())
    recovery = cells.recovery()
    end = time.monotonic() + _RECOVERY_TIMEOUT_S
    while not recovery.step() and time.monotonic() < end:
        time.sleep(0.005)
