"""The kinds of objects that have a state: what each holds, and how it gets that back in place.

A state is shallow: it refers to the objects within, which have states themselves. So an object stays the same object,
wherever it is referred to, and cycles need no care.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from typing import Any

import torch

from axon_nb.engine.snapshot.containers import ITEMS, Kind, keep, nothing, set_dict, values, within
from axon_nb.engine.snapshot.tensors import array_kind, tensor_kind

__all__ = ["kinds_and_obstacle"]


_MISSING = object()
_FOREIGN = (
    "IPython", "asyncio", "axon_nb.comm", "axon_nb.engine", "axon_nb.records", "concurrent", "ctypes", "importlib",
    "inspect", "ipykernel", "ipyparallel", "jupyter_client", "logging", "multiprocessing", "selectors", "socket",
    "subprocess", "threading", "torch.distributed.device_mesh", "torch.fx", "tornado", "traitlets", "typing", "weakref",
    "zmq",
)  # fmt: skip
"""Packages whose objects are the machinery under a session, not its state."""
_OF_GROUPS = ("Reducer", "Logger")
"""Classes of torch.distributed whose objects belong to the process groups."""
_PICKLED_IN_PLACE = ("builtins", "pandas._libs")
"""Where types without attributes take a pickled state in place: iterators, and the blocks of tables."""
_OBSTACLES = {
    types.GeneratorType: "a generator",
    types.AsyncGeneratorType: "a generator",
    types.CoroutineType: "a coroutine",
}
_LOADED_OBSTACLES = {
    ("_io", "_IOBase"): "an open file",
    ("mmap", "mmap"): "a mapped file",
    ("socket", "socket"): "a socket",
    ("subprocess", "Popen"): "a process",
    ("multiprocessing.process", "BaseProcess"): "a process",
    ("threading", "Thread"): "a thread",
}


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, ())


def _obstacle_of(kind: type) -> str:
    """What objects of this type are, if they cannot be restored; empty if they can, or have no state."""
    for base, what in _OBSTACLES.items():
        if issubclass(kind, base):
            return what
    for (module, name), what in _LOADED_OBSTACLES.items():
        if issubclass(kind, _loaded(module, name)):
            return what
    if "__next__" in vars(kind) and not _has_attributes(kind) and not hasattr(kind, "__setstate__"):
        return "an iterator"
    return ""


def _kinds_of(kind: type) -> tuple[Kind, ...]:
    """The kinds of state that objects of this type have; empty if they have none."""
    for base, fixed in _WITHOUT_ATTRIBUTES.items():
        if issubclass(kind, base):
            return (fixed,)
    if issubclass(kind, type):
        return (_CLASS,)
    generators = [state for (module, name), state in _LOADED.items() if issubclass(kind, _loaded(module, name))]
    if generators or _is_foreign(kind):
        return tuple(generators[:1])
    states = [items for base, items in ITEMS.items() if issubclass(kind, base)][:1]
    if _has_attributes(kind):
        states.append(_ATTRIBUTES)
    if slots := _slots(kind):
        states.append(_slots_kind(slots))
    if not states and callable(getattr(kind, "__setstate__", None)) and kind.__module__.startswith(_PICKLED_IN_PLACE):
        states.append(_PICKLED)
    return tuple(states)


def kinds_and_obstacle(kind: type) -> tuple[tuple[Kind, ...], str]:
    """Return the kinds of state of objects of this type, and what these are if they cannot be restored."""
    obstacle = _obstacle_of(kind)
    kinds = () if obstacle else _kinds_of(kind)
    if issubclass(kind, torch.Tensor):
        kinds = (tensor_kind, *kinds)
    elif kind.__module__.partition(".")[0] == "numpy" and kind.__name__ in ("ndarray", "memmap", "recarray"):
        kinds = (array_kind,)
    return kinds, obstacle


def _is_foreign(kind: type) -> bool:
    module = getattr(kind, "__module__", "")
    if issubclass(kind, types.ModuleType) or not isinstance(module, str):
        return issubclass(kind, types.ModuleType)
    if issubclass(kind, _loaded("torch.nn", "Module")) or issubclass(kind, _loaded("torch", "Tensor")):
        return False
    package, _, rest = module.partition(".")
    if package == "torch" and rest.startswith("_"):  # compilers, bindings and other internals
        return True
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in _FOREIGN)


def _has_attributes(kind: type) -> bool:
    return bool(getattr(kind, "__dictoffset__", 0))


def _slots(kind: type) -> tuple[Any, ...]:
    members = [vars(base).values() for base in kind.__mro__ if "__slots__" in vars(base)]
    return tuple(item for values in members for item in values if isinstance(item, types.MemberDescriptorType))


def _attributes(value: Any) -> dict[str, Any]:
    attributes: Any = object.__getattribute__(value, "__dict__")
    return attributes if type(attributes) is dict else {}


def _save_attributes(value: Any) -> tuple[type, dict[str, Any]]:
    return type(value), _attributes(value).copy()


def _set_attributes(value: Any, saved: tuple[type, dict[str, Any]]) -> None:
    kind, attributes = saved
    if type(value) is not kind:  # such as `fully_shard`, which replaces the class of a module
        object.__setattr__(value, "__class__", kind)
    now = _attributes(value)
    # A recovery replaces reducers, which belong to the process groups: the new ones stay.
    kinds = [_loaded("torch.distributed", name) for name in _OF_GROUPS]
    rebuilt = {name: now[name] for name, item in attributes.items() if type(item) in kinds and name in now}
    set_dict(now, attributes | rebuilt if rebuilt else attributes)


def _attribute_values(value: Any, saved: tuple[type, dict[str, Any]]) -> Iterable[Any]:
    return saved[1].values()


def _slots_kind(members: tuple[Any, ...]) -> Kind:
    def save(value: Any) -> list[Any]:
        attributes = []
        for member in members:
            try:
                attributes.append(member.__get__(value))
            except AttributeError:
                attributes.append(_MISSING)
        return attributes

    def restore(value: Any, saved: list[Any]) -> None:
        for member, now, before in zip(members, save(value), saved, strict=True):
            if now is before:
                continue
            if before is _MISSING:
                member.__delete__(value)
            else:
                member.__set__(value, before)

    return Kind(save, restore, within)


def _save_cell(value: Any) -> list[Any]:
    try:
        return [value.cell_contents]
    except ValueError:
        return []


def _set_cell(value: Any, saved: list[Any]) -> None:
    if saved:
        value.cell_contents = saved[0]
    elif _save_cell(value):
        del value.cell_contents


def _save_class(value: type) -> dict[str, Any]:
    # Only classes of cells: those of packages are shared by everything in the process.
    return dict(vars(value)) if value.__module__ == "__main__" else {}


def _set_class(value: type, saved: dict[str, Any]) -> None:
    if value.__module__ != "__main__":
        return
    for name in [name for name in vars(value) if name not in saved]:
        type.__delattr__(value, name)
    for name, item in saved.items():
        if vars(value).get(name, _MISSING) is not item:
            type.__setattr__(value, name, item)


def _save_function(value: Any) -> tuple[Any, ...]:
    return value.__defaults__, value.__kwdefaults__, dict(value.__dict__)


def _set_function(value: Any, saved: tuple[Any, ...]) -> None:
    value.__defaults__, value.__kwdefaults__, attributes = saved
    set_dict(value.__dict__, attributes)


def _function_children(value: Any, saved: tuple[Any, ...]) -> Iterable[Any]:
    return (*saved[:2], *saved[2].values(), *(value.__closure__ or ()))


def _save_pickled(value: Any) -> Any:
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # whatever a foreign object raises: it has no state that we can restore
        return None
    return (reduced[2],) if isinstance(reduced, tuple) and len(reduced) > 2 and reduced[2] is not None else None


def _set_pickled(value: Any, saved: Any) -> None:
    if saved is not None:
        value.__setstate__(saved[0])


def _pickled_children(value: Any, saved: Any) -> Iterable[Any]:
    return () if saved is None else saved


def _save_numbers(value: Any) -> Any:
    return value.get_state()


def _set_numbers(value: Any, saved: Any) -> None:
    value.set_state(saved)


_CLASS = Kind(_save_class, _set_class, values)
_ATTRIBUTES = Kind(_save_attributes, _set_attributes, _attribute_values)
_PICKLED = Kind(_save_pickled, _set_pickled, _pickled_children)
_WITHOUT_ATTRIBUTES: dict[type, Kind] = {
    types.FunctionType: Kind(_save_function, _set_function, _function_children),
    types.MethodType: Kind(nothing, keep, lambda value, _: (value.__self__, value.__func__)),
    types.CellType: Kind(_save_cell, _set_cell, within),
    types.MappingProxyType: Kind(nothing, keep, lambda value, _: dict(value).values()),
}
_LOADED: dict[tuple[str, str], Kind] = {
    ("numpy.random", "RandomState"): Kind(_save_numbers, _set_numbers, lambda *_: ()),
    ("numpy.random", "BitGenerator"): Kind(
        lambda value: value.state, lambda value, saved: setattr(value, "state", saved), lambda *_: ()
    ),
    ("numpy.random", "Generator"): Kind(nothing, keep, lambda value, _: (value.bit_generator,)),
    ("torch", "Generator"): Kind(_save_numbers, _set_numbers, lambda *_: ()),
}
"""By module and name, so that NumPy and the rest are not imported."""
