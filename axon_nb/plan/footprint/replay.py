"""Replays a storage log: what is held when, and for what purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from axon_nb.plan.footprint.parts import MemoryParts
from axon_nb.plan.footprint.storage_log import Change

Key = tuple[str, str, int]
"""A section of a step: its phase, and where in the model."""
_FORWARD_AND_BACKWARD = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Moment:
    """What is held at one moment."""

    parts: MemoryParts
    phase: str = ""
    module: str = ""
    activations: Mapping[str, int] = field(default_factory=dict)
    """By the module whose forward made them."""


@dataclass(frozen=True)
class StepLog:
    """The log of one step.

    Args:
        start: Bytes of the storages at the start of the step.
        changes: Changes in time order.
        roles: Roles of storages, as far as known.
        makers: Phase and module in which each storage was made.
        offloaded: Roles that are kept in host memory.
        own_memory: Whether the device has memory of its own, so that host memory does not count.
    """

    start: Mapping[int, int]
    changes: tuple[Change, ...]
    roles: Mapping[int, str]
    makers: Mapping[int, tuple[str, str]]
    offloaded: Collection[str]
    own_memory: bool

    def part_of(self, block: int) -> str | None:
        """The part that a storage counts for; None: it is on the host."""
        role = self.roles.get(block)
        phase = self.makers[block][0]
        if self.own_memory and (
            role in self.offloaded or (role is None and phase == "optimizer" and self._steps_on_host)
        ):
            return None
        return role or ("activations" if phase in _FORWARD_AND_BACKWARD else "other")

    @property
    def _steps_on_host(self) -> bool:
        """Whether the optimizer's step runs on the host."""
        return "gradients" in self.offloaded

    def peaks(self, key: Callable[[str, str], Key]) -> dict[Key, Moment]:
        """Return the highest moment of each section of the step."""
        best: dict[Key, tuple[int, int]] = {}
        total = sum(size for block, size in self.start.items() if self.part_of(block))
        for number, change in enumerate(self.changes):
            if self.part_of(change.block):
                total += change.size
            name = key(change.phase, change.module)
            if name not in best or total > best[name][0]:
                best[name] = total, number
        moments = self._at({number for _, number in best.values()})
        return {name: moments[number] for name, (_, number) in best.items()}

    def between_steps(self) -> Moment:
        """Return what is held after the optimizer's step."""
        last = len(self.changes) - 1
        return self._at({last})[last]

    def bytes_of(self, role: str) -> int:
        """Return the bytes of a role after the optimizer's step, on the device or the host."""
        sizes = Counter(self.start)
        for change in self.changes:
            sizes[change.block] += change.size
        return sum(size for block, size in sizes.items() if self.roles.get(block) == role)

    def _at(self, numbers: Iterable[int]) -> dict[int, Moment]:
        wanted, moments = set(numbers), {}
        held = Counter(self.start)
        for number, change in enumerate(self.changes):
            held[change.block] += change.size
            if number in wanted:
                moments[number] = self._moment(held, change)
        return moments

    def _moment(self, held: Mapping[int, int], change: Change) -> Moment:
        parts: Counter[str] = Counter()
        activations: Counter[str] = Counter()
        for block, size in held.items():
            if not size or (part := self.part_of(block)) is None:
                continue
            parts[part] += size
            if part == "activations" and self.makers[block][0] == "forward":
                activations[self.makers[block][1]] += size
        return Moment(MemoryParts(**parts), change.phase, change.module, dict(activations))
