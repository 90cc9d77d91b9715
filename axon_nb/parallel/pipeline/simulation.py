"""When each action of a schedule begins and ends, if stages take given times and messages given delays."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Order", "Times", "simulate"]

Order = Sequence[tuple[str, int, int]]
"""What one rank computes: (F, B, I or W; stage; microbatch), as `torch_hooks.actions` gives it."""
Times = list[tuple[float, float]]
"""Begin and end of each action of one rank, in seconds from the beginning of the step."""


def simulate(
    orders: Sequence[Order],
    *,
    num_microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_s: Sequence[float],
    latency_s: Sequence[float],
) -> list[Times]:
    """The times of all actions. A rank takes its actions in order, each as soon as what it needs is there.

    Args:
        orders: Of each rank.
        num_microbatches: Of a batch.
        forward_s: Seconds of a forward of one microbatch, one a stage.
        backward_s: Seconds of a whole backward.
        weight_s: Of these, the part for weights, where a schedule puts that off.
        latency_s: Seconds from the end of a stage's forward to where the next stage has it, and as long back; one a
            boundary, so one less than there are stages. Counts between two ranks only; a sender does not wait.

    Returns:
        For each rank the times of its actions, in their order.
    """
    num_stages, count = len(forward_s), num_microbatches
    owner = {stage: rank for rank, order in enumerate(orders) for _, stage, _ in order}
    delays = [latency_s[s] if owner[s] != owner[s + 1] else 0.0 for s in range(num_stages - 1)]
    input_s = [whole - part for whole, part in zip(backward_s, weight_s, strict=True)]
    # When what an action needs is there: forwards first, then backwards; by stage and microbatch. Below 0: not yet.
    half = num_stages * count
    there = [-1.0] * (2 * half)
    waiting: dict[int, int] = {}
    times: list[Times] = [[] for _ in orders]
    ready = list(range(len(orders)))[::-1]
    while ready:
        rank = ready.pop()
        done = times[rank]
        clock = done[-1][1] if done else 0.0
        for action, stage, microbatch in orders[rank][len(done) :]:
            key = stage * count + microbatch
            begin = clock
            if action == "W":
                clock = begin + weight_s[stage]
                done.append((begin, clock))
                continue
            forward = action == "F"
            if forward:
                needed = key - count if stage else -1
                delay = delays[stage - 1] if stage else 0.0
            else:
                needed = half + key + count if stage < num_stages - 1 else -1
                delay = delays[stage] if needed >= 0 else 0.0
            if needed >= 0:
                arrived = there[needed]
                if arrived < 0.0:
                    waiting[needed] = rank
                    break
                begin = max(begin, arrived + delay)
            if forward:
                clock = begin + forward_s[stage]
            else:
                clock = begin + (backward_s[stage] if action == "B" else input_s[stage])
                key += half
            done.append((begin, clock))
            there[key] = clock
            if key in waiting:
                ready.append(waiting.pop(key))
    assert all(len(done) == len(order) for done, order in zip(times, orders, strict=True)), "the order waits for itself"
    return times
