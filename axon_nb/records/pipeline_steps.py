"""The last training step of each pipeline, found among spans of many steps, pipelines and ranks."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from axon_nb.records.pipeline import Action, PipelineStep, play
from axon_nb.records.span import Span

__all__ = ["last_steps"]

_COMPUTING = ("forward", "backward")
_LOOK_BACK = 8
"""Steps of each rank that are tried, from its last one on: the last may not be over on all ranks, or was aborted."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank did in one step."""

    rank: int
    spans: tuple[Span, ...]
    start_ns: int
    end_ns: int

    def common(self, other: _Part) -> int:
        """For how long both were under way, in nanoseconds; negative when not at once."""
        return min(self.end_ns, other.end_ns) - max(self.start_ns, other.start_ns)


def last_steps(spans: Iterable[Span], *, members: Mapping[str, Iterable[int]] | None = None) -> list[PipelineStep]:
    """The last training step of each pipeline that is over on all of its ranks, beside its ideal, the newest first.

    The ideal keeps each rank's own order of actions, so that no schedule has to be known; every F takes as long as the
    median of those measured, and so do B, I and W.

    Args:
        spans: In any order, of any kinds. Those of one step have the same `sequence`; where that is 0, a step ends
            where an action comes again.
        members: The ranks of groups, by name; a step needs all of them. Of others: all ranks that have spans in it.
    """
    groups: dict[str, dict[int, list[Span]]] = {}
    for span in spans:
        if span.kind in _COMPUTING and span.stage >= 0:
            groups.setdefault(span.group, {}).setdefault(span.rank, []).append(span)
    known = members or {}
    found = [_last_step(group, by_rank, set(known.get(group, by_rank))) for group, by_rank in groups.items()]
    steps = [step for step in found if step is not None]
    return sorted(steps, key=lambda step: max(span.end_ns for span in step.measured), reverse=True)


def _last_step(group: str, by_rank: Mapping[int, list[Span]], members: set[int]) -> PipelineStep | None:
    parts = {rank: list(_parts(rank, spans)) for rank, spans in sorted(by_rank.items())}
    tried = itertools.chain.from_iterable(own[-_LOOK_BACK:] for own in parts.values())
    for own in sorted(tried, key=lambda part: part.end_ns, reverse=True):
        together = [mate for rank, others in parts.items() if (mate := _mate(own, rank, others)) is not None]
        if not members <= {part.rank for part in together}:
            continue  # a rank has not told yet, or was not there
        measured = tuple(span for part in together for span in part.spans)
        if not _whole(measured):
            continue
        orders = [[(span.name, span.stage, span.microbatch) for span in part.spans] for part in together]
        try:
            ideal = play(orders, _lengths(measured), ranks=[part.rank for part in together])
        except ValueError:
            continue
        return PipelineStep(group, measured, tuple(ideal))
    return None


def _parts(rank: int, spans: Iterable[Span]) -> Iterator[_Part]:
    """Steps of one rank with a backward, in order: a forward alone trains nothing."""
    for own in _cut(sorted(spans, key=lambda span: span.start_ns)):
        if any(span.kind == "backward" for span in own):
            yield _Part(rank, tuple(own), own[0].start_ns, max(span.end_ns for span in own))


def _cut(spans: Iterable[Span]) -> list[list[Span]]:
    steps: list[list[Span]] = []
    seen: set[Action] = set()
    current = -1
    for span in spans:
        action = (span.name, span.stage, span.microbatch)
        # Not by repetition alone: where the first spans of a step are gone, all steps after it would be cut too late.
        if span.sequence != current or action in seen:
            steps.append([])
            seen, current = set(), span.sequence
        seen.add(action)
        steps[-1].append(span)
    return steps


def _mate(own: _Part, rank: int, others: Sequence[_Part]) -> _Part | None:
    """What a rank did meanwhile: the step that was under way together with `own` for longest; None: there is none."""
    if rank == own.rank:
        return own
    best, longest = None, 0
    for part in reversed(others):
        if part.end_ns <= own.start_ns:
            break
        if (common := own.common(part)) > longest:
            best, longest = part, common
    return best


def _whole(spans: Sequence[Span]) -> bool:
    """Whether each microbatch went forward and backward through each stage from 0 on, once."""
    done = [(span.name, span.stage, span.microbatch) for span in spans]
    forwards = {(stage, microbatch) for name, stage, microbatch in done if name == "F"}
    backwards = {(stage, microbatch) for name, stage, microbatch in done if name in ("B", "W")}
    stages, microbatches = {stage for stage, _ in forwards}, {microbatch for _, microbatch in forwards}
    everything = {(stage, microbatch) for stage in range(len(stages)) for microbatch in microbatches}
    return bool(forwards) and len(set(done)) == len(done) and forwards == backwards == everything


def _lengths(spans: Sequence[Span]) -> dict[str, float]:
    names = {span.name for span in spans}
    return {n: statistics.median((s.end_ns - s.start_ns) / 1e9 for s in spans if s.name == n) for n in names}
