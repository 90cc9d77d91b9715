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
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from axon_nb.engine.frames import gc_paused
from axon_nb.engine.snapshot.containers import Kind
from axon_nb.engine.snapshot.kinds import kinds_of, obstacle_of
from axon_nb.engine.snapshot.memory import StorageFacts
from axon_nb.engine.snapshot.tensors import ArrayState, TensorState, array_kind, plain, tensor_kind

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

    def find(self) -> State:
        """Find what it is now."""
        with gc_paused(on_main=True), plain():
            return _Walk(self._namespace, self._learned).state


def _kinds_and_obstacle(kind: type) -> tuple[tuple[Kind, ...], str]:
    obstacle = obstacle_of(kind)
    kinds = () if obstacle else kinds_of(kind)
    if issubclass(kind, torch.Tensor):
        kinds = (tensor_kind, *kinds)
    elif kind.__module__.partition(".")[0] == "numpy" and kind.__name__ in ("ndarray", "memmap", "recarray"):
        kinds = (array_kind,)
    return kinds, obstacle


class _Walk:
    def __init__(self, namespace: Mapping[str, Any], learned: _Learned) -> None:
        names = {name: value for name, value in list(namespace.items()) if is_bound_by_user(name)}
        self.state = State(names)
        self._learned = learned
        self._kinds: dict[type, tuple[Kind, ...]] = {}
        self._obstacles: dict[type, str] = {}
        self._seen = {id(namespace), id(vars(builtins))}
        for name, value in names.items():
            self._visit(name, value)

    def _visit(self, name: str, value: Any) -> None:
        known, seen, nodes = self._kinds, self._seen, self.state.nodes
        todo: list[Iterator[Any]] = [iter((value,))]
        while todo:
            for item in todo[-1]:
                kind = type(item)
                if (kinds := known.get(kind)) is None:
                    kinds = self._learn(kind)
                if (not kinds and not self._obstacles[kind]) or id(item) in seen:
                    continue
                seen.add(id(item))
                if what := self._obstacles[kind]:
                    self.state.obstacles.setdefault(name, what)
                children = []
                for one in kinds:
                    try:
                        saved = one.save(item)
                    except Exception as error:  # an odd object of the user must not prevent the snapshot
                        self.state.obstacles.setdefault(name, f"a {kind.__name__} ({type(error).__name__})")
                        continue
                    nodes.append((one, item, saved))
                    if type(saved) in (TensorState, ArrayState):
                        self._add_storage(name, saved)
                    elif issubclass(kind, torch.optim.Optimizer):
                        self.state.optimizers.append(item)
                    children.append(one.children(item, saved))
                if children:
                    todo.append(itertools.chain(*children))
                    break
            else:
                todo.pop()

    def _learn(self, kind: type) -> tuple[Kind, ...]:
        if kind not in self._learned:
            self._learned[kind] = _kinds_and_obstacle(kind)
        self._kinds[kind], self._obstacles[kind] = self._learned[kind]
        return self._kinds[kind]

    def _add_storage(self, name: str, saved: TensorState | ArrayState) -> None:
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
        facts = self.state.storages.setdefault(facts.key, facts)
        if version is not None:
            facts.versions.add(version)
