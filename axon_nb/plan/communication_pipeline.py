"""What a pipeline sends in a step, and which of a model's children each of its ranks holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from axon_nb.errors import UsageError
from axon_nb.parallel.pipeline.schedule import PipelineSchedule, check_counts, default_num_stages, stages_of_rank
from axon_nb.parallel.pipeline.split import balance, child_costs, split_sections
from axon_nb.plan.communication_plan import Traffic
from axon_nb.plan.step_time_trace import ModelTrace

__all__ = ["Stages", "boundaries", "pipeline", "stages_for"]

_FACTS = 4
"""Numbers that each rank tells the others before a step, of 8 bytes."""


@dataclass(frozen=True)
class Stages:
    """How a model is cut into stages, and where they are."""

    schedule: PipelineSchedule
    ranks: int
    microbatches: int
    children: tuple[tuple[str, ...], ...]
    """Names of the model's children, by stage."""

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.children)

    def held(self, rank: int) -> list[int]:
        """Stages of a rank."""
        return stages_of_rank(self.schedule, rank, num_ranks=self.ranks, num_stages=self.count)

    @cached_property
    def owner(self) -> dict[int, int]:
        """Rank of each stage."""
        return {stage: rank for rank in range(self.ranks) for stage in self.held(rank)}

    @cached_property
    def among(self) -> dict[str, int]:
        """Rank of each child."""
        owner = self.owner
        return {name: owner[stage] for stage, names in enumerate(self.children) for name in names}


def stages_for(
    trace: ModelTrace,
    *,
    ranks: int,
    schedule: PipelineSchedule | str,
    microbatches: int | None,
    num_stages: int | None,
    at: Sequence[str] | None,
) -> Stages:
    """Cut a Sequential as `Pipeline.split` does.

    Args:
        trace: Of the model.
        ranks: Of the pipeline.
        schedule: Its name.
        microbatches: Of a batch; None: as many as stages.
        num_stages: None: one a rank, or two where the schedule has several.
        at: Children that begin a new stage; None: stages have about as many parameters.

    Raises:
        UsageError: the model is no Sequential, or the numbers do not fit the schedule.
    """
    chosen = PipelineSchedule.of(schedule)
    count = default_num_stages(chosen, ranks) if num_stages is None else num_stages
    at = [at] if isinstance(at, str) else at
    names = _cut(trace, at) if at is not None else trace.once(("stages", count), lambda: _balanced(trace, count))
    given = len(names) if microbatches is None else microbatches
    check_counts(chosen, num_ranks=ranks, num_stages=len(names), num_microbatches=given)
    return Stages(chosen, ranks, given, names)


def _balanced(trace: ModelTrace, count: int) -> tuple[tuple[str, ...], ...]:
    costs: dict[str, float] = trace.once("costs of children", lambda: child_costs(trace.model, "params"))
    return _cut(trace, [list(costs)[start] for start in balance(list(costs.values()), count)[1:]])


def _cut(trace: ModelTrace, at: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(name for name, _ in part.named_children()) for part in split_sections(trace.model, at))


def boundaries(trace: ModelTrace, stages: Stages) -> list[tuple[int, int]]:
    """Bytes of one microbatch that go over each boundary between stages: (forward, backward).

    Raises:
        UsageError: the batch cannot be cut into microbatches.
    """
    found = []
    for names in stages.children[:-1]:
        facts = trace.outputs[names[-1]]
        rows = facts[0].shape[0] if facts and facts[0].shape else 0
        if not rows or rows % stages.microbatches:
            raise UsageError(
                f"a batch of {rows} samples in {stages.microbatches} microbatches: {rows} is no multiple of "
                f"{stages.microbatches}; give another batch or microbatches=."
            )
        forward = sum(fact.nbytes for fact in facts) // stages.microbatches
        backward = sum(fact.nbytes for fact in facts if fact.requires_grad) // stages.microbatches
        found.append((forward, backward))
    return found


def pipeline(trace: ModelTrace, stages: Stages, *, shares: Mapping[str, int] | None = None) -> Iterator[Traffic]:
    """What each rank of the pipeline sends and receives; messages between two stages of one rank do not travel.

    Args:
        trace: Of the model with a rank's batch.
        stages: How it is cut.
        shares: Children whose output each rank of ``tp`` has one of so many parts of.
    """
    owner, count, ranks = stages.owner, stages.microbatches, stages.ranks
    for place in range(ranks):
        yield Traffic(
            "pp", ranks, "all_gather", "forward", "agreement on the batch", ((ranks * _FACTS * 8, 1),), place=place
        )
    for stage, sizes in enumerate(boundaries(trace, stages)):
        first, second = owner[stage], owner[stage + 1]
        if first == second:
            continue
        parts = (shares or {}).get(stages.children[stage][-1], 1)
        forward, backward = (size // parts for size in sizes)
        for phase, size, source, target in (("forward", forward, first, second), ("backward", backward, second, first)):
            if size:
                what = f"{'activations' if phase == 'forward' else 'gradients'} between stages {stage} and {stage + 1}"
                messages = ((size, count),)
                yield Traffic("pp", ranks, "send", phase, what, messages, phase, source)
                yield Traffic("pp", ranks, "recv", phase, what, messages, phase, target)
