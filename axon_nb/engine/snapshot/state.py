"""Finds the state of a session: everything that a cell can change through the names of the namespace.

That is a walk over the objects to which the names refer, directly or through others: containers, attributes, closures,
tensors and generators. Models, optimizers, schedulers, scalers, samplers and loaders are such objects; so are the
shards of FSDP2 and ZeRO. What belongs to the machinery underneath (process groups, meshes, modules, threads) is left
out.

Variables that share an object or a storage form a *component*: a model and its optimizer. A component is in a snapshot
as a whole or not at all, so that what is restored is one state, and not half of it.
"""

from __future__ import annotations

import builtins
import enum
import functools
import itertools
import re
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct, field
from msgspec.structs import replace

from axon_nb.engine.frames import gc_paused
from axon_nb.engine.snapshot import data_kinds
from axon_nb.engine.snapshot.kinds import NotRestorableError, describe_obstacle, describe_type, kinds_and_obstacle
from axon_nb.engine.snapshot.memory import StorageFacts
from axon_nb.records.units import format_bytes

STRUCTURE_COST = 32
"""A byte of structure counts as much as so many of a storage, as finding it takes at least 32 times as long."""
_NO_LIMIT = sys.maxsize
_NODE_BYTES = 120
"""Of a tuple that holds kind, object and state, and of what finds it again."""
_Learned = weakref.WeakKeyDictionary[type, tuple[tuple[data_kinds.Kind, ...], str]]
"""What is known of types: the kinds of their objects' state, and what these are if they cannot be restored."""
_OF_CALLS = r"_[0-9a-f]{16,}_\d+_\d+_(?:f|args|kwargs|result)"
"""Names of ipyparallel, for the call that runs: it removes them, and version 8 fails if they are gone."""
_OF_IPYTHON = re.compile(rf"_+|_\d+|_i+|_i\d+|_[dio]h|__\w+__|In|Out|exit|quit|get_ipython|open|{_OF_CALLS}")
_NAMED_ONCE = (type, types.FunctionType, enum.Enum)
"""What libraries share between variables that have nothing to do with each other, though it has a state."""
_WITH_STORAGE = (data_kinds.TensorState, data_kinds.ArrayState)
_Numbered = tuple[int, str, Any]
"""Number, name and value of a variable."""


def bytes_of_state(value: Any, saved: Any) -> int:
    """Return what the state of one object takes in a snapshot, about, besides the content of its storage."""
    if type(saved) is tuple and saved and isinstance(saved[-1], dict):
        saved = saved[-1]  # attributes
    elif type(saved) is tuple and saved and isinstance(saved[0], bytes | str):
        saved = saved[0]  # a stream
    items = 8 * len(value) if saved is None and isinstance(value, tuple | frozenset) else sys.getsizeof(saved)
    return _NODE_BYTES + items


def is_shared_by_libraries(value: Any, kinds: Sequence[data_kinds.Kind]) -> bool:
    """Whether variables that both refer to this object may still have nothing to do with each other."""
    if isinstance(value, type | types.FunctionType):
        return value.__module__ != "__main__"
    return isinstance(value, enum.Enum) or all(kind.save is data_kinds.nothing for kind in kinds)


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
            self._parents[variable] = self._parents[parent]
            variable = parent
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


class LeftOut(Struct, frozen=True):
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
        with data_kinds.plain():
            return any((tensor := ref()) is None or (*_facts(tensor),) != (*before,) for ref, *before in self.tensors)


def _facts(tensor: torch.Tensor) -> tuple[int | None, int]:
    saved = data_kinds.tensor_kind.save(tensor)
    return saved.version, id(saved.grad)


@functools.lru_cache(maxsize=4096)
def is_bound_by_user(name: str) -> bool:
    """Whether cells bind this name, rather than IPython or ipyparallel."""
    return not _OF_IPYTHON.fullmatch(name)


