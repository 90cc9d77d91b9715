"""Deadlock analysis of ranks' reports."""

from __future__ import annotations

from msgspec.structs import replace

from axon_nb.records.waits import PendingCall, RankWaits, explain_deadlock, explain_mismatch


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
