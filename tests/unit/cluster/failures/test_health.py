"""Ranks that are stuck in a cell count as such until they reply, whenever that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from axon_nb.cluster.failures import RankError
from axon_nb.cluster.state import Health
from axon_nb.errors import ClusterLostError


@dataclass
class Cell:
    """A cell after which ranks 1 and 2 were given up on, as `Health` sees it."""

    ranks: list[int] = field(default_factory=lambda: [0, 1, 2])
    unfinished: list[int] = field(default_factory=lambda: [1, 2])
    errors: dict[int, RankError] = field(
        default_factory=lambda: {rank: RankError(rank, "stuck", "", "is busy") for rank in (1, 2)}
    )
    on_late_reply: Callable[[int], None] = lambda rank: None

    def reply(self, rank: int) -> None:
        self.unfinished.remove(rank)
        self.on_late_reply(rank)

    def on_death(self, rank: int, reason: str) -> None: ...

    def on_lost(self, reason: str) -> None: ...

    def interrupt(self) -> None: ...


def refused(health: Health, ranks: list[int]) -> str:
    with pytest.raises(ClusterLostError) as refused:
        health.ensure_available(ranks)
    return str(refused.value)


def test_stuck_ranks_are_reported_with_the_repair_command() -> None:
    health, cell = Health("default", list), Cell()
    health.track_stuck(cell)
    assert "Ranks 1-2 are still stuck in an earlier cell" in refused(health, [0, 1, 2])
    assert "`%distributed repair --ranks 1-2`" in refused(health, [0, 1, 2])
    assert "`%distributed repair --ranks 2`" in refused(health, [2])
    health.ensure_available([0])


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_late_reply_clears_the_stuck_rank(moment: str) -> None:
    """Ranks are recorded when the groups are rebuilt and again when the cell ends; replies come from another thread."""
    health, cell = Health("default", list), Cell()
    for step in ("before", "between", "after"):
        if step == moment:
            cell.reply(1)
        if step != "after":
            health.track_stuck(cell)
    health.ensure_available([0, 1])
    assert "Rank 2 is still stuck" in refused(health, [0, 1, 2])
