"""What one rank tells of the job that it runs: numbers it has logged, its pace, its loops, what it does."""

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
    """Which training; see `records.metrics.Logged`."""
    is_first: bool
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class JobReport:
    """One rank at one moment."""

    rank: int
    pid: int
    """Its process: a fresh one has forgotten what the one before had logged."""
    state: RankState
    rows: tuple[MetricRow, ...]
    """What it has logged since it was asked last, oldest first."""
    position: int
    """Where to go on reading."""
    lost: int
    """Calls of `log` that were dropped before they were read."""
    is_last: bool
    """Whether there is no more to read now."""
    steps: int
    """Steps so far: those of `log`, or else of the optimizers."""
    steps_per_s: float | None
    items_per_s: float | None
    span_position: int
    """Where to go on reading spans."""
    communication: float | None
    """Share of the time since it was asked last in which communication was under way, 0 to 1; None: not known."""
    bars: tuple[Bar, ...]


def read_job(answer: Mapping[str, Any]) -> JobReport:
    """The record that a rank's answer to ``axon_job`` holds; what else is in it is left out."""
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
