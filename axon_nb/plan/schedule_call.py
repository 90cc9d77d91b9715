"""A pipeline schedule before it runs: its timeline, its bubble, and how many microbatches are live."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from axon_nb.errors import UsageError
from axon_nb.parallel.pipeline.memory import peaks_of
from axon_nb.parallel.pipeline.schedule import PipelineSchedule, check_counts
from axon_nb.parallel.pipeline.torch_hooks import actions
from axon_nb.plan.schedule_plan import SchedulePlan, StageTimes
from axon_nb.records.pipeline_play import Order, simulate_orders

__all__ = ["schedule"]


def schedule(
    name: PipelineSchedule | str,
    stages: int,
    microbatches: int,
    times: StageTimes | Sequence[Any] | None = None,
    *,
    ranks: int | None = None,
    latency_s: float | Sequence[float] = 0.0,
) -> SchedulePlan:
    """How a pipeline's step would run.

        schedule("1F1B", 4, 8, (0.01, 0.02))
        schedule("ZBVZeroBubble", 8, 16, [(0.01, 0.02)] * 7 + [(0.03, 0.06)], latency_s=0.0005)

    Each rank computes in torch's order, each action as soon as what it needs has come. Messages travel beside
    computation, any number at a time; sending takes a rank no time.

    Args:
        name: One of `PipelineSchedule`, or its name.
        stages: Of all ranks.
        microbatches: Parts of a batch.
        times: Seconds of one microbatch in a stage: (forward, backward), (forward, backward, the weights' part of it)
            or a `StageTimes`, for all stages; or a sequence or array of these, one a stage. None: 10 ms and 20 ms.
            Where a schedule puts gradients of weights off and their part is not said, it is half of the backward.
        ranks: None: one stage a rank, or two where the schedule has several.
        latency_s: Seconds that a message takes from one stage to the next, and as much back; or one number a boundary
            between stages, so `stages` - 1. Stages on one rank send none.

    Raises:
        UsageError: the schedule cannot run with these numbers, or a time is none.
    """
    chosen = PipelineSchedule.of(name)
    numbers: dict[str, Any] = {"stages": stages, "microbatches": microbatches, "ranks": 1 if ranks is None else ranks}
    for what, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise UsageError(f"{what}={number!r}: it is a whole number from 1.")
    count = _default_ranks(chosen, stages) if ranks is None else ranks
    check_counts(chosen, num_ranks=count, num_stages=stages, num_microbatches=microbatches)
    each = _stage_times(times, stages)
    delays = _latencies(latency_s, stages - 1)
    orders, per_stage, per_rank = _known(chosen, count, stages, microbatches)
    weights = [stage.backward_s / 2 if stage.weight_s is None else stage.weight_s for stage in each]
    lengths = {
        "F": [stage.forward_s for stage in each],
        "B": [stage.backward_s for stage in each],
        "I": [stage.backward_s - part for stage, part in zip(each, weights, strict=True)],
        "W": weights,
    }
    found = simulate_orders(orders, lengths, num_stages=stages, num_microbatches=microbatches, latency_s=delays)
    return SchedulePlan(
        schedule=chosen,
        num_ranks=count,
        num_stages=stages,
        num_microbatches=microbatches,
        times=each,
        latency_s=delays,
        peak_per_stage=per_stage,
        peak_per_rank=per_rank,
        orders=orders,
        moments=tuple(map(tuple, found)),
    )


def _default_ranks(chosen: PipelineSchedule, stages: int) -> int:
    if not chosen.has_many_stages:
        return stages
    if stages % 2:
        raise UsageError(
            f"stages={stages} with {chosen.value}, which has two a rank unless ranks= says otherwise: take an even "
            "number, or give ranks."
        )
    return stages // 2


@functools.lru_cache(maxsize=64)
def _known(
    chosen: PipelineSchedule, ranks: int, stages: int, microbatches: int
) -> tuple[tuple[Order, ...], tuple[int, ...], tuple[int, ...]]:
    """What does not depend on times: orders, and peaks by stage and by rank."""
    counts = {"num_ranks": ranks, "num_stages": stages, "num_microbatches": microbatches}
    orders = tuple(tuple(order) for order in actions(chosen, **counts))
    return orders, *peaks_of(orders, num_stages=stages)


def _stage_times(given: Any, stages: int) -> tuple[StageTimes, ...]:
    given = _listed(given)
    if given is None:
        given = StageTimes(0.01, 0.02)
    if isinstance(given, StageTimes) or (isinstance(given, Sequence) and given and isinstance(given[0], Real)):
        return (_one(given),) * stages
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise UsageError(
            f"times={given!r}: (forward, backward) in seconds for all stages, or a sequence with one such pair a stage."
        )
    if len(given) != stages:
        raise UsageError(f"times has {len(given)} entries for {stages} stages: one for all of them, or one a stage.")
    return tuple(map(_one, given))


def _one(given: Any) -> StageTimes:
    if isinstance(given, StageTimes):
        times = given
    else:
        numbers = isinstance(given, Sequence) and all(isinstance(value, Real) for value in given)
        if not numbers or len(given) not in (2, 3):
            raise UsageError(
                f"times: {given!r} is no time of a stage; it is (forward, backward) in seconds, or "
                "(forward, backward, the part of the backward for weights)."
            )
        times = StageTimes(*map(float, given))
    parts: tuple[Any, ...] = times.forward_s, times.backward_s, times.weight_s or 0.0
    known = all(isinstance(value, Real) and 0 <= float(value) < math.inf for value in parts)
    if not known or parts[2] > parts[1]:
        raise UsageError(
            f"times: forward {parts[0]!r} s, backward {parts[1]!r} s, of it for weights {parts[2]!r} s; each is 0 or "
            "more, and the part for weights no more than the backward."
        )
    return times


def _listed(given: Any) -> Any:
    """Arrays and tensors of numbers as lists; anything else as it is."""
    listed = getattr(given, "tolist", None)
    return listed() if callable(listed) else given


def _latencies(given: Any, boundaries: int) -> tuple[float, ...]:
    given = _listed(given)
    if not isinstance(given, Real | Iterable) or isinstance(given, str):
        raise UsageError(f"latency_s={given!r}: seconds of a message, 0 or more; one number, or one a boundary.")
    values = (given,) * boundaries if isinstance(given, Real) else tuple(given)
    if len(values) != boundaries:
        raise UsageError(
            f"latency_s has {len(values)} entries, and {boundaries + 1} stages have {boundaries} boundaries: one "
            "number for all of them, or one each."
        )
    bad = [value for value in values if not isinstance(value, Real) or not math.isfinite(value) or value < 0]
    if bad:
        raise UsageError(f"latency_s: {bad[0]!r} is no latency; it is seconds, 0 or more.")
    return tuple(float(value) for value in values)
