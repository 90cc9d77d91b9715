"""Finds the last training step of each pipeline among the spans of many steps, pipelines and ranks."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from axon_nb.records.spans import Span
from axon_nb.records.training.pipeline import Action, PipelineStep, play

_COMPUTING = ("forward", "backward")
_MAX_TRIED = 8
"""Steps tried per rank, from the last one back: the last may be unfinished on some ranks, or aborted."""


@dataclass(frozen=True, slots=True)
class _RankStep:
    """One step on one rank."""

    rank: int
    spans: tuple[Span, ...]
    start_ns: int
    end_ns: int

    def overlap_ns(self, other: _RankStep) -> int:
        """Overlap in time with another step, in nanoseconds; negative if they do not overlap."""
        return min(self.end_ns, other.end_ns) - max(self.start_ns, other.start_ns)


def last_steps(spans: Iterable[Span], *, members: Mapping[str, Iterable[int]] | None = None) -> list[PipelineStep]:
    """Return each pipeline's last training step that is complete on all ranks, with its ideal; newest first.

    The ideal keeps each rank's own order of actions, so the schedule need not be known. Every F takes the median of the
    measured F times, and likewise B, I and W.

    Args:
        spans: Spans of any kind in any order. Spans of one step share a `sequence`; where that is 0, a step ends
            when an action repeats.
        members: Ranks of groups by name: a step must include all of them. Default: all ranks with spans in the group.
    """
    groups: dict[str, dict[int, list[Span]]] = {}
    for span in spans:
        if span.kind in _COMPUTING and span.stage >= 0:
            groups.setdefault(span.group, {}).setdefault(span.rank, []).append(span)
    known = members or {}
    candidates = [_last_step(group, by_rank, set(known.get(group, by_rank))) for group, by_rank in groups.items()]
    steps = [step for step in candidates if step is not None]
    return sorted(steps, key=lambda step: max(span.end_ns for span in step.measured), reverse=True)


def _last_step(group: str, by_rank: Mapping[int, list[Span]], members: set[int]) -> PipelineStep | None:
    parts = {rank: list(_training_steps(rank, spans)) for rank, spans in sorted(by_rank.items())}
    tried = itertools.chain.from_iterable(step[-_MAX_TRIED:] for step in parts.values())
    for step in sorted(tried, key=lambda part: part.end_ns, reverse=True):
        together = [
            match for rank, others in parts.items() if (match := _overlapping_step(step, rank, others)) is not None
        ]
        if not members <= {part.rank for part in together}:
            continue  # a rank has not reported yet, or did not take part
        measured = tuple(span for part in together for span in part.spans)
        if not _is_complete(measured):
            continue
        orders = [[(span.name, span.stage, span.microbatch) for span in part.spans] for part in together]
        try:
            ideal = play(orders, _lengths(measured), ranks=[part.rank for part in together])
        except ValueError:
            continue
        return PipelineStep(group, measured, tuple(ideal))
    return None


def _training_steps(rank: int, spans: Iterable[Span]) -> Iterator[_RankStep]:
    """Training steps of one rank, in order: those with a backward."""
    for part in _split_steps(sorted(spans, key=lambda span: span.start_ns)):
        if any(span.kind == "backward" for span in part):
            yield _RankStep(rank, tuple(part), part[0].start_ns, max(span.end_ns for span in part))


def _split_steps(spans: Iterable[Span]) -> list[list[Span]]:
    steps: list[list[Span]] = []
    seen: set[Action] = set()
    current = -1
    for span in spans:
        action = (span.name, span.stage, span.microbatch)
        # Repetition alone is not enough: if the first spans of a step are lost, all later steps would be split wrongly.
        if span.sequence != current or action in seen:
            steps.append([])
            seen, current = set(), span.sequence
        seen.add(action)
        steps[-1].append(span)
    return steps


def _overlapping_step(step: _RankStep, rank: int, others: Sequence[_RankStep]) -> _RankStep | None:
    """The step of `rank` that overlaps `step` the most; None if none does."""
    if rank == step.rank:
        return step
    best, longest = None, 0
    for part in reversed(others):
        if part.end_ns <= step.start_ns:
            break
        if (overlap := step.overlap_ns(part)) > longest:
            best, longest = part, overlap
    return best


def _is_complete(spans: Sequence[Span]) -> bool:
    """Whether each microbatch passed every stage exactly once forward and once backward."""
    done = [(span.name, span.stage, span.microbatch) for span in spans]
    forwards = {(stage, microbatch) for name, stage, microbatch in done if name == "F"}
    backwards = {(stage, microbatch) for name, stage, microbatch in done if name in ("B", "W")}
    stages, microbatches = {stage for stage, _ in forwards}, {microbatch for _, microbatch in forwards}
    everything = {(stage, microbatch) for stage in range(len(stages)) for microbatch in microbatches}
    return bool(forwards) and len(set(done)) == len(done) and forwards == backwards == everything


def _lengths(spans: Sequence[Span]) -> dict[str, float]:
    names = {span.name for span in spans}
    return {n: statistics.median((s.end_ns - s.start_ns) / 1e9 for s in spans if s.name == n) for n in names}
