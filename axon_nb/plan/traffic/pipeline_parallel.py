"""What a pipeline sends in a step, and which children of the model each pipeline rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from axon_nb.errors import UsageError
from axon_nb.parallel.pipeline.schedule import PipelineSchedule, check_counts, default_num_stages, stages_of_rank
from axon_nb.parallel.pipeline.stages import balance, child_costs, split_sections
from axon_nb.plan.tracing.model_parts import owner, part_costs, pipeline_parts
from axon_nb.plan.tracing.trace import ModelTrace
from axon_nb.plan.traffic.plan import Traffic

_FACTS = 4
"""Number of 8-byte integers that ranks exchange before a step."""


@dataclass(frozen=True)
class StageAssignment:
    """How a model is split into stages, and which rank has which."""

    schedule: PipelineSchedule
    num_ranks: int
    num_microbatches: int
    children: tuple[tuple[str, ...], ...]
    """Names of the model's children, per stage; in a model that is not a Sequential, of its `pipeline_parts`."""

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.children)

    def on_rank(self, rank: int) -> list[int]:
        """StageAssignment of a rank."""
        return stages_of_rank(self.schedule, rank, num_ranks=self.num_ranks, num_stages=self.num_stages)

    @cached_property
    def rank_of_stage(self) -> dict[int, int]:
        """The rank of each stage."""
        return {stage: rank for rank in range(self.num_ranks) for stage in self.on_rank(rank)}

    @cached_property
    def _stage_of_child(self) -> dict[str, int]:
        return {name: stage for stage, names in enumerate(self.children) for name in names}

    def stage_of(self, path: str) -> int:
        """The stage that holds a module or parameter; the last one for what is in none."""
        return self._stage_of_child.get(owner(path, self._stage_of_child), self.num_stages - 1)

    def rank_of(self, path: str) -> int:
        """The rank of that stage."""
        return self.rank_of_stage[self.stage_of(path)]


def assign_stages(
    trace: ModelTrace,
    *,
    num_ranks: int,
    schedule: PipelineSchedule | str,
    num_microbatches: int | None,
    num_stages: int | None,
    at: Sequence[str] | None,
) -> StageAssignment:
    """Split a Sequential as `Pipeline.split` does, and other models into their `pipeline_parts`.

    Args:
        trace: The model's trace.
        num_ranks: Pipeline ranks.
        schedule: Its name.
        num_microbatches: None: one per stage.
        num_stages: None: one per rank, or two where the schedule has several.
        at: Children of a Sequential that start a stage; None: stages of about equal parameter counts.

    Raises:
        UsageError: the model has no equal blocks and is not a Sequential, or the numbers do not fit the schedule.
    """
    kind = PipelineSchedule.of(schedule)
    count = default_num_stages(kind, num_ranks) if num_stages is None else num_stages
    at = [at] if isinstance(at, str) else at
    names = _split_at(trace, at) if at is not None else trace.cached(("stages", count), lambda: _balanced(trace, count))
    microbatches = len(names) if num_microbatches is None else num_microbatches
    check_counts(kind, num_ranks=num_ranks, num_stages=len(names), num_microbatches=microbatches)
    return StageAssignment(kind, num_ranks, microbatches, names)


def _balanced(trace: ModelTrace, count: int) -> tuple[tuple[str, ...], ...]:
    costs: dict[str, float] = trace.cached("costs of stages' parts", lambda: _part_costs(trace))
    names, starts = list(costs), balance(list(costs.values()), count)
    return tuple(tuple(names[first:second]) for first, second in pairwise([*starts, len(names)]))


def _part_costs(trace: ModelTrace) -> dict[str, float]:
    parts = pipeline_parts(trace.model)
    return part_costs(trace.model, parts) if parts else child_costs(trace.model, "params")


def _split_at(trace: ModelTrace, at: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(name for name, _ in part.named_children()) for part in split_sections(trace.model, at))


def boundaries(
    trace: ModelTrace, stages: StageAssignment, *, shares: Mapping[str, int] | None = None
) -> list[tuple[int, int]]:
    """Return the bytes of one microbatch that a rank sends over each stage boundary: (forward, backward).

    Args:
        trace: The model's trace with one rank's batch.
        stages: How it is split.
        shares: Children whose output is sharded over this many ``tp`` ranks.

    Raises:
        UsageError: the batch is not divisible into microbatches.
    """
    sizes = []
    for names in stages.children[:-1]:
        facts = trace.outputs[names[-1]]
        rows = facts[0].shape[0] if facts and facts[0].shape else 0
        if not rows or rows % stages.num_microbatches:
            raise UsageError(
                f"The batch ({rows} samples) must be divisible by num_microbatches ({stages.num_microbatches}): change "
                "one of them."
            )
        parts = stages.num_microbatches * (shares or {}).get(names[-1], 1)
        forward = sum(fact.nbytes for fact in facts)
        backward = sum(fact.nbytes for fact in facts if fact.requires_grad)
        sizes.append((forward // parts, backward // parts))
    return sizes


def pipeline_traffic(
    trace: ModelTrace, stages: StageAssignment, *, shares: Mapping[str, int] | None = None
) -> Iterator[Traffic]:
    """Yield what each pipeline rank sends and receives; stages on the same rank exchange no messages.

    Args:
        trace: The same as for `boundaries`.
        stages: The same.
        shares: The same.
    """
    ranks, count, num_ranks = stages.rank_of_stage, stages.num_microbatches, stages.num_ranks
    for pp_rank in range(num_ranks):
        yield Traffic(
            "pp",
            num_ranks,
            "all_gather",
            "forward",
            "batch check",
            ((num_ranks * _FACTS * 8, 1),),
            pp_rank=pp_rank,
        )
        yield Traffic("pp", num_ranks, "barrier", "backward", "end of the step", ((0, 1),), pp_rank=pp_rank)
    for stage, (forward, backward) in enumerate(boundaries(trace, stages, shares=shares)):
        first, second = ranks[stage], ranks[stage + 1]
        if first == second:
            continue
        for phase, size, source, target in (("forward", forward, first, second), ("backward", backward, second, first)):
            if size:
                what = f"{'activations' if phase == 'forward' else 'gradients'} between stages {stage} and {stage + 1}"
                messages = ((size, count),)
                yield Traffic("pp", num_ranks, "send", phase, what, messages, phase, source)
                yield Traffic("pp", num_ranks, "recv", phase, what, messages, phase, target)
