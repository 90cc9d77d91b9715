"""One-line description of slow ranks, and advice for a rank that is alone in a collective."""

from __future__ import annotations

from axon_nb.records.stacks import RankStack, StackFrame, Stacks
from axon_nb.records.waits import (
    PendingCall,
    RankWaits,
    advice_for,
    describe_slow_ranks,
    explain_deadlock,
    missing_ranks,
)


def waiting(rank: int, *, seconds: float = 3.24, call: str = "all_reduce", via: str = "", **more: object) -> RankWaits:
    facts: dict[str, object] = {
        "number": 7, "name": "allreduce", "group": "0", "ranks": (0, 1, 2, 3), "sequence": 1,
        "peer": -1, "bytes": 4, "seconds": seconds, **more,
    }  # fmt: skip
    pending = PendingCall(**facts)  # type: ignore[arg-type]
    return RankWaits(rank, True, 4, call, (pending,), {pending.group: pending.sequence}, via)


def computing(rank: int, line: int = 7) -> RankWaits:
    return RankWaits(rank, True, line, "", (), {"0": 0})


def tell(*reports: RankWaits) -> str:
    return describe_slow_ranks({report.rank: report for report in reports}, 3.0)


def test_late_rank_and_its_line_come_first() -> None:
    expected = "Waiting for rank 1 (line 7): ranks 0,2-3 have been in all_reduce at line 4 for 3.2 s"
    assert tell(waiting(0), computing(1), waiting(2), waiting(3)) == expected


def test_short_waits_are_not_reported() -> None:
    assert tell(waiting(0, seconds=2.9), computing(1), waiting(2, seconds=1), waiting(3, seconds=2)) == ""


def test_nothing_is_reported_when_all_ranks_have_arrived() -> None:
    assert tell(*(waiting(rank) for rank in range(4))) == ""


def test_late_ranks_in_different_places_have_no_line() -> None:
    text = tell(waiting(0, seconds=12), computing(1), computing(2, line=8), waiting(3))
    assert text == "Waiting for ranks 1-2: ranks 0,3 have been in all_reduce at line 4 for 12 s"


def test_transitive_waits_do_not_hide_the_slow_rank() -> None:
    receiver = waiting(3, call="recv", name="recv", sequence=0, peer=0)
    text = tell(waiting(0, ranks=(0, 1)), computing(1), computing(2), receiver)
    assert text == "Waiting for rank 1 (line 7): rank 0 has been in all_reduce at line 4 for 3.2 s"


def test_send_waits_for_its_receiver() -> None:
    sender = waiting(0, call="send", name="send", sequence=0, peer=1)
    assert missing_ranks({0: sender, 1: computing(1)}, 0.5) == {0: (1,)}
    receiver = waiting(1, call="recv", name="recv", sequence=0, peer=0)
    assert missing_ranks({0: sender, 1: receiver}, 0.5) == {}
    finished = RankWaits(1, False, None, "", (), {"0": 0})
    text = explain_deadlock({0: sender, 1: finished}, {0, 1}, 0.5)
    assert text == "rank 0 waits in send at line 4 for rank 1, which has finished the cell."


def test_awaited_call_is_not_always_the_oldest() -> None:
    older = PendingCall(3, "allreduce", "other", (0, 1), 1, -1, 4, 60.0)
    own = waiting(0)
    report = RankWaits(0, True, 4, "all_reduce", (older, *own.pending), own.counts, "", 7)
    assert report.blocked_in == own.pending[0]


def test_implicit_collective_is_reported_with_fix() -> None:
    finished = [RankWaits(rank, False, None, "", (), {"0": 0}) for rank in (1, 2, 3)]
    reports = {report.rank: report for report in (waiting(0, via="full_tensor"), *finished)}
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
