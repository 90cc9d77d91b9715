"""How many microbatches' activations a pipeline keeps at once, by schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from axon_nb.parallel.pipeline.schedule import PipelineSchedule, check_counts, default_num_stages
from axon_nb.parallel.pipeline.torch_hooks import actions
from axon_nb.records.pipeline_play import Order

__all__ = ["PipelineMemoryStats", "peaks_of"]


@dataclass(frozen=True, slots=True)
class PipelineMemoryStats:
    """Live activations of a pipeline, counted in microbatches of one stage.

    A microbatch is live in a stage from the beginning of its forward to the end of its backward, or of the backward's
    part for weights where a schedule puts that off. The peaks follow from the order in which torch computes. Beside
    them torch keeps, for every microbatch and through all steps, one buffer for a stage's input and one for the
    gradient of its output.
    """

    schedule: PipelineSchedule
    num_ranks: int
    num_stages: int
    num_microbatches: int
    peak_per_stage: tuple[int, ...]
    """Most live microbatches of each stage."""
    peak_per_rank: tuple[int, ...]
    """Most live microbatches over the stages of each rank together."""

    @property
    def peak_activations(self) -> int:
        """Of the rank that keeps most."""
        return max(self.peak_per_rank)

    def peak_bytes(self, microbatch_bytes: int) -> tuple[int, ...]:
        """Bytes of activations on each rank, if one microbatch keeps so many in each stage."""
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
        """The peaks of a schedule.

        Args:
            schedule: The schedule, or its name.
            num_ranks: Ranks of the pipeline.
            num_microbatches: Microbatches of a batch.
            num_stages: Stages of all ranks; None: one a rank, or two where the schedule has several.

        Raises:
            UsageError: the schedule cannot run with these numbers.
        """
        chosen = PipelineSchedule.of(schedule)
        stages = default_num_stages(chosen, num_ranks) if num_stages is None else num_stages
        counts = {"num_ranks": num_ranks, "num_stages": stages, "num_microbatches": num_microbatches}
        check_counts(chosen, **counts)
        per_stage, per_rank = peaks_of(actions(chosen, **counts), num_stages=stages)
        return cls(chosen, num_ranks, stages, num_microbatches, per_stage, per_rank)

    @staticmethod
    def gpipe_peak_activations(num_stages: int, num_microbatches: int) -> int:
        """GPipe keeps all microbatches in every stage."""
        return _peak(PipelineSchedule.GPIPE, num_stages, num_microbatches, 1)

    @staticmethod
    def one_f_one_b_peak_activations(num_stages: int, num_microbatches: int) -> int:
        """1F1B keeps as many as there are stages, in the first one."""
        return _peak(PipelineSchedule.ONE_F_ONE_B, num_stages, num_microbatches, 1)

    @staticmethod
    def interleaved_one_f_one_b_peak_activations(
        num_stages: int, num_microbatches: int, *, stages_per_rank: int = 2
    ) -> int:
        """Of the busiest rank with Interleaved1F1B, in microbatches of one (smaller) stage."""
        return _peak(PipelineSchedule.INTERLEAVED_1F1B, num_stages, num_microbatches, stages_per_rank)

    @staticmethod
    def looped_bfs_peak_activations(num_stages: int, num_microbatches: int, *, stages_per_rank: int = 2) -> int:
        """Of every rank with LoopedBFS: all microbatches in each of its stages."""
        return _peak(PipelineSchedule.LOOPED_BFS, num_stages, num_microbatches, stages_per_rank)

    @staticmethod
    def interleaved_zero_bubble_peak_activations(
        num_stages: int, num_microbatches: int, *, stages_per_rank: int = 2
    ) -> int:
        """Of the busiest rank with InterleavedZeroBubble, in microbatches of one stage."""
        return _peak(PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, num_stages, num_microbatches, stages_per_rank)

    @staticmethod
    def zbv_zero_bubble_peak_activations(num_stages: int, num_microbatches: int) -> int:
        """Of the busiest rank with ZBVZeroBubble, in microbatches of one stage."""
        return _peak(PipelineSchedule.ZBV_ZERO_BUBBLE, num_stages, num_microbatches, 2)

    @staticmethod
    def dual_pipe_v_peak_activations(num_stages: int, num_microbatches: int) -> int:
        """Of the busiest rank with DualPipeV, in microbatches of one stage."""
        return _peak(PipelineSchedule.DUAL_PIPE_V, num_stages, num_microbatches, 2)


def peaks_of(orders: Sequence[Order], *, num_stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Most live microbatches of each stage, and over the stages of each rank together, from what ranks compute."""
    per_stage, per_rank = [0] * num_stages, []
    for order in orders:
        live, together, most = [0] * num_stages, 0, 0
        for action, stage, _ in order:
            change = 1 if action == "F" else 0 if action == "I" else -1
            live[stage] += change
            together += change
            per_stage[stage] = max(per_stage[stage], live[stage])
            most = max(most, together)
        per_rank.append(most)
    return tuple(per_stage), tuple(per_rank)


def _peak(schedule: PipelineSchedule, num_stages: int, num_microbatches: int, stages_per_rank: int) -> int:
    stats = PipelineMemoryStats.of(
        schedule,
        num_ranks=max(1, num_stages // stages_per_rank),
        num_microbatches=num_microbatches,
        num_stages=num_stages,
    )
    return stats.peak_activations
