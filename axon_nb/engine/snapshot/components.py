"""Which variables share state, and which of them fit into a limit of memory.

Variables that share an object or a storage form a *component*: a model and its optimizer. A component is in a snapshot
as a whole or not at all, so that what is restored is one state, and not half of it.
"""

from __future__ import annotations

import enum
import itertools
import sys
import types
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from axon_nb.engine.snapshot.containers import Kind, nothing
from axon_nb.engine.snapshot.tensors import plain, tensor_kind

STRUCTURE_COST = 32
"""A byte of structure counts as much as so many of a storage, as finding it takes at least 32 times as long."""
_NODE_BYTES = 120
"""Of a tuple that holds kind, object and state, and of what finds it again."""


def bytes_of_state(value: Any, saved: Any) -> int:
    """Return what the state of one object takes in a snapshot, about, besides the content of its storage."""
    if type(saved) is tuple and saved and isinstance(saved[-1], dict):
        saved = saved[-1]  # attributes
    elif type(saved) is tuple and saved and isinstance(saved[0], bytes | str):
        saved = saved[0]  # a stream
    items = 8 * len(value) if saved is None and isinstance(value, tuple | frozenset) else sys.getsizeof(saved)
    return _NODE_BYTES + items


def is_shared_by_libraries(value: Any, kinds: Sequence[Kind]) -> bool:
    """Whether variables that both refer to this object may still have nothing to do with each other."""
    if isinstance(value, type | types.FunctionType):
        return value.__module__ != "__main__"
    return isinstance(value, enum.Enum) or all(kind.save is nothing for kind in kinds)


class Components:
    """Joins variables, by their numbers, that share state."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._storages: list[int] = []
        self._structures: list[int] = []

    def add(self) -> int:
        """Add a variable; return its number."""
        self._parents.append(len(self._parents))
        self._storages.append(0)
        self._structures.append(0)
        return len(self._parents) - 1

    def spend(self, variable: int, storage: int, structure: int) -> None:
        """Add bytes to a variable."""
        self._storages[variable] += storage
        self._structures[variable] += structure

    def structure(self, variables: Iterable[int]) -> int:
        """Return the bytes of these variables that are not those of storages."""
        return sum(self._structures[variable] for variable in variables)

    def join(self, one: int, other: int) -> None:
        """Note that two variables share state."""
        self._parents[self.component(one)] = self.component(other)

    def component(self, variable: int) -> int:
        """Return the number that stands for the component of a variable."""
        while (parent := self._parents[variable]) != variable:
            variable = self._parents[variable] = self._parents[parent]
        return variable

    def above(self, limit: int) -> dict[int, int]:
        """Return the components that do not fit into a limit, the cheapest filled in first, and what they cost."""
        costs: dict[int, int] = {}
        for variable, (storage, structure) in enumerate(zip(self._storages, self._structures, strict=True)):
            component = self.component(variable)
            costs[component] = costs.get(component, 0) + storage + STRUCTURE_COST * structure
        cheapest = sorted(costs.items(), key=lambda one: one[1])
        totals = itertools.accumulate(cost for _, cost in cheapest)
        return {component: cost for (component, cost), total in zip(cheapest, totals, strict=True) if total > limit}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A variable whose component does not fit: what can be known of it without keeping it alive."""

    why: str
    """Reads after its name, in brackets."""
    identity: int
    """Of its value."""
    tensors: tuple[tuple[weakref.ref[torch.Tensor], int | None, int], ...]
    """Tensors, their version counters, and the identities of their gradients."""

    @classmethod
    def of(cls, why: str, value: Any, tensors: Iterable[torch.Tensor]) -> LeftOut:
        """Note what these tensors of a variable are now."""
        return cls(why, id(value), tuple((weakref.ref(tensor), *_facts(tensor)) for tensor in tensors))

    def now(self, value: Any) -> LeftOut:
        """Note what its tensors are now; those that were added since are not known."""
        return self.of(self.why, value, [tensor for ref, *_ in self.tensors if (tensor := ref()) is not None])

    def has_changed(self, name: str, namespace: Mapping[str, Any]) -> bool:
        """Whether the variable or one of its tensors is known to be another one, or to have other content."""
        if id(namespace.get(name)) != self.identity:
            return True
        with plain():
            return any((tensor := ref()) is None or (*_facts(tensor),) != (*before,) for ref, *before in self.tensors)


def _facts(tensor: torch.Tensor) -> tuple[int | None, int]:
    saved = tensor_kind.save(tensor)
    return saved.version, id(saved.grad)
