"""One snapshot of a session, and how the session becomes what it was."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from axon_nb.engine.frames import gc_paused
from axon_nb.engine.snapshot.kinds import NotRestorableError, describe_type
from axon_nb.engine.snapshot.memory import Allocator, Copy, StorageFacts, storage_key, write_back
from axon_nb.engine.snapshot.state import State, is_bound_by_user
from axon_nb.engine.snapshot.tensors import ArrayState, TensorState, plain, set_gradient
from axon_nb.random_states import random_states, set_random_states


class StepCounts(Protocol):
    """The number of steps that each optimizer has made, which messages after a failed cell compare between ranks."""

    def of(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of steps of this optimizer."""

    def set(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        """Set it."""


@dataclass(slots=True)
class Snapshot:
    """The state of a session at one time; `save` completes it, and `release` must be called in the end."""

    state: State
    steps: list[int] = field(default_factory=list)
    random: dict[str, Any] = field(default_factory=dict)
    """The states of the shared generators."""

    @property
    def facts(self) -> list[StorageFacts]:
        """The storages with content."""
        return list(self.state.storages.values())

    def changed_since(self, earlier: Snapshot | None) -> list[StorageFacts]:
        """Share what is still equal with an earlier snapshot; return the storages that must be copied."""
        changed = []
        for key, facts in self.state.storages.items():
            before = earlier.state.storages.get(key) if earlier is not None else None
            if before is not None and before.copy is not None and facts.is_unchanged(before.copy):
                facts.copy = before.copy
                facts.copy.users += 1
            else:
                changed.append(facts)
        return changed

    def save(self, changed: list[StorageFacts], allocator: Allocator, counts: StepCounts) -> None:
        """Copy these storages, and note the rest."""
        for facts in changed:
            facts.save(allocator)
        if torch.cuda.is_initialized() and any(facts.storage.device.type == "cuda" for facts in changed):
            torch.cuda.synchronize()
        self.steps = [counts.of(optimizer) for optimizer in self.state.optimizers]
        self.random = random_states()

    def copy_of(self, storage: torch.UntypedStorage, allocator: Allocator) -> Copy:
        """Return the copy of a storage; one that the walk has not found, such as that of a temporary, is added."""
        facts = StorageFacts(storage, storage.nbytes(), set())
        facts = self.state.storages.setdefault(facts.key, facts)
        return facts.copy or facts.save(allocator)

    def release(self, allocator: Allocator) -> None:
        """Give the memory back, except what other snapshots share."""
        for facts in self.facts:
            copy, facts.copy = facts.copy, None
            if copy is not None:
                copy.users -= 1
                if not copy.users:
                    allocator.release(copy.buffer)

    def restore(self, namespace: MutableMapping[str, Any], counts: StepCounts) -> list[str]:
        """Make the session what it was, in place.

        Args:
            namespace: The variables; names of IPython are left alone.
            counts: The steps of optimizers.

        Returns:
            A line for each object that refused its state.
        """
        refused = []
        moved: set[tuple[str, int, int]] = set()
        """Memory of arrays that NumPy has replaced: nothing must be written there."""
        with gc_paused(on_main=True), plain(), torch.no_grad():
            nodes = self.state.nodes
            todo = [(index, kind.restore, value, saved) for index, (kind, value, saved) in enumerate(nodes)]
            todo += [
                (index, set_gradient, value, saved) for index, _, value, saved in todo if type(saved) is TensorState
            ]
            for index, restore, value, saved in todo:
                try:
                    restore(value, saved)
                except Exception as error:
                    why = str(error) if isinstance(error, NotRestorableError) else f"{type(error).__name__}: {error}"
                    refused.append(f"`{self.state.name_of(index)}` ({describe_type(type(value))}: {why})")
                    if isinstance(saved, ArrayState) and saved.memory is not None and saved.has_moved(value):
                        moved.add(storage_key(saved.memory.untyped_storage()))
            refused += write_back(facts for facts in [*self.state.empty, *self.facts] if facts.key not in moved)
        known = self.state.names.keys() | self.state.left_out.keys() | self.state.not_held
        for name in [name for name in namespace if is_bound_by_user(name) and name not in known]:
            del namespace[name]
        namespace.update(self.state.names)
        for optimizer, steps in zip(self.state.optimizers, self.steps, strict=True):
            counts.set(optimizer, steps)
        set_random_states(self.random)
        return refused
