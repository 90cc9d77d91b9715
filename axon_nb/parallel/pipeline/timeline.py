"""A schedule as it would run if messages took no time, and the share of time that ranks are idle."""

from __future__ import annotations

from collections.abc import Iterable

from axon_nb.parallel.pipeline.schedule import PipelineSchedule, check_counts, default_num_stages
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
    lengths = {"F": forward_s, "B": backward_s, "I": backward_s / 2, "W": backward_s / 2}
    over: dict[tuple[str, int, int], float] = {}
    """When each action ended, in seconds; a whole backward stands for its part for inputs, too."""
    next_one, free, spans = [0] * num_ranks, [0.0] * num_ranks, [list[Span]() for _ in orders]
    while any(place < len(order) for place, order in zip(next_one, orders, strict=True)):
        before = sum(next_one)
        for rank, order in enumerate(orders):
            while next_one[rank] < len(order):
                action, stage, microbatch = order[next_one[rank]]
                needed = [(kind, place, microbatch) for kind, place in _needs(action, stage, stages)]
                if any(need not in over for need in needed):
                    break
                start = max([free[rank], *(over[need] for need in needed)])
                free[rank] = start + lengths[action]
                over["I" if action == "B" else action, stage, microbatch] = free[rank]
                kind = "forward" if action == "F" else "backward"
                begin, end = round(start * 1e9), round(free[rank] * 1e9)
                spans[rank].append(Span(rank, kind, action, begin, end, stage=stage, microbatch=microbatch))
                next_one[rank] += 1
        assert sum(next_one) > before, f"{chosen.value} waits for itself"
    return [span for of_rank in spans for span in of_rank]


def _needs(action: str, stage: int, num_stages: int) -> list[tuple[str, int]]:
    """What must be over before: (action, stage) of the same microbatch."""
    if action == "F":
        return [("F", stage - 1)] if stage else []
    if action == "W":
        return [("I", stage)]
    return [("F", stage)] + ([("I", stage + 1)] if stage < num_stages - 1 else [])
