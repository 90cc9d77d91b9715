"""When each action of a pipeline begins and ends, if stages take given times and messages given delays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from axon_nb.records.span import Span

__all__ = ["Action", "Order", "Times", "play_orders", "spans_of"]

Action = tuple[str, int, int]
"""F, B, I (backward for inputs) or W (for weights); stage; microbatch."""
Order = Sequence[Action]
"""What one rank computes, in this order."""
Times = list[tuple[float, float]]
"""Begin and end of each action of one rank, in seconds from the beginning of the step."""


def play_orders(
    orders: Sequence[Order],
    lengths: Mapping[str, Sequence[float]],
    *,
    num_stages: int,
    num_microbatches: int,
    latency_s: Sequence[float] | None = None,
) -> list[Times]:
    """The times of all actions. A rank takes its actions in order, each as soon as what it needs is there.

    Args:
        orders: Of each rank.
        lengths: By action: seconds of one microbatch, one number a stage; of those actions that are in the orders.
        num_stages: Of all ranks, numbered from 0.
        num_microbatches: Of a batch, numbered from 0.
        latency_s: Seconds from the end of a stage's forward to where the next stage has it, and as long back; one a
            boundary, so one less than there are stages. Counts between two ranks only; a sender does not wait. None: no
            message takes time.

    Returns:
        For each rank the times of its actions, in their order.

    Raises:
        ValueError: the orders wait for each other, or for what is in none of them.
    """
    count = num_microbatches
    owner = {stage: rank for rank, order in enumerate(orders) for _, stage, _ in order}
    delays = [0.0] * (num_stages + 1)  # of the boundary before each stage
    for stage, delay in enumerate(latency_s or (), start=1):
        delays[stage] = delay if owner.get(stage) != owner.get(stage - 1) else 0.0
    # When forwards have ended, then backwards, by stage and microbatch. Below 0: not yet.
    half = num_stages * count
    over = [-1.0] * (2 * half)
    # What waits for another stage: where that one's end is noted from here, over which boundary, where this one's is.
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
            if action != "F" and (over[key] < 0.0 or (action == "W" and over[key + half] < 0.0)):
                break  # a rank that goes back before it went forward waits for itself
            if action in others:
                step, boundary, first = others[action]
                key += first
                if stage != (num_stages - 1 if first else 0):
                    arrived = over[key + step]
                    if arrived < 0.0:
                        waiting[key + step] = rank
                        break
                    begin = max(begin, arrived + delays[stage + boundary])
            clock = begin + lengths[action][stage]
            done.append((begin, clock))
            if action in others:
                over[key] = clock
                if key in waiting:
                    ready.append(waiting.pop(key))
    if any(len(done) < len(order) for done, order in zip(times, orders, strict=True)):
        raise ValueError("the orders of a pipeline wait for each other, or for what is in none of them")
    return times


def spans_of(
    orders: Sequence[Order], times: Sequence[Sequence[tuple[float, float]]], *, ranks: Sequence[int] | None = None
) -> list[Span]:
    """Played actions as real steps record them: rank by rank, from 0 ns on.

    Args:
        orders: Of each rank.
        times: Begin and end of its actions, in seconds, as `play_orders` gives them.
        ranks: Whose orders they are; None: of the ranks from 0 on.
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