class State(Struct):
    """The state of a session, without the content of its storages."""

    names: dict[str, Any] = field(default_factory=dict)
    nodes: list[tuple[data_kinds.Kind, Any, Any]] = field(default_factory=list)
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
    spans: list[tuple[str, int]] = field(default_factory=list)
    """The variables through which the nodes were found, in their order, with the number of their nodes."""
    variables: list[_Variable] = field(default_factory=list)
    """Those that need no visit by the next walk unless they have changed."""
    limit: int = 0
    """Bytes into which it had to fit; 0: there was no limit."""

    @property
    def size(self) -> int:
        """Bytes of the storages."""
        return sum(facts.size for facts in self.storages.values())

    def name_of(self, index: int) -> str:
        """Return the variable through which a node was found."""
        for name, count in self.spans:
            if index < count:
                return name
            index -= count
        raise IndexError(index)

    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor that has a gradient, and that."""
        for _, tensor, saved in self.nodes:
            if type(saved) is data_kinds.TensorState and saved.is_leaf and saved.grad is not None:
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
        with gc_paused(on_main=True), data_kinds.plain():
            walk = _Walk(self._namespace, self._learned)
            walk.visit_all()
            return walk.finish()

    def find_again(self, previous: State | None) -> State:
        """Find what it is now; variables whose objects are all still as in `previous`, from here, are not visited."""
        with gc_paused(on_main=True), data_kinds.plain():
            walk = _Walk(self._namespace, self._learned, _NO_LIMIT)
            numbers = [(walk.add(), name, value) for name, value in walk.state.names.items()]
            for number, name, value in walk.reuse(numbers, previous):
                walk.visit(number, name, value)
            return walk.leave_out({}, holds_all=True)

    def find_within(self, limit: int, held: Iterable[Any] = (), previous: State | None = None) -> State:
        """Find what fits into a limit; variables that share state are in together, or left out together.

        Args:
            limit: Bytes. Those of the structure count more, as it takes more time to find them.
            held: Values that only earlier snapshots keep alive; they count as well.
            previous: What was found last. Variables whose objects are all still as they were then are not visited.
        """
        with gc_paused(on_main=True), data_kinds.plain():
            walk = _Walk(self._namespace, self._learned, limit)
            why = f"needs more than {format_bytes(limit)} of `undo_memory`"
            before, self._unvisited = self._unvisited, {}
            todo = [*walk.state.names.items(), *(("", value) for value in held)]
            numbers = [(walk.add(), name, value) for name, value in todo]
            for number, name, value in walk.reuse(numbers, previous):
                if name and (known := before.get(name)) is not None and known.identity == id(value):
                    self._unvisited[name] = known.now(value)
                elif (tensors := walk.visit(number, name, value)) is not None and name:
                    self._unvisited[name] = LeftOut.of(why, value, tensors)
            return walk.leave_out(self._unvisited)


class _Variable(Struct):
    """What a walk has found through one variable first."""

    name: str
    """Empty if only snapshots refer to the value."""
    value: Any
    nodes: list[tuple[data_kinds.Kind, Any, Any]] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    obstacle: str = ""
    """What it is or contains that cannot be restored."""
    is_known: bool = True
    """Whether the nodes say all: an object that refused to be saved, or a generator, is not among them."""
    size: int = 0
    """Bytes of the structure, about."""
    leaf_size: int = 0
    """How many of them are those of leaves."""
    group: int = -1
    """The same number for variables that refer to the same objects."""
    component: int = -1
    """The same number for those that share state."""

    def tensors(self) -> list[torch.Tensor]:
        """Return its tensors."""
        return [item for _, item, saved in self.nodes if type(saved) is data_kinds.TensorState]

    def refresh(self) -> _Variable | None:
        """Return it as it is now, if each object still refers to the same ones; None: one does not."""
        fresh: list[tuple[int, tuple[data_kinds.Kind, Any, Any]]] = []
        leaf_size = 0
        for index, node in enumerate(self.nodes):
            kind, item, saved = node
            same = kind.same
            if same is None:
                now = kind.save(item)
                leaf_size += bytes_of_state(item, now)
            elif type(saved) is data_kinds.TensorState:
                if (now := data_kinds.refresh_tensor(item, saved)) is None:
                    return None
                if now is saved:
                    continue
            elif same(item, saved):
                continue
            else:
                return None
            fresh.append((index, (kind, item, now)))
        if not fresh:
            return self
        nodes = self.nodes.copy()  # earlier snapshots have the others
        for index, node in fresh:
            nodes[index] = node
        size = self.size - self.leaf_size + leaf_size
        return replace(self, nodes=nodes, size=size, leaf_size=leaf_size)


def _fresh(numbers: Iterable[_Numbered], before: Sequence[_Variable]) -> dict[int, _Variable]:
    """Return, by number, the variables that are still as they were, with all that refer to the same objects."""
    found = {(name, id(value)): number for number, name, value in numbers}
    fresh: dict[int, _Variable] = {}
    changed = {one.group for one in before if (one.name, id(one.value)) not in found}
    for one in before:
        if one.group in changed:
            continue
        try:
            now = one.refresh()
        except Exception:  # an odd object of the user: the walk knows what to do
            now = None
        if now is None:
            changed.add(one.group)
        else:
            fresh[found[one.name, id(one.value)]] = now
    return {number: one for number, one in fresh.items() if one.group not in changed}


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
        self._kinds: dict[type, tuple[data_kinds.Kind, ...]] = {}
        self._obstacles: dict[type, str] = {}
        self._owners: dict[int, int | None] = {id(namespace): None, id(vars(builtins)): None}
        """By identity of an object, the number of the variable through which it was found first."""
        self._storage_owners: dict[tuple[str, int, int], int] = {}
        self._empty: list[tuple[int, StorageFacts]] = []
        self._variables: dict[int, _Variable] = {}
        self._components = Components()
        self._groups = Components()

    def add(self) -> int:
        """Return the number of another variable."""
        self._groups.add()
        return self._components.add()

    def visit_all(self) -> None:
        """Visit all variables, without a limit."""
        for name, value in self.state.names.items():
            self._visit(self.add(), _Variable(name, value))

    def visit(self, number: int, name: str, value: Any) -> list[torch.Tensor] | None:
        """Visit a variable; if it has too many objects, the rest is not visited, and its tensors are returned."""
        variable = _Variable(name, value)
        return None if self._visit(number, variable) else variable.tensors()

    def reuse(self, numbers: list[_Numbered], previous: State | None) -> list[_Numbered]:
        """Take over variables that are still as they were, with all that refer to the same objects.

        Args:
            numbers: All variables.
            previous: What was found last.

        Returns:
            Those that must be visited.
        """
        if previous is None or previous.limit != self._limit:
            return [one for one in numbers if self.has_state(one[2])]
        fresh = _fresh(numbers, previous.variables)
        firsts: dict[tuple[bool, int], int] = {}
        for number, variable in fresh.items():
            self._variables[number] = variable
            self._groups.join(number, firsts.setdefault((True, variable.group), number))
            self._components.join(number, firsts.setdefault((False, variable.component), number))
            self._components.spend(number, 0, variable.size)
            for _, _, saved in variable.nodes:
                if type(saved) in _WITH_STORAGE:
                    self._add_storage(saved, number)
        todo = [one for one in numbers if one[0] not in fresh and self.has_state(one[2])]
        for number, variable in fresh.items() if todo else ():
            for _, item, _ in variable.nodes:
                self._owners.setdefault(id(item), number)
                if type(item) not in self._kinds:
                    self._learn(type(item))
        return todo

    def has_state(self, value: Any) -> bool:
        """Whether there is anything to visit; functions and classes of libraries are not worth the time."""
        kind = type(value)
        if isinstance(value, type | types.FunctionType) and value.__module__ != "__main__":
            return False
        return bool(self._kinds.get(kind) or self._learn(kind) or self._obstacles[kind])

    def _visit(self, number: int, variable: _Variable) -> bool:
        known, owners, size = self._kinds, self._owners, 0
        largest = self._limit // STRUCTURE_COST
        self._variables[number] = variable
        todo: list[Iterator[Any]] = [iter((variable.value,))]
        while todo and size <= largest:
            for item in todo[-1]:
                kind = type(item)
                if (kinds := known.get(kind)) is None:
                    kinds = self._learn(kind)
                if not kinds and not self._obstacles[kind]:
                    continue
                if id(item) in owners:
                    variable.obstacle = variable.obstacle or self._obstacles[kind]
                    if largest:
                        self._meet(item, number)
                    continue
                owners[id(item)] = number
                children, added = self._save(variable, item, kinds, number)
                size += added
                if children or size > largest:
                    todo.append(itertools.chain(*children))
                    break
            else:
                todo.pop()
        variable.size = size
        self._components.spend(number, 0, size)
        return not todo

    def _save(
        self, variable: _Variable, item: Any, kinds: tuple[data_kinds.Kind, ...], number: int
    ) -> tuple[list[Iterable[Any]], int]:
        """Add the states of one object; return what it refers to, and the bytes that the states take."""
        kind, children, size = type(item), list[Iterable[Any]](), 0
        if what := self._obstacles[kind]:
            variable.is_known = variable.is_known and bool(kinds)
            variable.obstacle = variable.obstacle or describe_obstacle(what, kind, variable.value)
        if issubclass(kind, torch.optim.Optimizer):
            variable.optimizers.append(item)
        for one in kinds:
            try:
                saved = one.save(item)
                added, within = bytes_of_state(item, saved) if self._limit else 0, one.children(item, saved)
                if type(saved) in _WITH_STORAGE:
                    self._add_storage(saved, number)
                    if type(saved) is data_kinds.TensorState and saved.obstacle:
                        variable.obstacle = variable.obstacle or saved.obstacle
            except Exception as error:  # an odd object of the user must not prevent the snapshot
                is_ours = isinstance(error, NotRestorableError)
                what = str(error) if is_ours else f"{describe_type(kind)}: {type(error).__name__}"
                what = describe_obstacle(what, kind, variable.value)
                variable.obstacle, variable.is_known = variable.obstacle or what, False
                continue
            size += added
            if one.same is None:
                variable.leaf_size += added
            variable.nodes.append((one, item, saved))
            children.append(within)
        return children, size

    def _meet(self, item: Any, number: int) -> None:
        """Join the variables that share this object, or what it refers to if it has no state itself."""
        owner, kinds = self._owners[id(item)], self._kinds[type(item)]
        if owner == number or owner is None:
            return
        self._groups.join(owner, number)
        if not is_shared_by_libraries(item, kinds):
            self._components.join(owner, number)
        elif not isinstance(item, _NAMED_ONCE):
            for child in itertools.chain(*(one.children(item, None) for one in kinds)):
                if id(child) in self._owners and type(child) in self._kinds:
                    self._meet(child, number)

    def finish(self) -> State:
        """Return the state of all variables that were visited."""
        state, variables = self.state, list(self._variables.values())
        state.nodes = [node for one in variables for node in one.nodes]
        state.spans = [(one.name, len(one.nodes)) for one in variables]
        state.optimizers = [item for one in variables for item in one.optimizers]
        state.empty = [facts for number, facts in self._empty if number in self._variables]
        state.obstacles = {one.name: one.obstacle for one in variables if one.obstacle and one.name}
        return state

    def leave_out(self, unvisited: Mapping[str, LeftOut], *, holds_all: bool = False) -> State:
        """Leave the variables out whose components do not fit into the limit, and those that were not visited.

        Args:
            unvisited: The latter.
            holds_all: Whether names of what cannot be restored are held as well.
        """
        above = self._components.above(self._limit)
        loose: set[int] = set()
        left_out, kept = dict(unvisited), dict[int, _Variable]()
        obstacles = {one.name: one.obstacle for one in self._variables.values() if one.obstacle and one.name}
        too_large = {one.identity for one in unvisited.values()}
        for number, variable in self._variables.items():
            variable.component, variable.group = self._components.component(number), self._groups.component(number)
            cost = above.get(variable.component)
            if cost is not None:
                too_large.add(id(variable.value))
            elif variable.name and variable.name not in left_out:
                kept[number] = variable
            if number not in kept or not variable.is_known:
                loose.add(variable.group)
            if cost is not None and variable.name and variable.name not in left_out:
                why = f"needs {format_bytes(cost)} of `undo_memory`"
                left_out[variable.name] = LeftOut.of(why, variable.value, variable.tensors())
        self._variables = kept
        state = self.finish()
        state.storages = {key: facts for key, facts in state.storages.items() if self._storage_owners[key] in kept}
        if not holds_all:
            state.not_held = {name for name, value in state.names.items() if self._obstacles.get(type(value))}
        for name in left_out.keys() | state.not_held:
            del state.names[name]
        state.obstacles = obstacles | {name: one.why for name, one in left_out.items()}
        state.left_out, state.too_large = left_out, too_large
        state.structure = self._components.structure(kept)
        state.variables = [one for one in kept.values() if one.group not in loose]
        state.limit = self._limit
        return state

    def _learn(self, kind: type) -> tuple[data_kinds.Kind, ...]:
        if kind not in self._learned:
            self._learned[kind] = kinds_and_obstacle(kind)
        self._kinds[kind], self._obstacles[kind] = self._learned[kind]
        return self._kinds[kind]

    def _add_storage(self, saved: data_kinds.TensorState | data_kinds.ArrayState, number: int) -> None:
        if isinstance(saved, data_kinds.ArrayState):
            storage = saved.memory.untyped_storage() if saved.memory is not None else None
            size, version = (storage.nbytes() if storage is not None else 0), None
        else:
            storage, size, version = saved.storage, saved.size, saved.version
        if storage is None or storage.device.type == "meta":
            return
        facts = StorageFacts(storage, size, set())
        if not size:
            self._empty.append((number, facts))
            return
        key = facts.key
        if (owner := self._storage_owners.setdefault(key, number)) != number:
            self._groups.join(owner, number)
            self._components.join(owner, number)
        elif key not in self.state.storages:
            self._components.spend(number, size, 0)
        facts = self.state.storages.setdefault(key, facts)
        if version is not None:
            facts.versions.add(version)
