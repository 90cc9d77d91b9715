"""When a cell is ended from outside: ranks that are late, as on a busy machine, are waited for."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from msgspec.structs import replace

from axon_nb.cluster.cells.abort import AbortController, DeadlockWatch
from axon_nb.cluster.cells.run import CellRun
from axon_nb.cluster.output import CellOutput
from axon_nb.cluster.output.sinks import RecordingSink
from axon_nb.cluster.rpc import Answer
from axon_nb.records.protocol.cells import AbortReply, AbortRequest, CellOutcome
from axon_nb.records.protocol.inspection import WaitsReply
from axon_nb.records.protocol.wire import REPLY, Request, encode
from axon_nb.records.waits import PeerCall, PendingCall, RankWaits

BARRIER = PendingCall(number=7, name="barrier", group="0", ranks=(0, 1, 2), sequence=1, peer=-1, bytes=0, seconds=2.0)


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
    watch, now = DeadlockWatch(ranks, [0, 1, 2, 3], [0, 1, 2], dead=dead), time.monotonic()
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
    controller.step(now, [0, 1], failed_at=None, died=False, interrupted=False, timed_out=True)
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
    controller.step(earlier, [0], failed_at=None, died=False, interrupted=False, timed_out=True)
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
