"""A schedule as it would run if messages took no time, and the share of time that ranks are idle."""

from __future__ import annotations

from collections.abc import Iterable

from axon_nb.parallel.pipeline.schedule import PipelineSchedule, check_counts, default_num_stages
from axon_nb.parallel.pipeline.simulation import simulate
from axon_nb.parallel.pipeline.torch_hooks import actions
from axon_nb.records.span import Span

__all__ = ["bubble_fraction", "ideal_timeline"]

_COMPUTING = ("forward", "backward")


def bubble_fraction(spans: Iterable[Span]) -> float:
    """The share of time, 0 to 1, in which ranks do not compute, from the first forward to the last backward.

    Args:
        spans: Of one step, of all ranks; those of forwards and backwards in stages count.
    """
    computing = [span for span in spans if span.kind in _COMPUTING and span.stage >= 0]
    if not computing:
        return 0.0
    length = max(span.end_ns for span in computing) - min(span.start_ns for span in computing)
    busy = sum(span.end_ns - span.start_ns for span in computing)
    return 1.0 - busy / (length * len({span.rank for span in computing})) if length else 0.0


def ideal_timeline(
    schedule: PipelineSchedule | str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_stages: int | None = None,
    forward_s: float = 0.01,
    backward_s: float = 0.02,
) -> list[Span]:
    """The spans of one step if every stage took as long, and a message no time.

    `axon_nb.plan.schedule` takes stages that differ, and messages that take time.

    Args:
        schedule: The schedule, or its name.
        num_ranks: Ranks of the pipeline; they are numbered from 0.
        num_microbatches: Microbatches of a batch.
        num_stages: Stages of all ranks; None: one a rank, or two where the schedule has several.
        forward_s: Seconds of a forward of one microbatch in one stage.
        backward_s: Seconds of a backward; half of it where inputs and weights are done apart.

    Returns:
        Spans from 0 ns on, rank by rank. With GPipe, 1F1B, Interleaved1F1B and LoopedBFS, and v stages a rank,
        `bubble_fraction` of them is (P - 1) / (v M + P - 1) (Narayanan et al., 2021).

    Raises:
        CommError: the schedule cannot run with these numbers.
    """
    chosen = PipelineSchedule.of(schedule)
    stages = default_num_stages(chosen, num_ranks) if num_stages is None else num_stages
    counts = {"num_ranks": num_ranks, "num_stages": stages, "num_microbatches": num_microbatches}
    check_counts(chosen, **counts)
    orders = actions(chosen, **counts)
    times = simulate(
        orders,
        num_microbatches=num_microbatches,
        forward_s=[forward_s] * stages,
        backward_s=[backward_s] * stages,
        weight_s=[backward_s / 2] * stages,
        latency_s=[0.0] * (stages - 1),
    )
    return [
        Span(
            rank,
            "forward" if action == "F" else "backward",
            action,
            round(begin * 1e9),
            round(end * 1e9),
            stage=stage,
            microbatch=microbatch,
        )
        for rank, order in enumerate(orders)
        for (action, stage, microbatch), (begin, end) in zip(order, times[rank], strict=True)
    ]
