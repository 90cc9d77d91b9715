"""Causal delays, after Coz (https://doi.org/10.1145/2815400.2815409): a part is not made faster, all else is slowed.

If a rank's run took `s` seconds less, the others would have to wait `s` less for it; so they sleep `s` before the next
collective. If a collective took `s` seconds less, all ranks sleep `s` while it moves its data. A step with delays, less
all that they add, is as long as one with the faster part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axon_nb.records.performance.replay import Item, Key, Recording, Run, Start

__all__ = ["StepDelays", "common_order", "step_delays"]

_SHORTEST_S = 1e-4
"""What a sleep is precise to; less per step cannot be imitated."""
_REGULAR = 0.75
"""Share of the steps that must make the same collectives: a few may log, or save."""


@dataclass(frozen=True, slots=True)
class StepDelays:
    """What ranks sleep in each step but the first of a cell, by the number of the collective in the step, from 0."""

    before: tuple[tuple[float, ...], ...] = ()
    """By rank and collective: seconds before it starts."""
    during: tuple[float, ...] = ()
    """By collective: seconds that all ranks sleep once they have started it."""
    added_s: float = 0.0
    """By how many seconds a step with the delays is longer than one with the faster part."""

    def __bool__(self) -> bool:
        return bool(self.during)


def step_delays(recording: Recording, changed: Recording) -> StepDelays | None:
    """Return the delays that make ranks run as if `changed` were true; None: no delays can.

    They can if steps make the same collectives in the same order on all ranks, and not all ranks are as much faster at
    the same time: then nothing is left to be slowed.

    Args:
        recording: The steps.
        changed: The same with shorter runs, or with shorter, fewer or moved collectives.
    """
    order, steps = _regular_steps(recording)
    if not order:
        return None
    during = _saved_in_calls(recording, changed, steps)
    runs = [_saved_in_runs(recording, changed, rank, steps) for rank in sorted(recording.items)]
    most = [max(own[number] for own in runs) for number in range(len(order))]
    before = tuple(tuple(high - low for high, low in zip(most, own, strict=True)) for own in runs)
    if sum(during) + max(map(sum, before)) < _SHORTEST_S:
        return None
    return StepDelays(before, during, sum(during) + sum(most))


def common_order(recording: Recording) -> tuple[str, ...]:
    """Return the names of a step's collectives in their order; empty if steps or ranks differ in more than a few."""
    return _regular_steps(recording)[0]


def _regular_steps(recording: Recording) -> tuple[tuple[str, ...], Mapping[int, Sequence[Key]]]:
    """Return the order that most steps have on all ranks, and the collectives of these steps."""
    by_rank = [_keys_by_step(recording, items) for items in recording.items.values()]
    steps = {
        step: keys
        for step, keys in by_rank[0].items()
        if keys and all(other.get(step) == keys for other in by_rank[1:])
    }
    orders = {step: tuple(recording.calls[key].name for key in keys) for step, keys in steps.items()}
    ((order, count),) = Counter(orders.values()).most_common(1) or (((), 0),)
    if count < _REGULAR * recording.num_steps:
        return (), {}
    return order, {step: keys for step, keys in steps.items() if orders[step] == order}


def _keys_by_step(recording: Recording, items: Sequence[Item]) -> dict[int, list[Key]]:
    found: dict[int, list[Key]] = {}
    for item in items:
        if isinstance(item, Start):
            found.setdefault(recording.calls[item.key].step, []).append(item.key)
    return found


def _saved_in_runs(
    recording: Recording, changed: Recording, rank: int, steps: Mapping[int, Sequence[Key]]
) -> list[float]:
    """Return the mean seconds that a rank saves before each collective; after the last one, before the next first."""
    count = len(next(iter(steps.values())))
    saved, numbers = [0.0] * count, dict.fromkeys(steps, 0)
    items, others = recording.items[rank], changed.items[rank]
    if len(items) != len(others):  # its collectives are moved, and its runs cut
        return saved
    for item, other in zip(items, others, strict=True):
        if isinstance(item, Start):
            numbers[recording.calls[item.key].step] = numbers.get(recording.calls[item.key].step, 0) + 1
        elif isinstance(item, Run) and isinstance(other, Run) and item.step in steps:
            saved[numbers[item.step] % count] += (item.seconds - other.seconds) / len(steps)
    return saved


def _saved_in_calls(recording: Recording, changed: Recording, steps: Mapping[int, Sequence[Key]]) -> tuple[float, ...]:
    """Return the mean seconds that each collective of a step saves.

    What is saved is spread over the collectives that change, by their length. If some are moved, it is what the replay
    of the whole says.
    """
    lengths = {key: call.longest_s if changed.calls.get(key) != call else 0.0 for key, call in recording.calls.items()}
    whole = sum(lengths.values())
    if not whole:
        return (0.0,) * len(next(iter(steps.values())))
    kept = {key: changed.calls[key] for key, length in lengths.items() if length and key in changed.calls}
    if any(call.within != recording.calls[key].within for key, call in kept.items()):
        total = (recording.replay() - changed.replay()) * recording.num_steps
    else:
        total = whole - sum(call.longest_s for call in kept.values())
    share = min(1.0, max(0.0, total / whole))
    return tuple(share * sum(lengths[key] for key in keys) / len(steps) for keys in zip(*steps.values(), strict=True))
