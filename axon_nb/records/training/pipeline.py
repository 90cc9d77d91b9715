"""Pipeline steps as spans, and their ideal: a simulation from given stage times and message delays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from axon_nb.records.spans import Span

Action = tuple[str, int, int]
"""F, B, I (input backward) or W (weight backward); stage; microbatch."""
Order = Sequence[Action]
"""The actions of one rank, in order."""
Times = list[tuple[float, float]]
"""Start and end of each action of one rank, in seconds from the start of the step."""
_COMPUTING = ("forward", "backward")


def simulate_orders(
    orders: Sequence[Order],
    lengths: Mapping[str, Sequence[float]],
    *,
    num_stages: int,
    num_microbatches: int,
    latency_s: Sequence[float] | None = None,
    backward_latency_s: Sequence[float] | None = None,
) -> list[Times]:
    """Compute the times of all actions: each rank runs its actions in order, each as soon as its inputs are there.

    Args:
        orders: Action order of each rank.
        lengths: Seconds per microbatch of each stage, by action; needed for the actions in `orders`.
        num_stages: Number of stages over all ranks.
        num_microbatches: Number of microbatches per batch.
        latency_s: Seconds that a message between adjacent stages takes: one number per boundary, so one fewer than
            stages. Applies between different ranks only; senders do not wait. None for no delay.
        backward_latency_s: The same for messages of backward; None: as those of forward.

    Returns:
        For each rank the times of its actions, in order.

    Raises:
        ValueError: the orders deadlock, or depend on an action that is in none of them.
    """
    count = num_microbatches
    owner = {stage: rank for rank, order in enumerate(orders) for _, stage, _ in order}
    delays = [[0.0] * (num_stages + 1) for _ in range(2)]  # forward and backward, at the boundary before each stage
    latencies = latency_s, latency_s if backward_latency_s is None else backward_latency_s
    for stage_delays, seconds in zip(delays, latencies, strict=True):
        for stage, delay in enumerate(seconds or (), start=1):
            stage_delays[stage] = delay if owner.get(stage) != owner.get(stage - 1) else 0.0
    # End of each forward, then of each backward, by stage and microbatch; negative while unknown.
    half = num_stages * count
    ends = [-1.0] * (2 * half)
    # Actions that depend on another stage: offset of that stage's end, boundary crossed, offset of their own end.
    others = {"F": (-count, 0, 0), "B": (count, 1, half), "I": (count, 1, half)}
    waiting: dict[int, int] = {}
    times: list[Times] = [[] for _ in orders]
    ready = list(range(len(orders)))[::-1]
    while ready:
        rank = ready.pop()
        done = times[rank]
        clock = done[-1][1] if done else 0.0
        for action, stage, microbatch in orders[rank][len(done) :]:
            key, begin = stage * count + microbatch, clock
            if action != "F" and (ends[key] < 0.0 or (action == "W" and ends[key + half] < 0.0)):
                break  # a backward before its own forward waits for itself
            if action in others:
                step, boundary, first = others[action]
                key += first
                if stage != (num_stages - 1 if first else 0):
                    arrived = ends[key + step]
                    if arrived < 0.0:
                        waiting[key + step] = rank
                        break
                    begin = max(begin, arrived + delays[boundary][stage + boundary])
            clock = begin + lengths[action][stage]
            done.append((begin, clock))
            if action in others:
                ends[key] = clock
                if key in waiting:
                    ready.append(waiting.pop(key))
    if any(len(done) < len(order) for done, order in zip(times, orders, strict=True)):
        raise ValueError("pipeline orders deadlock, or depend on an action that is in none of them")
    return times


def spans_from_times(
    orders: Sequence[Order], times: Sequence[Sequence[tuple[float, float]]], *, ranks: Sequence[int] | None = None
) -> list[Span]:
    """Convert simulated actions to spans as real steps record them: rank by rank, starting at 0 ns.

    Args:
        orders: Action order of each rank.
        times: Start and end of its actions in seconds, as returned by `simulate_orders`.
        ranks: The rank of each order; None for 0, 1, 2 ...
    """
    names = range(len(orders)) if ranks is None else ranks
    return [
        Span(
            rank,
            "forward" if action == "F" else "backward",
            action,
            round(begin * 1e9),
            round(end * 1e9),
            stage=stage,
            microbatch=microbatch,
        )
        for rank, order, moments in zip(names, orders, times, strict=True)
        for (action, stage, microbatch), (begin, end) in zip(order, moments, strict=True)
    ]


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
