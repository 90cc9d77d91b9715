"""When a cell is ended from outside: ranks that are late, as on a busy machine, are waited for."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from axon_nb.cluster.cells.abort import AbortController
from axon_nb.cluster.cells.deadlock import DeadlockWatch

WAITS = {
    "number": 7, "name": "barrier", "group": "0", "ranks": [0, 1, 2], "sequence": 1, "peer": -1, "bytes": 0,
    "seconds": 2.0,
}  # fmt: skip


class Ranks:
    """What ranks answer on the control channel; `late` ones have not answered yet."""

    def __init__(self) -> None:
        self.answers: dict[int, dict[str, Any]] = {}
        self.late: list[Future[Any]] = []
        self.silent: set[int] = set()

    def request(self, rank: int, msg_type: str, **_: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if msg_type == "axon_abort" or rank in self.silent:
            self.late.append(answer)
        else:
            answer.set_result({"content": self.answers[rank]})
        return answer


def waits(rank: int) -> dict[str, Any]:
    return {"rank": rank, "running": True, "line": 2, "call": "barrier", "pending": [WAITS], "counts": {"0": 1}}


def runs_nothing(rank: int) -> dict[str, Any]:
    return {"rank": rank, "running": False, "line": None, "call": "", "pending": [], "counts": {"0": 0}}


def test_a_rank_that_has_not_begun_the_cell_is_not_taken_for_one_that_has_ended_it() -> None:
    ranks: Any = Ranks()
    ranks.answers = {0: waits(0), 1: waits(1), 2: runs_nothing(2)}
    watch, now = DeadlockWatch(ranks, [0, 1, 2], [0, 1, 2]), time.monotonic()
    assert [watch.step(now + seconds, [0, 1, 2]) for seconds in range(10)] == [""] * 10
    told = [watch.step(now + seconds, [0, 1]) for seconds in range(10, 14)]
    assert "ranks 0-1 wait in barrier at line 2 for rank 2, which has finished the cell." in told


def test_a_rank_outside_of_the_cell_that_dies_is_not_waited_for() -> None:
    ranks: Any = Ranks()
    ranks.answers = {0: waits(0), 1: waits(1), 2: runs_nothing(2), 3: runs_nothing(3)}
    ranks.silent = {3}
    dead: set[int] = set()
    watch, now = DeadlockWatch(ranks, [0, 1, 2, 3], [0, 1, 2], dead=dead), time.monotonic()
    assert [watch.step(now + seconds, [0, 1]) for seconds in range(10)] == [""] * 10
    dead.add(3)
    told = [watch.step(now + seconds, [0, 1]) for seconds in range(10, 16)]
    assert "ranks 0-1 wait in barrier at line 2 for rank 2, which has finished the cell." in told


def test_what_ranks_have_not_carried_out_yet_is_waited_for() -> None:
    ranks: Any = Ranks()
    controller, now = AbortController(ranks, [0, 1]), 100.0
    controller.step(now, [0, 1], failed_at=None, died=False, interrupted=False, timed_out=True)
    assert len(ranks.late) == 2
    ranks.late[0].set_result({"content": {}})
    assert not controller.acknowledged(now + 5.0, set())
    assert not controller.acknowledged(now + 1.0, {1})
    assert controller.acknowledged(now + 5.0, {1}), "one that has died answers no more"
    ranks.late[1].set_result({"content": {}})
    assert controller.acknowledged(now + 0.1, set())
