"""`plan.schedule`: a pipeline schedule's timeline, bubble and live microbatches, before it runs.

Published formulas for its bubble are given with their sources.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from axon_nb.errors import UsageError
from axon_nb.parallel.pipeline.schedule import PipelineSchedule, actions, check_counts, peak_live_microbatches
from axon_nb.plan.arguments import check_int
from axon_nb.plan.display import Shown, Table, figure_of, format_ms, svg_of
from axon_nb.records.spans import Span
from axon_nb.records.training.steps import Order, simulate_orders, spans_from_times

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


def bubble_formula(plan: SchedulePlan) -> Formula | None:
    """Return the published bubble; None if there is no formula for these numbers.

    The formulas assume equal stages and free messages and, with several stages per rank, a multiple of P microbatches.
    Those of zero-bubble schedules assume F = I = W.
    """
    kind, num_ranks, num_microbatches = plan.schedule, plan.num_ranks, plan.num_microbatches
    forward, backward, weight = plan.times[0].forward_s, plan.times[0].backward_s, plan.times[0].weight_s
    is_uneven = any((*plan.latency_s, *plan.backward_latency_s)) or len(set(plan.times)) > 1
    if kind not in _SOURCES or is_uneven or not forward + backward:
        return None
    if kind.has_many_stages and num_microbatches % num_ranks:
        return None
    per_rank = plan.num_stages // num_ranks
    source = _SOURCES[kind]
    if kind is not PipelineSchedule.INTERLEAVED_ZERO_BUBBLE:
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


@dataclass(frozen=True, repr=False)
class SchedulePlan(Shown):
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
        return bubble_formula(self)

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

    def _table(self) -> Table:
        rows = [
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
        return self._summary(), _HEAD, rows, ()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        bundle = super()._repr_mimebundle_()
        return {**bundle, "text/html": svg_of(self.timeline) + bundle["text/html"]}

    def summary(self) -> Mapping[str, float]:
        """Return the numbers to compare schedules by: step_ms, bubble (0 to 1), peak_live."""
        return {"step_ms": 1e3 * self.step_s, "bubble": self.bubble, "peak_live": self.peak_live}


def schedule(
    name: PipelineSchedule | str,
    num_stages: int,
    num_microbatches: int,
    times: StageTimes | Sequence[Any] | None = None,
    *,
    num_ranks: int | None = None,
    latency_s: float | Sequence[float] = 0.0,
    backward_latency_s: float | Sequence[float] | None = None,
) -> SchedulePlan:
    """Simulate one step of a pipeline schedule.

        schedule("1F1B", 4, 8, (0.01, 0.02))
        schedule("ZBVZeroBubble", 8, 16, [(0.01, 0.02)] * 7 + [(0.03, 0.06)], latency_s=0.0005)

    Each rank runs its actions in torch's order, each as soon as its inputs have arrived. Any number of messages travel
    while ranks compute; sending takes a rank no time.

    Args:
        name: One of `PipelineSchedule`, or its name.
        num_stages: Stages on all ranks.
        num_microbatches: Microbatches per step.
        times: Seconds that one microbatch takes in a stage: (forward, backward), (forward, backward, the weights' part
            of backward) or a `StageTimes` for all stages; or a sequence or array of these, one per stage. None: 10 ms
            and 20 ms. If a schedule defers weight gradients and their part is not given, it is half of backward.
        num_ranks: None: one stage per rank, or two where the schedule has several.
        latency_s: Seconds that a message takes from one stage to the next; or one value per stage boundary,
            `num_stages` - 1 in all. Stages on the same rank exchange no messages.
        backward_latency_s: The same for messages of backward, from a stage to the one before; None: as forward.

    Raises:
        UsageError: the schedule cannot run with these numbers, or a time is invalid.
    """
    kind = PipelineSchedule.of(name)
    check_int("num_stages", num_stages)
    check_int("num_microbatches", num_microbatches)
    if num_ranks is not None:
        check_int("num_ranks", num_ranks)
    ranks = _default_num_ranks(kind, num_stages) if num_ranks is None else num_ranks
    check_counts(kind, num_ranks=ranks, num_stages=num_stages, num_microbatches=num_microbatches)
    each = _stage_times(times, num_stages)
    delays = _latencies(latency_s, num_stages - 1)
    back = delays if backward_latency_s is None else _latencies(backward_latency_s, num_stages - 1)
    orders, per_stage, per_rank = _orders_and_peaks(kind, ranks, num_stages, num_microbatches)
    weights = [stage.backward_s / 2 if stage.weight_s is None else stage.weight_s for stage in each]
    lengths = {
        "F": [stage.forward_s for stage in each],
        "B": [stage.backward_s for stage in each],
        "I": [stage.backward_s - part for stage, part in zip(each, weights, strict=True)],
        "W": weights,
    }
    moments = simulate_orders(
        orders,
        lengths,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        latency_s=delays,
        backward_latency_s=back,
    )
    return SchedulePlan(
        schedule=kind,
        num_ranks=ranks,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        times=each,
        latency_s=delays,
        backward_latency_s=back,
        peak_per_stage=per_stage,
        peak_per_rank=per_rank,
        orders=orders,
        moments=tuple(map(tuple, moments)),
    )


def _default_num_ranks(kind: PipelineSchedule, num_stages: int) -> int:
    if not kind.has_many_stages:
        return num_stages
    if num_stages % 2:
        raise UsageError(
            f"num_stages must be even with {kind.value}, which has two stages per rank by default; got {num_stages}. "
            "Or give num_ranks=."
        )
    return num_stages // 2


@functools.lru_cache(maxsize=64)
def _orders_and_peaks(
    kind: PipelineSchedule, num_ranks: int, num_stages: int, num_microbatches: int
) -> tuple[tuple[Order, ...], tuple[int, ...], tuple[int, ...]]:
    """What does not depend on times: orders, and peaks by stage and by rank."""
    counts = {"num_ranks": num_ranks, "num_stages": num_stages, "num_microbatches": num_microbatches}
    orders = tuple(tuple(order) for order in actions(kind, **counts))
    return orders, *peak_live_microbatches(orders, num_stages=num_stages)


def _stage_times(times: Any, num_stages: int) -> tuple[StageTimes, ...]:
    times = _to_list(times)
    if times is None:
        times = StageTimes(0.01, 0.02)
    if isinstance(times, StageTimes) or (isinstance(times, Sequence) and times and isinstance(times[0], Real)):
        return (_stage_time(times),) * num_stages
    if not isinstance(times, Sequence) or isinstance(times, str):
        raise UsageError(
            "times must be (forward, backward) in seconds for all stages, or a sequence with one such pair per stage; "
            f"got {times!r}."
        )
    if len(times) != num_stages:
        raise UsageError(
            f"times must have one entry for all stages, or one for each of {num_stages}; got {len(times)}."
        )
    return tuple(map(_stage_time, times))


def _stage_time(entry: Any) -> StageTimes:
    if isinstance(entry, StageTimes):
        times = entry
    else:
        numbers = isinstance(entry, Sequence) and all(isinstance(value, Real) for value in entry)
        if not numbers or len(entry) not in (2, 3):
            raise UsageError(
                "A stage's time must be (forward, backward) or (forward, backward, the weights' part of backward) in "
                f"seconds; got {entry!r}."
            )
        times = StageTimes(*map(float, entry))
    parts: tuple[Any, ...] = times.forward_s, times.backward_s, times.weight_s or 0.0
    known = all(isinstance(value, Real) and 0 <= float(value) < math.inf for value in parts)
    if not known or parts[2] > parts[1]:
        raise UsageError(
            "A stage's times must be 0 or more, and the weights' part at most the backward; got forward "
            f"{parts[0]!r} s, backward {parts[1]!r} s, weights {parts[2]!r} s."
        )
    return times


def _to_list(value: Any) -> Any:
    """Turn arrays and tensors into lists; return anything else unchanged."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else value


def _latencies(latencies: Any, num_boundaries: int) -> tuple[float, ...]:
    latencies = _to_list(latencies)
    if not isinstance(latencies, Real | Iterable) or isinstance(latencies, str):
        raise UsageError(f"latency_s must be seconds, 0 or more: one number, or one per boundary; got {latencies!r}.")
    values = (latencies,) * num_boundaries if isinstance(latencies, Real) else tuple(latencies)
    if len(values) != num_boundaries:
        raise UsageError(
            f"latency_s must be one number, or one for each of the {num_boundaries} boundaries between "
            f"{num_boundaries + 1} stages; got {len(values)}."
        )
    bad = [value for value in values if not isinstance(value, Real) or not math.isfinite(value) or value < 0]
    if bad:
        raise UsageError(f"latency_s must be seconds, 0 or more; got {bad[0]!r}.")
    return tuple(float(value) for value in values)
