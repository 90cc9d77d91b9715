"""Steps of a pipeline as spans: found, played as if nobody waited, and the share of time in which ranks are idle."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from axon_nb.records.pipeline_play import Action, play_orders
from axon_nb.records.span import Span

__all__ = ["Action", "PipelineStep", "bubble_fraction", "last_steps", "play"]

_COMPUTING = ("forward", "backward")
_LOOK_BACK = 3
"""Steps of one rank that are tried, from its last one on: the last may not be over on all ranks."""


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """One step of a pipeline as it was, beside the same step if every stage took as long and messages no time."""

    group: str
    """Name of the pipeline's process group."""
    measured: tuple[Span, ...]
    """Forwards and backwards of stages, rank by rank, in order."""
    ideal: tuple[Span, ...]
    """The same actions in the same order, from 0 ns on."""

    @property
    def bubble(self) -> float:
        """Share of time in which ranks did not compute, 0 to 1."""
        return bubble_fraction(self.measured)

    @property
    def ideal_bubble(self) -> float:
        """The same, of the ideal."""
        return bubble_fraction(self.ideal)


def bubble_fraction(spans: Iterable[Span]) -> float:
    """The share of time, 0 to 1, in which ranks do not compute, from the first forward to the last backward.

    Args:
        spans: Of one step, of all ranks; those of forwards and backwards in stages count.
    """
    computing = [span for span in spans if span.kind in _COMPUTING and span.stage >= 0]
    if not computing:
        return 0.0
    length = max(span.end_ns for span in computing) - min(span.start_ns for span in computing)
    busy = sum(span.end_ns - span.start_ns for span in computing)
    return 1.0 - busy / (length * len({span.rank for span in computing})) if length else 0.0


def play(
    orders: Sequence[Sequence[Action]], lengths: Mapping[str, float], *, ranks: Sequence[int] | None = None
) -> list[Span]:
    """Orders as they run if every stage takes as long, and a message no time.

    Args:
        orders: What each rank computes, in this order.
        lengths: Seconds of an F, B, I and W.
        ranks: Whose orders they are; None: of the ranks from 0 on.

    Returns:
        Spans from 0 ns on, rank by rank.

    Raises:
        ValueError: the orders wait for each other, or for what is in none of them.
    """
    names = range(len(orders)) if ranks is None else ranks
    stages = 1 + max((stage for order in orders for _, stage, _ in order), default=0)
    count = 1 + max((microbatch for order in orders for _, _, microbatch in order), default=0)
    each = {action: (seconds,) * stages for action, seconds in lengths.items()}
    times = play_orders(orders, each, num_stages=stages, num_microbatches=count)
    return [
        Span(
            names[index],
            "forward" if action == "F" else "backward",
            action,
            round(begin * 1e9),
            round(end * 1e9),
            stage=stage,
            microbatch=microbatch,
        )
        for index, order in enumerate(orders)
        for (action, stage, microbatch), (begin, end) in zip(order, times[index], strict=True)
    ]


def last_steps(spans: Iterable[Span]) -> list[PipelineStep]:
    """The last training step of each pipeline that is over on all of its ranks, beside its ideal.

    The ideal keeps each rank's own order of actions, so that no schedule has to be known; every F takes as long as the
    median of those measured, and so do B, I and W.
    """
    groups: dict[str, dict[int, list[Span]]] = {}
    for span in spans:
        if span.kind in _COMPUTING and span.stage >= 0:
            groups.setdefault(span.group, {}).setdefault(span.rank, []).append(span)
    found = (_last_step(group, by_rank) for group, by_rank in groups.items())
    return [step for step in found if step is not None]


def _last_step(group: str, by_rank: Mapping[int, list[Span]]) -> PipelineStep | None:
    cut = {rank: _cut(sorted(spans, key=lambda span: span.start_ns)) for rank, spans in sorted(by_rank.items())}
    first = min(cut)
    for own in reversed(cut[first][-_LOOK_BACK:]):
        steps = [own] + [
            max(steps, key=lambda step: _common(own, step)) for rank, steps in cut.items() if rank != first
        ]
        measured = [span for step in steps for span in step]
        if not _whole(measured) or any(_common(own, step) <= 0 for step in steps):
            continue
        orders = [[(span.name, span.stage, span.microbatch) for span in step] for step in steps]
        try:
            ideal = play(orders, _lengths(measured), ranks=list(cut))
        except ValueError:
            continue
        return PipelineStep(group, tuple(measured), tuple(ideal))
    return None


def _cut(spans: Sequence[Span]) -> list[list[Span]]:
    """A step ends where an action comes again."""
    steps: list[list[Span]] = [[]]
    seen: set[Action] = set()
    for span in spans:
        action = (span.name, span.stage, span.microbatch)
        if action in seen:
            steps.append([])
            seen = set()
        seen.add(action)
        steps[-1].append(span)
    return steps


def _common(one: Sequence[Span], other: Sequence[Span]) -> int:
    """For how long both were under way, in nanoseconds; negative when not at once."""
    ends = min(max(span.end_ns for span in one), max(span.end_ns for span in other))
    return ends - max(one[0].start_ns, other[0].start_ns)


def _whole(spans: Sequence[Span]) -> bool:
    """Whether each microbatch went forward and backward through each stage from 0 on."""
    done = {(span.name, span.stage, span.microbatch) for span in spans}
    forwards = {(stage, microbatch) for name, stage, microbatch in done if name == "F"}
    backwards = {(stage, microbatch) for name, stage, microbatch in done if name in ("B", "W")}
    stages, microbatches = {stage for stage, _ in forwards}, {microbatch for _, microbatch in forwards}
    everything = {(stage, microbatch) for stage in range(len(stages)) for microbatch in microbatches}
    return bool(forwards) and forwards == backwards == everything


def _lengths(spans: Sequence[Span]) -> dict[str, float]:
    names = {span.name for span in spans}
    return {n: statistics.median((s.end_ns - s.start_ns) / 1e9 for s in spans if s.name == n) for n in names}
