"""`plan.schedule`: a pipeline schedule's timeline, bubble and live microbatches, before it runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from axon_nb.errors import UsageError
from axon_nb.parallel.pipeline.schedule import PipelineSchedule, check_counts
from axon_nb.parallel.pipeline.schedule_analysis import peak_live_microbatches
from axon_nb.parallel.pipeline.torch_hooks import actions
from axon_nb.plan.arguments import check_int
from axon_nb.plan.pipeline.plan import SchedulePlan, StageTimes
from axon_nb.records.training.pipeline import Order, simulate_orders


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
