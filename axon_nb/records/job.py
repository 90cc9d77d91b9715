"""One rank's report on its running job: logged metrics, throughput, progress and state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from axon_nb.records.progress import Bar
from axon_nb.records.state import Activity, RankState

__all__ = ["JobReport", "MetricRow", "read_job"]


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One call of `axon_nb.log`."""

    step: int
    run: tuple[int, int]
    """Training run; see `records.metrics.Logged`."""
    is_first: bool
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class JobReport:
    """Snapshot of one rank's job."""

    rank: int
    pid: int
    """Its process: a replacement has none of the earlier metrics."""
    state: RankState
    rows: tuple[MetricRow, ...]
    """Metrics logged since the last request, oldest first."""
    position: int
    """Position at which to continue reading."""
    lost: int
    """Number of calls of `log` dropped before they were read."""
    is_last: bool
    """Whether everything has been read."""
    steps: int
    """Steps so far, counted by `log` or else by optimizer steps."""
    steps_per_s: float | None
    items_per_s: float | None
    span_position: int
    """Position at which to continue reading spans."""
    communication: float | None
    """Fraction of the time since the last request with communication in progress, 0 to 1; None if unknown."""
    bars: tuple[Bar, ...]


def read_job(answer: Mapping[str, Any]) -> JobReport:
    """Read the report from a rank's reply to ``axon_job``; ignore its other fields."""
    state = answer["state"]
    return JobReport(
        rank=state["rank"],
        pid=answer["pid"],
        state=RankState(**{**state, "activity": Activity(state["activity"])}),
        rows=tuple(
            MetricRow(step, (cell, count), bool(first), {name: float(value) for name, value in values.items()})
            for step, cell, count, first, values in answer["rows"]
        ),
        position=answer["position"],
        lost=answer["lost"],
        is_last=answer["is_last"],
        steps=answer["steps"],
        steps_per_s=answer["steps_per_s"],
        items_per_s=answer["items_per_s"],
        span_position=answer["span_position"],
        communication=answer["communication"],
        bars=tuple(Bar(**bar) for bar in answer["bars"]),
    )
