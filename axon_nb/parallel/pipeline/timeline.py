"""Ideal timeline of a schedule, with instant messages, and its bubble fraction."""

from __future__ import annotations

from axon_nb.parallel.pipeline.schedule import PipelineSchedule, check_counts, default_num_stages
from axon_nb.parallel.pipeline.torch_hooks import actions
from axon_nb.records.pipeline import bubble_fraction, play
from axon_nb.records.span import Span

__all__ = ["bubble_fraction", "ideal_timeline"]


def ideal_timeline(
    schedule: PipelineSchedule | str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_stages: int | None = None,
    forward_s: float = 0.01,
    backward_s: float = 0.02,
) -> list[Span]:
    """Return the spans of one step if all stages took equally long and messages took no time.

    For unequal stages and messages that take time, see `axon_nb.plan.schedule`.

    Args:
        schedule: The schedule, or its name.
        num_ranks: Number of ranks of the pipeline, numbered from 0.
        num_microbatches: Microbatches per batch.
        num_stages: Stages on all ranks. None: one per rank, or two if the schedule needs several.
        forward_s: Seconds per forward of one microbatch in one stage.
        backward_s: Seconds per backward; half of that each for inputs and weights if computed separately.

    Returns:
        Spans starting at 0 ns, rank by rank. With GPipe, 1F1B, Interleaved1F1B and LoopedBFS, and v stages per rank,
        their `bubble_fraction` is (P - 1) / (v M + P - 1) (Narayanan et al., 2021).

    Raises:
        UsageError: the schedule cannot run with these numbers.
    """
    chosen = PipelineSchedule.of(schedule)
    stages = default_num_stages(chosen, num_ranks) if num_stages is None else num_stages
    counts = {"num_ranks": num_ranks, "num_stages": stages, "num_microbatches": num_microbatches}
    check_counts(chosen, **counts)
    lengths = {"F": forward_s, "B": backward_s, "I": backward_s / 2, "W": backward_s / 2}
    return play(actions(chosen, **counts), lengths)
