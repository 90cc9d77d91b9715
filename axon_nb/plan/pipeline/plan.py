"""The record of a planned pipeline schedule, with published formulas for its bubble and their sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from axon_nb.errors import UsageError
from axon_nb.parallel.pipeline.schedule import PipelineSchedule
from axon_nb.plan.figures import figure_of, svg_of
from axon_nb.plan.tables import format_ms, html_table, text_table
from axon_nb.records.spans import Span
from axon_nb.records.training.pipeline import Order, spans_from_times

if TYPE_CHECKING:
    import pandas as pd

_SOURCES = {
    PipelineSchedule.GPIPE: "Huang et al., GPipe, 2019, section 2.3",
    PipelineSchedule.ONE_F_ONE_B: "Narayanan et al., 2021, section 2.2.1",
    PipelineSchedule.INTERLEAVED_1F1B: "Narayanan et al., 2021, section 2.2.2",
    PipelineSchedule.LOOPED_BFS: "Lamy-Poirier, 2022, section 4",
    PipelineSchedule.INTERLEAVED_ZERO_BUBBLE: "Qi et al., 2023, table 2, ZB-H1",
}
_HEAD = ("rank", "stages", "busy, ms", "idle, ms", "idle", "live microbatches, peak")


class Formula(NamedTuple):
    """A published bubble formula and its value."""

    fraction: float
    """Fraction of the step in which a rank is idle, 0 to 1."""
    text: str
    """The formula: P ranks, v stages each, M microbatches; F, I and W: forward, backward for inputs, for weights."""
    source: str


def bubble_formula(
    schedule: PipelineSchedule,
    *,
    num_ranks: int,
    num_stages: int,
    num_microbatches: int,
    times: Sequence[tuple[float, float, float | None]],
    latency_s: Sequence[float],
) -> Formula | None:
    """Return the published bubble; None if there is no formula for these numbers.

    The formulas assume equal stages and free messages and, with several stages per rank, a multiple of P microbatches.
    Those of zero-bubble schedules assume F = I = W.

    Args:
        schedule: The schedule.
        num_ranks: P.
        num_stages: v P.
        num_microbatches: M.
        times: (forward, backward, the weights' part of backward) per stage, in seconds.
        latency_s: The latency per boundary, in seconds.
    """
    forward, backward, weight = times[0]
    if schedule not in _SOURCES or any(latency_s) or len(set(times)) > 1 or not forward + backward:
        return None
    if schedule.has_many_stages and num_microbatches % num_ranks:
        return None
    per_rank = num_stages // num_ranks
    source = _SOURCES[schedule]
    if schedule is not PipelineSchedule.INTERLEAVED_ZERO_BUBBLE:
        text = "(P - 1) / (M + P - 1)" if per_rank == 1 else "(P - 1) / (v M + P - 1)"
        return Formula((num_ranks - 1) / (per_rank * num_microbatches + num_ranks - 1), text, source)
    weight = backward / 2 if weight is None else weight
    inputs = backward - weight
    if not (abs(inputs - weight) <= 1e-9 * backward and abs(forward - weight) <= 1e-9 * backward):
        return None
    idle = (num_ranks - 1) * (forward + inputs - weight)
    busy = per_rank * num_microbatches * (forward + backward)
    text = "(P - 1) (F + I - W) / (v M (F + I + W) + (P - 1) (F + I - W))"
    return Formula(idle / (busy + idle), text, source)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """How long one microbatch takes in one stage."""

    forward_s: float
    """Seconds of the forward."""
    backward_s: float
    """Seconds of the whole backward."""
    weight_s: float | None = None
    """The weights' part of backward; None: half. Matters only if the schedule defers it."""


@dataclass(frozen=True)
class SchedulePlan:
    """A simulated pipeline step; made by `axon_nb.plan.schedule`."""

    schedule: PipelineSchedule
    num_ranks: int
    num_stages: int
    num_microbatches: int
    times: tuple[StageTimes, ...]
    """Of each stage."""
    latency_s: tuple[float, ...]
    """Seconds that a message of forward takes over each stage boundary."""
    backward_latency_s: tuple[float, ...]
    """The same, of backward."""
    peak_per_stage: tuple[int, ...]
    """Peak number of live microbatches per stage: from the start of forward to the end of backward."""
    peak_per_rank: tuple[int, ...]
    """Peak number of live microbatches per rank, over all its stages."""
    orders: tuple[Order, ...] = field(repr=False)
    """Each rank's actions: (F, B, I or W; stage; microbatch)."""
    moments: tuple[tuple[tuple[float, float], ...], ...] = field(repr=False)
    """Start and end of each action, in seconds from the start of the step."""

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
        """Fraction of the step, 0 to 1, in which each rank is idle."""
        return tuple(1.0 - busy / self.step_s if self.step_s else 0.0 for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """Fraction of the ranks' time, 0 to 1, in which they are idle."""
        return sum(self.bubble_per_rank) / self.num_ranks

    @property
    def peak_live(self) -> int:
        """Peak number of live microbatches on the rank with the most."""
        return max(self.peak_per_rank)

    @property
    def formula(self) -> Formula | None:
        """The published bubble for equal stages and free messages; None: there is none."""
        return bubble_formula(
            self.schedule,
            num_ranks=self.num_ranks,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            times=[(one.forward_s, one.backward_s, one.weight_s) for one in self.times],
            latency_s=(*self.latency_s, *self.backward_latency_s),
        )

    @cached_property
    def timeline(self) -> tuple[Span, ...]:
        """Every action as a span, rank by rank, starting at 0 ns, as real steps record them."""
        return tuple(spans_from_times(self.orders, self.moments))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return a rank's stages in ascending order.

        Raises:
            UsageError: there is no such rank.
        """
        if rank not in range(self.num_ranks):
            raise UsageError(f"rank must be 0 to {self.num_ranks - 1}; got {rank!r}.")
        return tuple(sorted({stage for _, stage, _ in self.orders[rank]}))

    def to_frame(self) -> pd.DataFrame:
        """One row per action: rank, stage, microbatch, action (F, B, I, W), start_ms, end_ms."""
        import pandas as pd

        rows = [
            (rank, stage, microbatch, action, 1e3 * begin, 1e3 * end)
            for rank, order in enumerate(self.orders)
            for (action, stage, microbatch), (begin, end) in zip(order, self.moments[rank], strict=True)
        ]
        return pd.DataFrame(rows, columns=["rank", "stage", "microbatch", "action", "start_ms", "end_ms"])

    def figure(self) -> Any:
        """A plotly figure of the timeline: one line per rank, in milliseconds."""
        return figure_of(self.timeline, title=self._headline())

    def _headline(self) -> str:
        return (
            f"{self.schedule.value}, {self.num_stages} stages on {self.num_ranks} ranks, {self.num_microbatches} "
            f"microbatches: {format_ms(self.step_s)} ms per step, {self.bubble:.1%} idle"
        )

    def _summary(self) -> str:
        headline = self._headline()
        formula = self.formula
        return f"{headline} (formula {formula.fraction:.1%}: {formula.text}, {formula.source})" if formula else headline

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

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        page = svg_of(self.timeline) + html_table(self._summary(), _HEAD, self._rows())
        return {"text/plain": str(self), "text/html": page}

    def summary(self) -> Mapping[str, float]:
        """Return the numbers to compare schedules by: step_ms, bubble (0 to 1), peak_live."""
        return {"step_ms": 1e3 * self.step_s, "bubble": self.bubble, "peak_live": self.peak_live}
