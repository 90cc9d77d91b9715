"""Made-up reports of ranks, for tests of views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axon_nb.cluster.inspection.status import JobSnapshot
from axon_nb.records.telemetry import Activity, RankState
from axon_nb.records.training.job import Bar, JobReport, MetricRow

_CLOCK = [0]


def row(step: int, run: tuple[int, int] = (1, 0), *, is_first: bool = True, **values: float) -> MetricRow:
    """One call of `axon_nb.log`."""
    return MetricRow(step, run, is_first, values)


def report(
    rank: int, rows: Sequence[MetricRow] = (), *, bars: Sequence[Bar] = (), cell: int | None = 1, **more: Any
) -> JobReport:
    """One rank, a moment after the report before."""
    _CLOCK[0] += 1000
    state = RankState(rank, Activity.RUNNING, _CLOCK[0], cell=cell, line=4, rss_bytes=300 * 2**20)
    fields: dict[str, Any] = {
        "pid": 100 + rank,
        "position": 0,
        "lost": 0,
        "is_last": True,
        "steps": 0,
        "steps_per_s": None,
        "items_per_s": None,
        "span_position": 0,
        "communication": None,
    }
    return JobReport(rank=rank, state=state, rows=tuple(rows), bars=tuple(bars), **{**fields, **more})


def answers(*reports: JobReport, words: Mapping[int, str] | None = None) -> JobSnapshot:
    """What all ranks say at one moment."""
    reported = {own.rank: "running line 4" for own in reports}
    cells = [own.state.cell for own in reports if own.state.cell is not None]
    return JobSnapshot({own.rank: own for own in reports}, {**reported, **(words or {})}, max(cells, default=None))
