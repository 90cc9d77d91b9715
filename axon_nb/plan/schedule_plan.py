"""The record of a planned pipeline schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from axon_nb.errors import UsageError
from axon_nb.parallel.pipeline.schedule import PipelineSchedule
from axon_nb.plan.communication_table import format_ms, html_table, text_table
from axon_nb.plan.schedule_formulas import Formula, bubble_formula
from axon_nb.plan.schedule_picture import figure_of, svg_of
from axon_nb.records.pipeline_play import Order, spans_from_times
from axon_nb.records.span import Span

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SchedulePlan", "StageTimes"]

_HEAD = ("rank", "stages", "busy, ms", "idle, ms", "idle", "live microbatches, peak")


@dataclass(frozen=True, slots=True)
class StageTimes:
    """How long one microbatch takes in one stage."""

    forward_s: float
    """Seconds of the forward."""
    backward_s: float
    """Seconds of the whole backward."""
    weight_s: float | None = None
    """Of these, the part for weights; None: half. Matters where a schedule puts it off."""


@dataclass(frozen=True)
class SchedulePlan:
    """A pipeline's step as it would run; made by `axon_nb.plan.schedule`."""

    schedule: PipelineSchedule
    num_ranks: int
    num_stages: int
    num_microbatches: int
    times: tuple[StageTimes, ...]
    """Of each stage."""
    latency_s: tuple[float, ...]
    """Seconds of a message over each boundary between stages."""
    peak_per_stage: tuple[int, ...]
    """Most live microbatches of each stage: from the beginning of a forward to the end of the backward."""
    peak_per_rank: tuple[int, ...]
    """Most live microbatches over the stages of each rank together."""
    orders: tuple[Order, ...] = field(repr=False)
    """What each rank computes: (F, B, I or W; stage; microbatch)."""
    moments: tuple[tuple[tuple[float, float], ...], ...] = field(repr=False)
    """Begin and end of each of these, in seconds from the step's beginning."""

    @cached_property
    def step_s(self) -> float:
        """Seconds from the first forward to the end of the last backward."""
        return max(rank[-1][1] for rank in self.moments)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds in which each rank computes."""
        return tuple(sum(end - begin for begin, end in rank) for rank in self.moments)

    @property
    def bubble_per_rank(self) -> tuple[float, ...]:
        """The share of the step, 0 to 1, in which each rank is idle."""
        return tuple(1.0 - busy / self.step_s if self.step_s else 0.0 for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time, 0 to 1, in which they are idle."""
        return sum(self.bubble_per_rank) / self.num_ranks

    @property
    def peak_live(self) -> int:
        """Most live microbatches, of the rank that keeps most."""
        return max(self.peak_per_rank)

    @property
    def formula(self) -> Formula | None:
        """The published bubble for stages that are alike and messages that take no time; None: there is none."""
        return bubble_formula(
            self.schedule,
            num_ranks=self.num_ranks,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            times=[(one.forward_s, one.backward_s, one.weight_s) for one in self.times],
            latency_s=self.latency_s,
        )

    @cached_property
    def timeline(self) -> tuple[Span, ...]:
        """Every action as a span, rank by rank, from 0 ns on: as a real step records them."""
        return tuple(spans_from_times(self.orders, self.moments))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, ascending.

        Raises:
            UsageError: there is no such rank.
        """
        if rank not in range(self.num_ranks):
            raise UsageError(f"rank {rank!r}: there are {self.num_ranks} ranks, 0 to {self.num_ranks - 1}.")
        return tuple(sorted({stage for _, stage, _ in self.orders[rank]}))

    def to_frame(self) -> pd.DataFrame:
        """One row an action: rank, stage, microbatch, action (F, B, I, W), start_ms, end_ms."""
        import pandas as pd

        rows = [
            (rank, stage, microbatch, action, 1e3 * begin, 1e3 * end)
            for rank, order in enumerate(self.orders)
            for (action, stage, microbatch), (begin, end) in zip(order, self.moments[rank], strict=True)
        ]
        return pd.DataFrame(rows, columns=["rank", "stage", "microbatch", "action", "start_ms", "end_ms"])

    def figure(self) -> Any:
        """The timeline as a plotly figure: a line a rank, milliseconds along it."""
        return figure_of(self.timeline, title=self._said())

    def _said(self) -> str:
        return (
            f"{self.schedule.value}, {self.num_stages} stages on {self.num_ranks} ranks, {self.num_microbatches} "
            f"microbatches: a step of {format_ms(self.step_s)} ms, {self.bubble:.1%} of it idle"
        )

    def _summary(self) -> str:
        said = self._said()
        formula = self.formula
        return f"{said} (by formula {formula.fraction:.1%}: {formula.text}, {formula.source})" if formula else said

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                str(rank),
                ", ".join(map(str, self.stages_of(rank))),
                format_ms(busy),
                format_ms(self.step_s - busy),
                f"{self.bubble_per_rank[rank]:.1%}",
                str(self.peak_per_rank[rank]),
            )
            for rank, busy in enumerate(self.busy_s)
        ]

    def __str__(self) -> str:
        return text_table(self._summary(), _HEAD, self._rows())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return svg_of(self.timeline) + html_table(self._summary(), _HEAD, self._rows())

    def summary(self) -> Mapping[str, float]:
        """The numbers that schedules are compared by: step_ms, bubble (0 to 1), peak_live."""
        return {"step_ms": 1e3 * self.step_s, "bubble": self.bubble, "peak_live": self.peak_live}
