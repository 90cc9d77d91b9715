"""Pipeline schedules: order of computation, stages per rank, and valid numbers of microbatches."""

from __future__ import annotations

import enum

from axon_nb.errors import UsageError


class PipelineSchedule(enum.Enum):
    """Order of forwards and backwards, as implemented by torch."""

    GPIPE = "GPipe"
    """All forwards, then all backwards (Huang et al., 2019)."""
    ONE_F_ONE_B = "1F1B"
    """Each backward as early as possible, so few activations are kept (Narayanan et al., PipeDream-Flush, 2021)."""
    INTERLEAVED_1F1B = "Interleaved1F1B"
    """1F1B with several stages per rank: smaller bubble, more messages (Narayanan et al., Megatron-LM, 2021)."""
    LOOPED_BFS = "LoopedBFS"
    """Several stages per rank; all microbatches through one stage before the next (Lamy-Poirier, 2022)."""
    INTERLEAVED_ZERO_BUBBLE = "InterleavedZeroBubble"
    """Several stages per rank; weight gradients are deferred into the bubble (Qi et al., ZB1P, 2023)."""
    ZBV_ZERO_BUBBLE = "ZBVZeroBubble"
    """Two stages per rank in a V, down and up again; weight gradients deferred (Qi et al., ZB-V, 2023)."""
    DUAL_PIPE_V = "DualPipeV"
    """Two stages per rank in a V, forwards and backwards of different microbatches paired (DeepSeek-V3, 2024)."""

    @classmethod
    def of(cls, value: PipelineSchedule | str) -> PipelineSchedule:
        """Return the schedule itself, or the one with this name in any case.

        Raises:
            UsageError: no schedule has this name.
        """
        if isinstance(value, cls):
            return value
        wanted = str(value).lower().replace("_", "").replace("-", "")
        for member in cls:
            if wanted in (member.value.lower(), member.name.lower().replace("_", ""), *_ALIASES.get(member, ())):
                return member
        names = ", ".join(repr(member.value) for member in cls)
        raise UsageError(f"schedule must be one of {names}, or a PipelineSchedule; got {value!r}.")

    @property
    def has_many_stages(self) -> bool:
        """Whether each rank holds several stages."""
        return self not in (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B)

    @property
    def is_v(self) -> bool:
        """Whether stages go down the ranks and up again, so that rank 0 has the first and the last one."""
        return self in (PipelineSchedule.ZBV_ZERO_BUBBLE, PipelineSchedule.DUAL_PIPE_V)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed separately."""
        return self.is_v or self is PipelineSchedule.INTERLEAVED_ZERO_BUBBLE


_ALIASES = {
    PipelineSchedule.ONE_F_ONE_B: ("onefonebschedule",),
    PipelineSchedule.INTERLEAVED_1F1B: ("interleavedonefoneb",),
}


def default_num_stages(schedule: PipelineSchedule, num_ranks: int) -> int:
    """Return the number of ranks, or twice that if the schedule needs several stages per rank."""
    return num_ranks * (2 if schedule.has_many_stages else 1)


def stages_of_rank(schedule: PipelineSchedule, rank: int, *, num_ranks: int, num_stages: int) -> list[int]:
    """Return the stages that a rank of the pipeline's group holds, in ascending order."""
    if schedule.is_v:
        return [rank, num_stages - 1 - rank]
    return list(range(rank, num_stages, num_ranks))


def check_counts(schedule: PipelineSchedule, *, num_ranks: int, num_stages: int, num_microbatches: int) -> None:
    """Check that the schedule can run with these numbers.

    Raises:
        UsageError: it cannot; the message names the rule and numbers that fit.
    """
    _check_stages(schedule, num_ranks, num_stages)
    what = f"num_microbatches={num_microbatches} with {schedule.value}"
    if num_microbatches < 1:
        raise UsageError(f"num_microbatches must be at least 1; got {num_microbatches}.")
    if schedule in (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.DUAL_PIPE_V) and num_microbatches < num_stages:
        instead = "GPipe" if schedule is PipelineSchedule.ONE_F_ONE_B else "ZBVZeroBubble"
        raise UsageError(
            f"{schedule.value} needs at least as many microbatches as stages ({num_stages}); got {num_microbatches}. "
            f"Use num_microbatches={num_stages} or schedule={instead!r}."
        )
    if schedule in (PipelineSchedule.INTERLEAVED_1F1B, PipelineSchedule.INTERLEAVED_ZERO_BUBBLE):
        rounds = _rounds(num_microbatches, num_ranks)
        if num_microbatches % rounds:
            near = [m for m in (num_microbatches - 1, num_microbatches + 1) if m % _rounds(m, num_ranks) == 0]
            fits = near or [num_microbatches // num_ranks * num_ranks]
            raise UsageError(
                f"{what} on {num_ranks} ranks: num_microbatches must be divisible by the number of rounds, "
                f"{num_microbatches} // {num_ranks} = {rounds}. Use {' or '.join(map(str, fits))}."
            )


def _rounds(num_microbatches: int, num_ranks: int) -> int:
    return max(1, num_microbatches // num_ranks)


def _check_stages(schedule: PipelineSchedule, num_ranks: int, num_stages: int) -> None:
    what = f"{num_stages} stage{'s' * (num_stages != 1)} on {num_ranks} rank{'s' * (num_ranks != 1)}"
    if not schedule.has_many_stages and num_stages != num_ranks:
        more = num_stages > num_ranks and num_stages % num_ranks == 0
        raise UsageError(
            f"{what}: {schedule.value} needs one stage per rank"
            + (f"; for {num_stages // num_ranks} per rank, use Interleaved1F1B." if more else f", so {num_ranks}.")
        )
    if schedule.is_v and num_stages != 2 * num_ranks:
        raise UsageError(f"{what}: {schedule.value} needs two stages per rank, so {2 * num_ranks}.")
    if num_stages < num_ranks or num_stages % num_ranks:
        raise UsageError(f"{what}: the number of stages must be a multiple of the number of ranks.")
