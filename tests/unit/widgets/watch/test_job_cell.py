"""Whether a cell runs, as `%watch` shows it: ranks that are too busy to answer have not ended theirs."""

from __future__ import annotations

import pytest

from axon_nb.cluster.inspection.status import JobSnapshot, running_cell
from axon_nb.widgets.watch.store import JobStore
from axon_nb.widgets.watch.view import context, heading
from tests.support.records.jobs import answers, report

SILENT = {0: "has not answered", 1: "has not answered"}


@pytest.mark.parametrize(
    ("cells", "busy", "reported"),
    [
        ({0: 5, 1: 5}, [0, 1], 5),
        ({0: 5}, [0, 1], 5),
        ({0: None}, [1], 0),
        ({}, [0, 1], 0),
        ({0: None, 1: None}, [], None),
        ({0: None, 1: None}, [0, 1], None),
        ({}, [], None),
    ],
)
def test_silent_busy_rank_counts_as_running(cells: dict[int, int | None], busy: list[int], reported: int) -> None:
    assert running_cell({rank: report(rank, cell=cell) for rank, cell in cells.items()}, busy) == reported


def test_cell_number_is_kept_while_ranks_are_silent() -> None:
    store = JobStore()
    store.add(JobSnapshot({}, SILENT, 0), 0.0)
    assert heading(store) == "2 ranks, a cell is running"
    store.add(answers(report(0, cell=5), report(1, cell=5)), 1.0)
    store.add(JobSnapshot({}, SILENT, 0), 2.0)
    assert heading(store).startswith("2 ranks, In [5] is running")
    store.add(JobSnapshot({}, SILENT, None), 3.0)
    assert heading(store).startswith("2 ranks, In [5] has ended")


def test_deliberate_slowness_is_in_the_heading() -> None:
    store = JobStore()
    store.add(JobSnapshot({}, SILENT, 5, slowed="rank 1 × 2"), 0.0)
    assert heading(store) == "2 ranks, In [5] is running, slowed: rank 1 × 2"
    assert context(store) == "In [5] · 2 ranks · slowed: rank 1 × 2"
