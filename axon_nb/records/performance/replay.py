"""Replays recorded training steps: what each rank runs, which calls it waits for, and how long each moves data.

A rank's own time stays as measured, in its order. A collective ends when the last of its ranks has started it, the one
before it in the group has ended, and its data has moved. So a change of one part shows what it does to all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

Key = tuple[str, int]
"""A collective: its group, and its number in the group."""


@dataclass(frozen=True, slots=True)
class Run:
    """The rank computes."""

    label: str
    """``forward``, ``backward``, ``optimizer``, ``data``, ``gc``, ``own code``, or ``message``: a send or receive."""
    seconds: float
    step: int
    """Which of the recorded steps, from 0."""


@dataclass(frozen=True, slots=True)
class Start:
    """The rank starts a collective."""

    key: Key


@dataclass(frozen=True, slots=True)
class Wait:
    """The rank waits for collectives."""

    keys: tuple[Key, ...]


Item = Run | Start | Wait


@dataclass(frozen=True, slots=True)
class Call:
    """A collective."""

    name: str
    num_bytes: int
    seconds: Mapping[int, float]
    """By rank: how long it takes once all ranks have started it and the one before it has ended."""
    step: int
    within: str
    """What its ranks were doing: ``backward``, ``forward`` or another label of `Run`."""
    part: int = 0
    """Which of the step's backwards it belongs to, counted from 0."""
    parts: int = 1
    """Number of the step's backwards with collectives."""

    @property
    def longest_s(self) -> float:
        """How long it takes on its slowest rank, in seconds."""
        return max(self.seconds.values())


@dataclass(frozen=True, slots=True)
class Recording:
    """Some steps of all ranks."""

    items: Mapping[int, Sequence[Item]]
    """What each rank does, in order."""
    calls: Mapping[Key, Call]
    begins: Mapping[int, float]
    """When each rank begins, in seconds from the first."""
    num_steps: int
    measured_s: float
    """Mean length of a step as it was measured."""
    fixed_s: float | None = None
    """How long an all_reduce or barrier with hardly any data takes, in seconds; None: there was none."""

    def replay(self) -> float:
        """Return the mean length of a step in seconds."""
        clocks, places = dict(self.begins), dict.fromkeys(self.items, 0)
        started: dict[Key, dict[int, float]] = {}
        ends: dict[Key, dict[int, float]] = {}
        free: dict[str, float] = {}
        moved = True
        while moved:
            moved = False
            for rank, items in self.items.items():
                while places[rank] < len(items):
                    item = items[places[rank]]
                    if isinstance(item, Run):
                        clocks[rank] += item.seconds
                    elif isinstance(item, Start):
                        if (call := self.calls.get(item.key)) is not None:
                            arrivals = started.setdefault(item.key, {})
                            arrivals[rank] = clocks[rank]
                            if len(arrivals) == len(call.seconds):
                                group = item.key[0]
                                begin = max(*arrivals.values(), free.get(group, 0.0))
                                ends[item.key] = {one: begin + seconds for one, seconds in call.seconds.items()}
                                free[group] = max(ends[item.key].values())
                    else:
                        keys = [key for key in item.keys if key in self.calls]
                        if not all(key in ends for key in keys):
                            break
                        clocks[rank] = max([clocks[rank], *(ends[key][rank] for key in keys)])
                    places[rank] += 1
                    moved = True
        lengths = [clocks[rank] - self.begins[rank] for rank in self.items]
        return sum(lengths) / len(lengths) / self.num_steps

    def with_runs(self, change: Callable[[int, Run], float]) -> Recording:
        """Return the same with other lengths of runs; `change` gets a rank and its run, and returns seconds."""
        return replace(
            self,
            items={
                rank: [replace(item, seconds=change(rank, item)) if isinstance(item, Run) else item for item in items]
                for rank, items in self.items.items()
            },
        )

    def with_calls(self, change: Callable[[Key, Call], float | None]) -> Recording:
        """Return the same with other transfers: `change` returns the factor of their time; None: there is no call."""
        factors = {key: change(key, call) for key, call in self.calls.items()}
        calls = {
            key: replace(self.calls[key], seconds={rank: s * factor for rank, s in self.calls[key].seconds.items()})
            for key, factor in factors.items()
            if factor is not None
        }
        return replace(self, calls=calls)

    def totals(self) -> dict[int, dict[str, float]]:
        """Return the seconds per step that each rank runs, by label."""
        sums: dict[int, dict[str, float]] = {}
        for rank, items in self.items.items():
            own = sums.setdefault(rank, {})
            for item in items:
                if isinstance(item, Run):
                    own[item.label] = own.get(item.label, 0.0) + item.seconds / self.num_steps
        return sums
