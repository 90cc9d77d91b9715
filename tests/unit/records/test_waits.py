"""Who waits for whom: deadlocks in ranks' reports, slow ranks in one line, and the same for 1,024 ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from axon_nb.records.ranks import name_ranks
from axon_nb.records.stacks import RankStack, StackFrame, Stacks
from axon_nb.records.waits import (
    PendingCall,
    RankWaits,
    advice_for,
    describe_slow_ranks,
    explain_deadlock,
    explain_mismatch,
    missing_ranks,
)

RANKS = tuple(range(1024))
MAX_LOOKS = 16
EVEN, ODD = "ranks 0,2,4,6,8,10,12,14,…,1022 (512 ranks)", "ranks 1,3,5,7,9,11,13,15,…,1023 (512 ranks)"
CHAIN = "; ".join(
    [
        "rank 1022 waits in recv at line 3 for rank 1023, which has finished the cell",
        *(f"rank {rank} waits in recv at line 3 for rank {rank + 1}" for rank in range(7)),
        "1,015 more ranks wait for these or for each other.",
    ]
)


def waiting(rank: int, *, sequence: int = 1, name: str = "allreduce", line: int = 3, **more: object) -> RankWaits:
    facts: dict[str, object] = {
        "number": 7, "name": name, "group": "0", "ranks": (0, 1, 2), "sequence": sequence,
        "peer": -1, "bytes": 4, "seconds": 1.0, **more,
    }  # fmt: skip
    call = PendingCall(**facts)  # type: ignore[arg-type]
    return RankWaits(rank, True, line, {"allreduce": "all_reduce"}.get(name, name), (call,), {call.group: sequence})


def computing(rank: int, count: int = 0) -> RankWaits:
    return RankWaits(rank, True, 5, "", (), {"0": count})


def finished(rank: int, count: int = 0) -> RankWaits:
    return RankWaits(rank, False, None, "", (), {"0": count})


def judge(*reports: RankWaits) -> str | None:
    return explain_deadlock({report.rank: report for report in reports}, {0, 1, 2}, 0.5)


def test_slow_rank_is_not_a_deadlock() -> None:
    assert judge(waiting(0), waiting(1), computing(2)) is None


def test_call_reached_by_all_ranks_is_in_progress() -> None:
    assert judge(waiting(0), waiting(1), waiting(2)) is None


def test_short_wait_is_ignored() -> None:
    assert judge(waiting(0, seconds=0.1), finished(1), finished(2)) is None


def test_waiting_for_a_finished_rank_is_a_deadlock() -> None:
    expected = "ranks 0-1 wait in all_reduce at line 3 for rank 2, which has finished the cell."
    assert judge(waiting(0), waiting(1), finished(2)) == expected


def test_finished_rank_that_made_the_call_is_not_the_cause() -> None:
    assert judge(waiting(0), waiting(1), finished(2, count=1)) is None


def test_ranks_that_wait_for_each_other() -> None:
    text = judge(
        waiting(0, name="recv", sequence=0, peer=1), waiting(1, name="recv", sequence=0, peer=0, line=9), computing(2)
    )
    assert text == "rank 0 waits in recv at line 3 for rank 1; rank 1 waits in recv at line 9 for rank 0."


def test_recv_with_active_sender_is_in_progress() -> None:
    receiver = waiting(0, name="recv", sequence=0, peer=1)
    assert judge(receiver, waiting(1, name="send", sequence=0, peer=0), finished(2)) is None


def test_waiting_for_a_slow_rank_is_not_a_deadlock() -> None:
    receiver = waiting(0, name="recv", sequence=0, peer=1)
    assert judge(receiver, waiting(1, ranks=(1, 2), group="g"), computing(2)) is None


def test_different_sizes_and_calls() -> None:
    assert judge(waiting(0), waiting(1, bytes=8), computing(2)) == (
        "Size mismatch: rank 0 passed 4 bytes to all_reduce at line 3, rank 1 passed 8 bytes to all_reduce at line 3."
    )
    text = judge(waiting(0), waiting(1, name="barrier", line=6), computing(2))
    assert text is not None
    assert text.startswith("Collective mismatch: rank 0 is in all_reduce at line 3, rank 1 in barrier at line 6")


def test_user_thread_delays_the_verdict() -> None:
    thread = replace(finished(1), threads=("Thread-5 (receive)",))
    assert judge(waiting(0), thread, finished(2, count=1)) is None
    assert judge(waiting(0), replace(waiting(1, sequence=2), threads=("Thread-5",)), computing(2, count=2)) is None
    # Its own thread helps nobody who waits for another one.
    assert judge(replace(waiting(0), threads=("Thread-5",)), finished(1), computing(2, count=1)) is not None
    late = replace(waiting(0), pending=tuple(replace(call, seconds=31.0) for call in waiting(0).pending))
    assert judge(late, thread, finished(2, count=1)) == (
        "rank 0 waits in all_reduce at line 3 for rank 1, which has finished the cell."
    )


def test_unawaited_call_is_compared_with_the_others() -> None:
    started = waiting(0, name="allreduce").pending[0]
    first = waiting(0, name="barrier", sequence=2, number=8)
    first = replace(first, pending=(started, *first.pending), waited=8)
    expected = (
        "Collective mismatch: rank 1 is in barrier at line 3, rank 0 started all_reduce with `async_op=True` instead "
        "and does not wait for it, on the same group."
    )
    assert judge(first, waiting(1, name="barrier"), waiting(2, name="barrier")) == expected
    assert judge(first, waiting(1), computing(2)) is None, "rank 1 is in the all_reduce that rank 0 has started"


def test_ranks_that_all_wait_for_a_message_from_anyone() -> None:
    receivers = [waiting(rank, name="recv_anysource", sequence=0) for rank in range(3)]
    text = "ranks 0-2 wait in recv_anysource at line 3 for a message from any rank, and no rank sends one."
    assert judge(*receivers) == text
    assert judge(*receivers[:2], computing(2)) is None, "rank 2 may send to one of them"
    text = "ranks 0-1 wait in recv_anysource at line 3 for a message from any rank, and no rank sends one."
    assert judge(*receivers[:2], finished(2)) == text
    sender = waiting(2, name="send", sequence=0, peer=1)
    assert judge(*receivers[:2], sender) is None, "rank 1 gets it, and may send to rank 0"


def started(sequence: int, name: str = "allreduce", size: int = 40, group: str = "0") -> PendingCall:
    return PendingCall(9, name, group, (0, 1, 2), sequence, -1, size, 2.0)


def test_started_collectives_are_compared_at_the_same_place() -> None:
    assert explain_mismatch({0: [started(4)], 1: [started(4)], 2: [started(5, size=80)]}) == ""
    assert explain_mismatch({0: [started(4)], 1: [started(4, size=80, group="1")]}) == ""
    assert explain_mismatch({0: [started(4, "_allgather_base")], 1: [started(4, "_allgather_base", 80)]}) == ""
    text = "Collective mismatch: rank 0 started all_reduce, rank 2 broadcast, on the same group."
    assert explain_mismatch({0: [started(4), started(5)], 2: [started(5, "broadcast")]}) == text


def late_waiting(
    rank: int, *, seconds: float = 3.24, call: str = "all_reduce", via: str = "", **more: object
) -> RankWaits:
    facts: dict[str, object] = {
        "number": 7, "name": "allreduce", "group": "0", "ranks": (0, 1, 2, 3), "sequence": 1,
        "peer": -1, "bytes": 4, "seconds": seconds, **more,
    }  # fmt: skip
    pending = PendingCall(**facts)  # type: ignore[arg-type]
    return RankWaits(rank, True, 4, call, (pending,), {pending.group: pending.sequence}, via)


def late_computing(rank: int, line: int = 7) -> RankWaits:
    return RankWaits(rank, True, line, "", (), {"0": 0})


def tell(*reports: RankWaits) -> str:
    return describe_slow_ranks({report.rank: report for report in reports}, 3.0)


def test_late_rank_and_its_line_come_first() -> None:
    expected = "Waiting for rank 1 (line 7): ranks 0,2-3 have been in all_reduce at line 4 for 3.2 s"
    assert tell(late_waiting(0), late_computing(1), late_waiting(2), late_waiting(3)) == expected


def test_short_waits_are_not_reported() -> None:
    assert (
        tell(late_waiting(0, seconds=2.9), late_computing(1), late_waiting(2, seconds=1), late_waiting(3, seconds=2))
        == ""
    )


def test_nothing_is_reported_when_all_ranks_have_arrived() -> None:
    assert tell(*(late_waiting(rank) for rank in range(4))) == ""


def test_late_ranks_in_different_places_have_no_line() -> None:
    text = tell(late_waiting(0, seconds=12), late_computing(1), late_computing(2, line=8), late_waiting(3))
    assert text == "Waiting for ranks 1-2: ranks 0,3 have been in all_reduce at line 4 for 12 s"


def test_transitive_waits_do_not_hide_the_slow_rank() -> None:
    receiver = late_waiting(3, call="recv", name="recv", sequence=0, peer=0)
    text = tell(late_waiting(0, ranks=(0, 1)), late_computing(1), late_computing(2), receiver)
    assert text == "Waiting for rank 1 (line 7): rank 0 has been in all_reduce at line 4 for 3.2 s"


def test_send_waits_for_its_receiver() -> None:
    sender = late_waiting(0, call="send", name="send", sequence=0, peer=1)
    assert missing_ranks({0: sender, 1: late_computing(1)}, 0.5) == {0: (1,)}
    receiver = late_waiting(1, call="recv", name="recv", sequence=0, peer=0)
    assert missing_ranks({0: sender, 1: receiver}, 0.5) == {}
    finished = RankWaits(1, False, None, "", (), {"0": 0})
    text = explain_deadlock({0: sender, 1: finished}, {0, 1}, 0.5)
    assert text == "rank 0 waits in send at line 4 for rank 1, which has finished the cell."


def test_awaited_call_is_not_always_the_oldest() -> None:
    older = PendingCall(3, "allreduce", "other", (0, 1), 1, -1, 4, 60.0)
    own = late_waiting(0)
    report = RankWaits(0, True, 4, "all_reduce", (older, *own.pending), own.counts, "", 7)
    assert report.blocked_in == own.pending[0]


def test_implicit_collective_is_reported_with_fix() -> None:
    finished = [RankWaits(rank, False, None, "", (), {"0": 0}) for rank in (1, 2, 3)]
    reports = {report.rank: report for report in (late_waiting(0, via="full_tensor"), *finished)}
    assert explain_deadlock(reports, range(4), 0.5) == (
        "rank 0 waits in full_tensor at line 4 for ranks 1-3, which have finished the cell. `full_tensor()` is a "
        "collective: call it on every rank, and use `if rank == 0` only for saving."
    )


def test_advice_may_be_empty() -> None:
    assert advice_for(["", "all_reduce"]) == ""


def test_equal_stacks_are_shown_once() -> None:
    frames = (StackFrame("Cell In[3], line 4", "dist.barrier()"), StackFrame("… 4 frames of torch: barrier … wait"))
    stuck = [RankStack("waiting in barrier at line 4 for rank 1", frames, 3, seconds) for seconds in (1.0, 2.0)]
    stacks = Stacks({0: stuck[0], 2: stuck[1], 1: RankStack("idle")})
    assert repr(stacks).splitlines() == [
        "[ranks 0,2] In [3]: waiting in barrier at line 4 for rank 1, for 2.0 s",
        "  Cell In[3], line 4",
        "      dist.barrier()",
        "  … 4 frames of torch: barrier … wait",
        "[rank 1] idle",
    ]
    assert len(stacks) == 3


def test_stack_text_is_bounded() -> None:
    frames = tuple(StackFrame(f"file, line {number}", "x" * 100) for number in range(2000))
    assert len(repr(Stacks({0: RankStack("running", frames, 1)}))) < 101_000


class Counted(dict[int, RankWaits]):
    """Reports that count how often one of them is looked at."""

    looks = 0

    def __getitem__(self, rank: int) -> RankWaits:
        self.looks += 1
        return super().__getitem__(rank)

    def __contains__(self, rank: object) -> bool:
        self.looks += 1
        return super().__contains__(rank)

    def get(self, rank: int, default: Any = None) -> Any:
        self.looks += 1
        return super().get(rank, default)

    def items(self) -> Iterator[tuple[int, RankWaits]]:  # type: ignore[override]
        for rank, report in super().items():
            self.looks += 1
            yield rank, report


def waiting_of_many(rank: int, name: str = "allreduce", *, peer: int = -1, size: int = 4) -> RankWaits:
    sequence = 0 if name.startswith(("recv", "send")) else 1
    call = PendingCall(7, name, "0", RANKS, sequence, peer, size, 5.0)
    return RankWaits(rank, True, 3, {"allreduce": "all_reduce"}.get(name, name), (call,), {"0": sequence})


def elsewhere(rank: int, *, running: bool) -> RankWaits:
    return RankWaits(rank, running, 5 if running else None, "", (), {"0": 0})


def reports(of: Callable[[int], RankWaits]) -> Counted:
    return Counted({rank: of(rank) for rank in RANKS})


SITUATIONS: dict[str, tuple[Callable[[int], RankWaits], str | None]] = {
    "all are in one collective": (waiting_of_many, None),
    "one has finished": (
        lambda rank: elsewhere(rank, running=False) if rank == 512 else waiting_of_many(rank),
        "ranks 0-511,513-1023 wait in all_reduce at line 3 for rank 512, which has finished the cell.",
    ),
    "every second one computes": (
        lambda rank: elsewhere(rank, running=True) if rank % 2 else waiting_of_many(rank),
        None,
    ),
    "every second one has finished": (
        lambda rank: elsewhere(rank, running=False) if rank % 2 else waiting_of_many(rank),
        f"{EVEN} wait in all_reduce at line 3 for {ODD}, which have finished the cell.",
    ),
    "one is in another collective": (
        lambda rank: waiting_of_many(rank, "barrier" if rank == 700 else "allreduce"),
        "Collective mismatch: rank 0 is in all_reduce at line 3, rank 700 in barrier at line 3, on the same group.",
    ),
    "a chain ends at one that has finished": (
        lambda rank: elsewhere(rank, running=False) if rank == 1023 else waiting_of_many(rank, "recv", peer=rank + 1),
        CHAIN,
    ),
    "a chain ends at one that computes": (
        lambda rank: elsewhere(rank, running=True) if rank == 1023 else waiting_of_many(rank, "recv", peer=rank + 1),
        None,
    ),
    "all wait for anyone": (
        lambda rank: waiting_of_many(rank, "recv_anysource"),
        "ranks 0-1023 wait in recv_anysource at line 3 for a message from any rank, and no rank sends one.",
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_deadlock_is_found_with_few_looks_at_each_report(situation: str) -> None:
    of, expected = SITUATIONS[situation]
    counted = reports(of)
    assert explain_deadlock(counted, RANKS, 0.5) == expected
    assert counted.looks <= MAX_LOOKS * len(RANKS)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_late_ranks_are_found_with_few_looks_at_each_report(situation: str) -> None:
    counted = reports(SITUATIONS[situation][0])
    late = missing_ranks(counted, 0.5)
    assert len({id(others) for others in late.values()}) <= len({*late.values()}), "equal ones are shared"
    line = describe_slow_ranks(counted, 3.0)
    assert len(line) <= 300
    assert counted.looks <= MAX_LOOKS * len(RANKS)


def test_scattered_ranks_are_counted_in_a_sentence() -> None:
    assert name_ranks(range(0, 32, 2)) == "ranks 0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30"
    assert name_ranks(range(0, 34, 2)) == "ranks 0,2,4,6,8,10,12,14,…,32 (17 ranks)"
