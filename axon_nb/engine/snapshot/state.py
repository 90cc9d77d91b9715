"""Finds the state of a session: everything that a cell can change through the names of the namespace.

That is a walk over the objects to which the names refer, directly or through others: containers, attributes, closures,
tensors and generators. Models, optimizers, schedulers, scalers, samplers and loaders are such objects; so are the
shards of FSDP2 and ZeRO. What belongs to the machinery underneath (process groups, meshes, modules, threads) is left
out.
"""

from __future__ import annotations

import builtins
import itertools
import re
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from axon_nb.engine.frames import gc_paused
from axon_nb.engine.snapshot.components import (
    STRUCTURE_COST,
    Components,
    LeftOut,
    bytes_of_state,
    is_shared_by_libraries,
)
from axon_nb.engine.snapshot.containers import Kind
from axon_nb.engine.snapshot.kinds import kinds_and_obstacle
from axon_nb.engine.snapshot.memory import StorageFacts
from axon_nb.engine.snapshot.tensors import ArrayState, TensorState, plain
from axon_nb.records.units import format_bytes

__all__ = ["State", "StateFinder", "is_bound_by_user"]

_Learned = weakref.WeakKeyDictionary[type, tuple[tuple[Kind, ...], str]]
"""What is known of types: the kinds of their objects' state, and what these are if they cannot be restored."""

_OF_IPYTHON = re.compile(r"_+|_\d+|_i+|_i\d+|_[dio]h|__\w+__|In|Out|exit|quit|get_ipython|open")


def is_bound_by_user(name: str) -> bool:
    """Whether cells bind this name, rather than IPython."""
    return not _OF_IPYTHON.fullmatch(name)


@dataclass(slots=True)
class State:
    """The state of a session, without the content of its storages."""

    names: dict[str, Any] = field(default_factory=dict)
    nodes: list[tuple[Kind, Any, Any]] = field(default_factory=list)
    """Each kind of state of each object, and the state."""
    storages: dict[tuple[str, int, int], StorageFacts] = field(default_factory=dict)
    """By their keys: views share one."""
    empty: list[StorageFacts] = field(default_factory=list)
    """Storages without memory, such as gathered parameters that FSDP2 has freed."""
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    obstacles: dict[str, str] = field(default_factory=dict)
    """By variable, what it is or contains that cannot be restored."""
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    """By name, the variables that do not fit into the limit."""
    not_held: set[str] = field(default_factory=set)
    """Names of what cannot be restored: held, an open file would stay open when a cell deletes it."""
    too_large: set[int] = field(default_factory=set)
    """Identities of the values that do not fit: those of variables, and those that only snapshots keep alive."""
    structure: int = 0
    """Bytes, about, that the rest takes; 0 if no limit was set."""

    @property
    def size(self) -> int:
        """Bytes of the storages."""
        return sum(facts.size for facts in self.storages.values())

    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor that has a gradient, and that."""
        for _, tensor, saved in self.nodes:
            if type(saved) is TensorState and saved.is_leaf and saved.grad is not None:
                yield tensor, saved.grad


class StateFinder:
    """Finds the state of everything that a namespace refers to.

    Args:
        namespace: Variables by name; names of IPython are left out.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._learned: _Learned = weakref.WeakKeyDictionary()
        self._unvisited: dict[str, LeftOut] = {}
        """By name, the variables with too many objects for a walk before each cell."""

    def find(self) -> State:
        """Find what it is now."""
        with gc_paused(on_main=True), plain():
            walk = _Walk(self._namespace, self._learned)
            walk.visit_all()
            return walk.state

    def find_within(self, limit: int, held: Iterable[Any] = ()) -> State:
        """Find what fits into a limit; variables that share state are in together, or left out together.

        Args:
            limit: Bytes. Those of the structure count more, as it takes more time to find them.
            held: Values that only earlier snapshots keep alive; they count as well.
        """
        with gc_paused(on_main=True), plain():
            walk = _Walk(self._namespace, self._learned, limit)
            why = f"needs more than {format_bytes(limit)} of `undo_memory`"
            before, self._unvisited = self._unvisited, {}
            for name, value in walk.state.names.items():
                if (known := before.get(name)) is not None and known.identity == id(value):
                    self._unvisited[name] = known.now(value)
                elif walk.has_state(value) and (tensors := walk.visit(name, value)) is not None:
                    self._unvisited[name] = LeftOut.of(why, value, tensors)
            for value in filter(walk.has_state, held):
                walk.visit("", value)
            return walk.leave_out(self._unvisited)


