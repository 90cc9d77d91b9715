"""A schedule as it would run if messages took no time, and the share of time that ranks are idle."""

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
        UsageError: the schedule cannot run with these numbers.
    """
    chosen = PipelineSchedule.of(schedule)
    stages = default_num_stages(chosen, num_ranks) if num_stages is None else num_stages
    counts = {"num_ranks": num_ranks, "num_stages": stages, "num_microbatches": num_microbatches}
    check_counts(chosen, **counts)
    lengths = {"F": forward_s, "B": backward_s, "I": backward_s / 2, "W": backward_s / 2}
    return play(actions(chosen, **counts), lengths)
