"""Properties of a pipeline schedule: peak number of live microbatches, ideal timeline, bubble fraction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from axon_nb.parallel.pipeline.schedule import PipelineSchedule, check_counts, default_num_stages
from axon_nb.parallel.pipeline.torch_hooks import actions
from axon_nb.records.spans import Span
from axon_nb.records.training.pipeline import Order, play


@dataclass(frozen=True, slots=True)
class PipelineMemoryStats:
    """Live activations of a pipeline, in microbatches of one stage.

    A microbatch is live in a stage from the start of its forward to the end of its backward, or of the weight part of
    its backward if the schedule defers that. The peaks follow from torch's order of computation. In addition, torch
    keeps two buffers per microbatch through all steps: for a stage's input and for the gradient of its output.
    """

    schedule: PipelineSchedule
    num_ranks: int
    num_stages: int
    num_microbatches: int
    peak_per_stage: tuple[int, ...]
    """Peak number of live microbatches of each stage."""
    peak_per_rank: tuple[int, ...]
    """Peak number of live microbatches on each rank, over all its stages."""

    @property
    def peak_activations(self) -> int:
        """Peak of the busiest rank."""
        return max(self.peak_per_rank)

    def peak_bytes(self, microbatch_bytes: int) -> tuple[int, ...]:
        """Return the peak bytes of activations on each rank, given the bytes per microbatch and stage."""
        return tuple(peak * microbatch_bytes for peak in self.peak_per_rank)

    @classmethod
    def of(
        cls,
        schedule: PipelineSchedule | str,
        *,
        num_ranks: int,
        num_microbatches: int,
        num_stages: int | None = None,
    ) -> PipelineMemoryStats:
        """Compute the peaks of a schedule.

        Args:
            schedule: The schedule, or its name.
            num_ranks: Number of ranks of the pipeline.
            num_microbatches: Microbatches per batch.
            num_stages: Stages on all ranks. None: one per rank, or two if the schedule needs several.

        Raises:
            UsageError: the schedule cannot run with these numbers.
        """
        kind = PipelineSchedule.of(schedule)
        stages = default_num_stages(kind, num_ranks) if num_stages is None else num_stages
        counts = {"num_ranks": num_ranks, "num_stages": stages, "num_microbatches": num_microbatches}
        check_counts(kind, **counts)
        per_stage, per_rank = peak_live_microbatches(actions(kind, **counts), num_stages=stages)
        return cls(kind, num_ranks, stages, num_microbatches, per_stage, per_rank)

    @staticmethod
    def gpipe_peak_activations(num_stages: int, num_microbatches: int) -> int:
        """Return GPipe's peak: all microbatches, in every stage."""
        return _peak(PipelineSchedule.GPIPE, num_stages, num_microbatches, 1)

    @staticmethod
    def one_f_one_b_peak_activations(num_stages: int, num_microbatches: int) -> int:
        """Return 1F1B's peak: as many microbatches as stages, in the first stage."""
        return _peak(PipelineSchedule.ONE_F_ONE_B, num_stages, num_microbatches, 1)

    @staticmethod
    def interleaved_one_f_one_b_peak_activations(
        num_stages: int, num_microbatches: int, *, stages_per_rank: int = 2
    ) -> int:
        """Return the peak of the busiest rank with Interleaved1F1B, in microbatches of one (smaller) stage."""
        return _peak(PipelineSchedule.INTERLEAVED_1F1B, num_stages, num_microbatches, stages_per_rank)

    @staticmethod
    def looped_bfs_peak_activations(num_stages: int, num_microbatches: int, *, stages_per_rank: int = 2) -> int:
        """Return the peak of every rank with LoopedBFS: all microbatches in each of its stages."""
        return _peak(PipelineSchedule.LOOPED_BFS, num_stages, num_microbatches, stages_per_rank)

    @staticmethod
    def interleaved_zero_bubble_peak_activations(
        num_stages: int, num_microbatches: int, *, stages_per_rank: int = 2
    ) -> int:
        """Return the peak of the busiest rank with InterleavedZeroBubble, in microbatches of one stage."""
        return _peak(PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, num_stages, num_microbatches, stages_per_rank)

    @staticmethod
    def zbv_zero_bubble_peak_activations(num_stages: int, num_microbatches: int) -> int:
        """Return the peak of the busiest rank with ZBVZeroBubble, in microbatches of one stage."""
        return _peak(PipelineSchedule.ZBV_ZERO_BUBBLE, num_stages, num_microbatches, 2)

    @staticmethod
    def dual_pipe_v_peak_activations(num_stages: int, num_microbatches: int) -> int:
        """Return the peak of the busiest rank with DualPipeV, in microbatches of one stage."""
        return _peak(PipelineSchedule.DUAL_PIPE_V, num_stages, num_microbatches, 2)


def peak_live_microbatches(orders: Sequence[Order], *, num_stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Compute the peak number of live microbatches per stage and per rank from the order of computation."""
    per_stage, per_rank = [0] * num_stages, []
    for order in orders:
        live, total, peak = [0] * num_stages, 0, 0
        for action, stage, _ in order:
            change = 1 if action == "F" else 0 if action == "I" else -1
            live[stage] += change
            total += change
            per_stage[stage] = max(per_stage[stage], live[stage])
            peak = max(peak, total)
        per_rank.append(peak)
    return tuple(per_stage), tuple(per_rank)


def _peak(schedule: PipelineSchedule, num_stages: int, num_microbatches: int, stages_per_rank: int) -> int:
    stats = PipelineMemoryStats.of(
        schedule,
        num_ranks=max(1, num_stages // stages_per_rank),
        num_microbatches=num_microbatches,
        num_stages=num_stages,
    )
    return stats.peak_activations


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
    kind = PipelineSchedule.of(schedule)
    stages = default_num_stages(kind, num_ranks) if num_stages is None else num_stages
    counts = {"num_ranks": num_ranks, "num_stages": stages, "num_microbatches": num_microbatches}
    check_counts(kind, **counts)
    lengths = {"F": forward_s, "B": backward_s, "I": backward_s / 2, "W": backward_s / 2}
    return play(actions(kind, **counts), lengths)
