"""Who waits for whom among 1,024 ranks: few looks at each report, and sentences that people can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from axon_nb.records.ranks import name_ranks
from axon_nb.records.waits import PendingCall, RankWaits, describe_slow_ranks, explain_deadlock, missing_ranks

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


def waiting(rank: int, name: str = "allreduce", *, peer: int = -1, size: int = 4) -> RankWaits:
    sequence = 0 if name.startswith(("recv", "send")) else 1
    call = PendingCall(7, name, "0", RANKS, sequence, peer, size, 5.0)
    return RankWaits(rank, True, 3, {"allreduce": "all_reduce"}.get(name, name), (call,), {"0": sequence})


def elsewhere(rank: int, *, running: bool) -> RankWaits:
    return RankWaits(rank, running, 5 if running else None, "", (), {"0": 0})


def reports(of: Callable[[int], RankWaits]) -> Counted:
    return Counted({rank: of(rank) for rank in RANKS})


SITUATIONS: dict[str, tuple[Callable[[int], RankWaits], str | None]] = {
    "all are in one collective": (waiting, None),
    "one has finished": (
        lambda rank: elsewhere(rank, running=False) if rank == 512 else waiting(rank),
        "ranks 0-511,513-1023 wait in all_reduce at line 3 for rank 512, which has finished the cell.",
    ),
    "every second one computes": (lambda rank: elsewhere(rank, running=True) if rank % 2 else waiting(rank), None),
    "every second one has finished": (
        lambda rank: elsewhere(rank, running=False) if rank % 2 else waiting(rank),
        f"{EVEN} wait in all_reduce at line 3 for {ODD}, which have finished the cell.",
    ),
    "one is in another collective": (
        lambda rank: waiting(rank, "barrier" if rank == 700 else "allreduce"),
        "Collective mismatch: rank 0 is in all_reduce at line 3, rank 700 in barrier at line 3, on the same group.",
    ),
    "a chain ends at one that has finished": (
        lambda rank: elsewhere(rank, running=False) if rank == 1023 else waiting(rank, "recv", peer=rank + 1),
        CHAIN,
    ),
    "a chain ends at one that computes": (
        lambda rank: elsewhere(rank, running=True) if rank == 1023 else waiting(rank, "recv", peer=rank + 1),
        None,
    ),
    "all wait for anyone": (
        lambda rank: waiting(rank, "recv_anysource"),
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