class _Variable(NamedTuple):
    name: str
    """Empty if only snapshots refer to the value."""
    value: Any
    nodes: slice
    """Which of the walk's nodes were found through it first."""
    empty: slice
    optimizers: slice

    def tensors(self, nodes: list[tuple[Kind, Any, Any]]) -> list[torch.Tensor]:
        """Return its tensors among the walk's nodes."""
        return [item for _, item, saved in nodes[self.nodes] if type(saved) is TensorState]


class _Walk:
    """Visits all that variables refer to, one variable after the other.

    Args:
        namespace: Variables by name.
        learned: What is known of types.
        limit: Bytes that the state may take; 0: there is no limit.
    """

    def __init__(self, namespace: Mapping[str, Any], learned: _Learned, limit: int = 0) -> None:
        names = {name: value for name, value in list(namespace.items()) if is_bound_by_user(name)}
        self.state = State(names)
        self._limit = limit
        self._learned = learned
        self._kinds: dict[type, tuple[Kind, ...]] = {}
        self._obstacles: dict[type, str] = {}
        self._owners: dict[int, int | None] = {id(namespace): None, id(vars(builtins)): None}
        """By identity of an object, the number of the variable through which it was found first."""
        self._storage_owners: dict[tuple[str, int, int], int] = {}
        self._variables: list[_Variable] = []
        self._components = Components()

    def visit_all(self) -> None:
        """Visit all variables, without a limit."""
        number = self._components.add()
        for name, value in self.state.names.items():
            self._visit(name, value, number)

    def visit(self, name: str, value: Any) -> list[torch.Tensor] | None:
        """Visit a variable; if it has too many objects, the rest is not visited, and its tensors are returned."""
        begin = self._counts()
        is_complete = self._visit(name, value, self._components.add())
        variable = _Variable(name, value, *map(slice, begin, self._counts()))
        self._variables.append(variable)
        return None if is_complete else variable.tensors(self.state.nodes)

    def has_state(self, value: Any) -> bool:
        """Whether there is anything to visit; functions and classes of libraries are not worth the time."""
        kind = type(value)
        if isinstance(value, type | types.FunctionType) and value.__module__ != "__main__":
            return False
        return bool(self._kinds.get(kind) or self._learn(kind) or self._obstacles[kind])

    def _counts(self) -> tuple[int, int, int]:
        return len(self.state.nodes), len(self.state.empty), len(self.state.optimizers)

    def _visit(self, name: str, value: Any, number: int) -> bool:
        known, owners, size = self._kinds, self._owners, 0
        largest = self._limit // STRUCTURE_COST
        todo: list[Iterator[Any]] = [iter((value,))]
        while todo and size <= largest:
            for item in todo[-1]:
                kind = type(item)
                if (kinds := known.get(kind)) is None:
                    kinds = self._learn(kind)
                if not kinds and not self._obstacles[kind]:
                    continue
                if id(item) in owners:
                    if largest:
                        self._meet(item, number)
                    continue
                owners[id(item)] = number
                children, added = self._save(name, item, kinds, number)
                size += added
                if children or size > largest:
                    todo.append(itertools.chain(*children))
                    break
            else:
                todo.pop()
        self._components.spend(number, 0, size)
        return not todo

    def _save(self, name: str, item: Any, kinds: tuple[Kind, ...], number: int) -> tuple[list[Iterable[Any]], int]:
        """Add the states of one object; return what it refers to, and the bytes that the states take."""
        state, kind, children, size = self.state, type(item), list[Iterable[Any]](), 0
        if what := self._obstacles[kind]:
            state.obstacles.setdefault(name, what)
        for one in kinds:
            try:
                saved = one.save(item)
                size += bytes_of_state(item, saved) if self._limit else 0
            except Exception as error:  # an odd object of the user must not prevent the snapshot
                state.obstacles.setdefault(name, f"a {kind.__name__} ({type(error).__name__})")
                continue
            state.nodes.append((one, item, saved))
            if type(saved) in (TensorState, ArrayState):
                self._add_storage(name, saved, number)
            elif issubclass(kind, torch.optim.Optimizer):
                state.optimizers.append(item)
            children.append(one.children(item, saved))
        return children, size

    def _meet(self, item: Any, number: int) -> None:
        """Join the variables that share this object, or what it refers to if it has no state itself."""
        owner, kinds = self._owners[id(item)], self._kinds[type(item)]
        if owner == number or owner is None:
            return
        if not is_shared_by_libraries(item, kinds):
            self._components.join(owner, number)
        elif isinstance(item, tuple | frozenset):
            for child in item:
                if id(child) in self._owners:
                    self._meet(child, number)

    def leave_out(self, unvisited: Mapping[str, LeftOut]) -> State:
        """Leave the variables out whose components do not fit into the limit, and those that were not visited."""
        state, nodes, above = self.state, self.state.nodes, self._components.above(self._limit)
        left_out, kept = dict(unvisited), dict[int, _Variable]()
        for number, variable in enumerate(self._variables):
            cost = above.get(self._components.component(number))
            if cost is not None:
                state.too_large.add(id(variable.value))
            if variable.name and variable.name not in left_out:
                if cost is None:
                    kept[number] = variable
                else:
                    why = f"needs {format_bytes(cost)} of `undo_memory`"
                    left_out[variable.name] = LeftOut.of(why, variable.value, variable.tensors(nodes))
        fits = kept.values()
        state.nodes = [node for variable in fits for node in nodes[variable.nodes]]
        state.empty = [facts for variable in fits for facts in state.empty[variable.empty]]
        state.optimizers = [one for variable in fits for one in state.optimizers[variable.optimizers]]
        state.storages = {key: facts for key, facts in state.storages.items() if self._storage_owners[key] in kept}
        state.not_held = {name for name, value in state.names.items() if self._obstacles.get(type(value))}
        state.obstacles.pop("", None)
        for name in left_out.keys() | state.not_held:
            del state.names[name]
        state.obstacles |= {name: one.why for name, one in left_out.items()}
        state.left_out = left_out
        state.too_large.update(one.identity for one in unvisited.values())
        state.structure = self._components.structure(kept)
        return state

    def _learn(self, kind: type) -> tuple[Kind, ...]:
        if kind not in self._learned:
            self._learned[kind] = kinds_and_obstacle(kind)
        self._kinds[kind], self._obstacles[kind] = self._learned[kind]
        return self._kinds[kind]

    def _add_storage(self, name: str, saved: TensorState | ArrayState, number: int) -> None:
        if isinstance(saved, ArrayState):
            storage = saved.memory.untyped_storage() if saved.memory is not None else None
            size, version = (storage.nbytes() if storage is not None else 0), None
        else:
            storage, size, version = saved.storage, saved.size, saved.version
            if saved.obstacle:
                self.state.obstacles.setdefault(name, saved.obstacle)
        if storage is None or storage.device.type == "meta":
            return
        facts = StorageFacts(storage, size, set())
        if not size:
            self.state.empty.append(facts)
            return
        key = facts.key
        if (owner := self._storage_owners.setdefault(key, number)) != number:
            self._components.join(owner, number)
        elif key not in self.state.storages:
            self._components.spend(number, size, 0)
        facts = self.state.storages.setdefault(key, facts)
        if version is not None:
            facts.versions.add(version)
