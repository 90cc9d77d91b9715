"""Start and end of each action of a pipeline, simulated from given stage times and message delays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from axon_nb.records.span import Span

__all__ = ["Action", "Order", "Times", "simulate_orders", "spans_from_times"]

Action = tuple[str, int, int]
"""F, B, I (input backward) or W (weight backward); stage; microbatch."""
Order = Sequence[Action]
"""The actions of one rank, in order."""
Times = list[tuple[float, float]]
"""Start and end of each action of one rank, in seconds from the start of the step."""


def simulate_orders(
    orders: Sequence[Order],
    lengths: Mapping[str, Sequence[float]],
    *,
    num_stages: int,
    num_microbatches: int,
    latency_s: Sequence[float] | None = None,
) -> list[Times]:
    """Compute the times of all actions: each rank runs its actions in order, each as soon as its inputs are there.

    Args:
        orders: Action order of each rank.
        lengths: Seconds per microbatch of each stage, by action; needed for the actions in `orders`.
        num_stages: Number of stages over all ranks.
        num_microbatches: Number of microbatches per batch.
        latency_s: Seconds that a message between adjacent stages takes, in either direction: one number per boundary,
            so one fewer than stages. Applies between different ranks only; senders do not wait. None for no delay.

    Returns:
        For each rank the times of its actions, in order.

    Raises:
        ValueError: the orders deadlock, or depend on an action that is in none of them.
    """
    count = num_microbatches
    owner = {stage: rank for rank, order in enumerate(orders) for _, stage, _ in order}
    delays = [0.0] * (num_stages + 1)  # at the boundary before each stage
    for stage, delay in enumerate(latency_s or (), start=1):
        delays[stage] = delay if owner.get(stage) != owner.get(stage - 1) else 0.0
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
                    begin = max(begin, arrived + delays[stage + boundary])
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
