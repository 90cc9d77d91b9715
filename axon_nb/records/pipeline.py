"""Steps of a pipeline as spans: played as if nobody waited, and the share of time in which ranks are idle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from axon_nb.records.pipeline_play import Action, play_orders, spans_of
from axon_nb.records.span import Span

__all__ = ["Action", "PipelineStep", "bubble_fraction", "play"]

_COMPUTING = ("forward", "backward")


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
    stages = 1 + max((stage for order in orders for _, stage, _ in order), default=0)
    count = 1 + max((microbatch for order in orders for _, _, microbatch in order), default=0)
    each = {action: (seconds,) * stages for action, seconds in lengths.items()}
    times = play_orders(orders, each, num_stages=stages, num_microbatches=count)
    return spans_of(orders, times, ranks=ranks)
