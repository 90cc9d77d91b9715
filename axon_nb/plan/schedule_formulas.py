"""Published formulas for pipeline bubbles, with their sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from axon_nb.parallel.pipeline.schedule import PipelineSchedule

__all__ = ["Formula", "bubble_formula"]

_SOURCES = {
    PipelineSchedule.GPIPE: "Huang et al., GPipe, 2019, section 2.3",
    PipelineSchedule.ONE_F_ONE_B: "Narayanan et al., 2021, section 2.2.1",
    PipelineSchedule.INTERLEAVED_1F1B: "Narayanan et al., 2021, section 2.2.2",
    PipelineSchedule.LOOPED_BFS: "Lamy-Poirier, 2022, section 4",
    PipelineSchedule.INTERLEAVED_ZERO_BUBBLE: "Qi et al., 2023, table 2, ZB-H1",
}


class Formula(NamedTuple):
    """A published bubble formula and its value."""

    fraction: float
    """Fraction of the step in which a rank is idle, 0 to 1."""
    text: str
    """The formula: P ranks, v stages each, M microbatches; F, I and W: forward, backward for inputs, for weights."""
    source: str


def bubble_formula(
    schedule: PipelineSchedule,
    *,
    num_ranks: int,
    num_stages: int,
    num_microbatches: int,
    times: Sequence[tuple[float, float, float | None]],
    latency_s: Sequence[float],
) -> Formula | None:
    """Return the published bubble; None if there is no formula for these numbers.

    The formulas assume equal stages and free messages and, with several stages per rank, a multiple of P microbatches.
    Those of zero-bubble schedules assume F = I = W.

    Args:
        schedule: The schedule.
        num_ranks: P.
        num_stages: v P.
        num_microbatches: M.
        times: (forward, backward, the weights' part of backward) per stage, in seconds.
        latency_s: Per boundary, in seconds.
    """
    forward, backward, weight = times[0]
    if schedule not in _SOURCES or any(latency_s) or len(set(times)) > 1 or not forward + backward:
        return None
    if schedule.has_many_stages and num_microbatches % num_ranks:
        return None
    per_rank = num_stages // num_ranks
    source = _SOURCES[schedule]
    if schedule is not PipelineSchedule.INTERLEAVED_ZERO_BUBBLE:
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
