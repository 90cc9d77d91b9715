"""How few ranks run to tell all ranks apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from axon_nb.plan.program.record import RankRecord, distinct_ranks


def _found(size: int, kind: Callable[[int], int], groups: tuple[tuple[int, ...], ...]) -> tuple[list[int], int]:
    """The kind that each rank is taken to have, and how many ranks ran."""
    ran: dict[int, RankRecord] = {}

    def run(ranks: Sequence[int]) -> Mapping[int, RankRecord]:
        for rank in ranks:
            ran[rank] = RankRecord(rank, (), (), (), groups, 0.0, 0, 0, {}, None, 0, kind(rank))
        return ran

    lanes = distinct_ranks(size, run)
    kinds = {rank: lane.record.signature for lane in lanes for rank in lane.ranks}
    assert sorted(kinds) == list(range(size))
    return [kinds[rank] for rank in range(size)], len(ran)


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        (lambda _: 0, 4),
        (lambda rank: rank == 0, 4),
        (lambda rank: rank == 1023, 18),
        (lambda rank: (rank >= 100) + (rank >= 700), 28),
        (lambda rank: rank % 2, 1024),
        (lambda rank: rank, 1024),
    ],
    ids=["uniform", "first", "last", "uneven shards", "parity", "all"],
)
def test_every_rank_gets_its_class(kind: Callable[[int], int], most: int) -> None:
    kinds, count = _found(1024, kind, (tuple(range(1024)),))
    assert kinds == [int(kind(rank)) for rank in range(1024)]
    assert count <= most


def test_axes_match_the_programs_groups() -> None:
    tp, dp, pp = (0, 1), tuple(range(0, 64, 2)), tuple(range(0, 512, 64))
    kinds, count = _found(512, lambda rank: rank // 64, (tp, dp, pp))
    assert kinds == [rank // 64 for rank in range(512)]
    assert count <= 20
