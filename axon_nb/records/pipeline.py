"""Pipeline steps as spans: the ideal step without waiting, and the bubble fraction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from axon_nb.records.pipeline_play import Action, simulate_orders, spans_from_times
from axon_nb.records.span import Span

__all__ = ["Action", "PipelineStep", "bubble_fraction", "play"]

_COMPUTING = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """A measured pipeline step and its ideal: equal stage times and no communication time."""

    group: str
    """Name of the pipeline's process group."""
    measured: tuple[Span, ...]
    """Forwards and backwards of the stages, rank by rank, in order."""
    ideal: tuple[Span, ...]
    """The same actions in the same order, starting at 0 ns."""

    @property
    def bubble(self) -> float:
        """Fraction of time in which ranks did not compute, 0 to 1."""
        return bubble_fraction(self.measured)

    @property
    def ideal_bubble(self) -> float:
        """Bubble fraction of the ideal step, 0 to 1."""
        return bubble_fraction(self.ideal)


def bubble_fraction(spans: Iterable[Span]) -> float:
    """Fraction of time, 0 to 1, in which ranks do not compute between the first forward and the last backward.

    Args:
        spans: Spans of one step on all ranks; only forwards and backwards of stages count.
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
    """Simulate orders with equal stage times and no communication time.

    Args:
        orders: Action order of each rank.
        lengths: Seconds that an F, B, I and W take.
        ranks: The rank of each order; None for 0, 1, 2 ...

    Returns:
        Spans rank by rank, starting at 0 ns.

    Raises:
        ValueError: the orders deadlock, or depend on an action that is in none of them.
    """
    stages = 1 + max((stage for order in orders for _, stage, _ in order), default=0)
    count = 1 + max((microbatch for order in orders for _, _, microbatch in order), default=0)
    each = {action: (seconds,) * stages for action, seconds in lengths.items()}
    times = simulate_orders(orders, each, num_stages=stages, num_microbatches=count)
    return spans_from_times(orders, times, ranks=ranks)
