"""The kinds of objects that have a state: what each holds, and how it gets that back in place.

A state is shallow: it refers to the objects within, which have states themselves. So an object stays the same object,
wherever it is referred to, and cycles need no care.

A type written in Python keeps its state in attributes, slots and the items of its base. One written in C may have more
than Python sees, which its size shows. Such a type is restored in a way of its own, known to be immutable or part of
the machinery under a session, or else an obstacle: what is restored is never a guess.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import enum
import functools
import gc
import operator
import re
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from axon_nb.engine.snapshot.data_kinds import (
    ITEMS,
    Kind,
    all_same,
    always,
    array_kind,
    keep,
    leaf,
    nothing,
    objects,
    same_dict,
    set_dict,
    storage_kind,
    tensor_kind,
    values,
)

_MISSING = object()
_MACHINERY = (
    "IPython", "_abc", "_thread", "_weakref", "axon_nb.comm", "axon_nb.engine", "axon_nb.records", "importlib",
    "inspect", "ipykernel", "ipyparallel", "jupyter_client", "logging", "multiprocessing.context",
    "multiprocessing.synchronize", "numba.core", "selectors", "torch.distributed.device_mesh", "tornado", "traitlets",
    "typing", "weakref", "zmq",
)  # fmt: skip
"""Packages whose objects are the machinery under a session, not its state."""
_LOCKS = ("Condition", "Lock", "RLock")
"""Classes of multiprocessing of which many objects have one."""
_OUTSIDE = ("_asyncio", "asyncio", "concurrent", "multiprocessing", "torch.fx")
"""Packages whose objects have state in other processes or threads, or in more places than attributes."""
_SIMPLE_MACHINERY = (
    ("IPython.core.display", "DisplayObject"), ("logging", "Filter"), ("logging", "Formatter"),
    ("logging", "PercentStyle"),
)  # fmt: skip
"""Classes of these packages that users have in variables: they have attributes and nothing else."""
_ATTRIBUTES_APART = (
    ("numpy", "memmap"), ("weakref", "WeakValueDictionary"), ("weakref", "WeakKeyDictionary"), ("weakref", "WeakSet"),
)  # fmt: skip
"""Classes whose attributes only say how they work."""
_IMMUTABLE: tuple[type, ...] = (
    str, bytes, int, float, complex, range, slice, types.BuiltinFunctionType, types.CodeType, types.FrameType,
    types.GenericAlias, types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.MethodWrapperType, types.TracebackType, types.UnionType,
    types.WrapperDescriptorType, dt.date, dt.time, dt.timedelta, dt.tzinfo, re.Match,
    re.Pattern, operator.attrgetter, operator.itemgetter, operator.methodcaller, weakref.ref,
)  # fmt: skip
_IMMUTABLE_LOADED = (
    ("_contextvars", "Token"), ("_ctypes", "CFuncPtr"),
    ("decimal", "Decimal"), ("numpy", "dtype"), ("numpy", "generic"), ("numpy", "ufunc"),
    ("torch", "Size"), ("torch", "device"), ("torch", "dtype"), ("zoneinfo", "ZoneInfo"),
)  # fmt: skip
_IMMUTABLE_PACKAGES = (
    "jaxlib", "matplotlib.ft2font", "pandas._libs.hashtable", "pandas._libs.index", "pandas._libs.interval",
    "pandas._libs.missing", "pandas._libs.properties", "pandas._libs.sparse", "pandas._libs.tslibs", "pydantic_core",
    "pyarrow.lib",
)  # fmt: skip
"""Packages whose types written in C have no way to change, or only caches of what cannot."""
_SCRIPTED = ("ScriptModule", "ScriptObject", "ScriptList", "ScriptDict")
_OF_GROUPS = ("Reducer", "Logger")
"""Classes of torch.distributed whose objects belong to the process groups."""
_NUMBERS = leaf(lambda value: value.get_state(), lambda value, saved: value.set_state(saved))
_ITERATOR, _POINTED = "an iterator", "a pointer to memory"
_OBSTACLES = {
    types.GeneratorType: "a generator",
    types.AsyncGeneratorType: "a generator",
    types.CoroutineType: "a coroutine",
}
_LOADED_OBSTACLES = {
    ("mmap", "mmap"): "a mapped file",
    ("socket", "socket"): "a socket",
    ("subprocess", "Popen"): "a process",
    ("multiprocessing.process", "BaseProcess"): "a process",
    ("threading", "Thread"): "a thread",
    ("_io", "_IOBase"): "an open file",
}
_SEQUENCES: tuple[Any, ...] = ([], (), range(0), range(1 << 70), "", "\u00e9", b"", bytearray())
_ITERATORS = (
    *(type(iter(one)) for one in _SEQUENCES),
    type(reversed([])),
    type(reversed(())),
)
"""Iterators that take a position in place."""
_PLAIN = (torch.nn.Module, BaseException, enum.Enum, *_IMMUTABLE)
_POINTER = ctypes.sizeof(ctypes.c_void_p)
_VIEWS: list[Any] = [
    view for one in (dict[Any, Any](), OrderedDict[Any, Any]()) for view in (one.keys(), one.values(), one.items())
]
_BOUND = (types.BuiltinFunctionType, types.MethodWrapperType, *map(type, _VIEWS))
"""Types whose objects refer to one other, by `__self__` or `mapping`."""


class NotRestorableError(Exception):
    """An object cannot be restored; the message says what it is."""


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, ())


def _is_in(kind: type, packages: Iterable[str]) -> bool:
    module = getattr(kind, "__module__", "")
    return isinstance(module, str) and any(module == name or module.startswith(f"{name}.") for name in packages)


def hidden_base(kind: type) -> type | None:
    """Return the class, of a type and its bases, that keeps more in its objects than attributes and slots."""
    while kind is not object:
        base = kind.__base__
        assert base is not None
        seen = 0
        if "__slots__" in vars(kind):
            seen += sum(isinstance(one, types.MemberDescriptorType) for one in vars(kind).values())
        seen += bool(kind.__dictoffset__) > bool(base.__dictoffset__)
        seen += bool(kind.__weakrefoffset__) > bool(base.__weakrefoffset__)
        if kind.__basicsize__ - base.__basicsize__ > _POINTER * seen or kind.__itemsize__ != base.__itemsize__:
            return kind
        kind = base
    return None


def describe_obstacle(what: str, kind: type, value: Any) -> str:
    """Say what cannot be restored of a variable: the value itself, if that is an object of a library.

    Args:
        what: What the object is that cannot be restored.
        kind: Its type.
        value: The variable's value, which is or contains it.
    """
    outer = type(value)
    is_plain = _package(outer) in ("__main__", "builtins", "collections") or issubclass(outer, torch.nn.Module)
    return what if is_plain or what not in (_ITERATOR, _POINTED, describe_type(kind)) else describe_type(outer)


def describe_type(kind: type) -> str:
    """Return the name of a type as users know it, with its article."""
    module, name = str(kind.__module__), kind.__qualname__
    parts = module.split(".")
    for number in range(1, len(parts)):
        if _loaded(prefix := ".".join(parts[:number]), name) is kind:
            module = prefix
            break
    name = name if module in ("builtins", "__main__") else f"{module}.{name}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _is_machinery(kind: type) -> bool:
    if issubclass(kind, types.ModuleType):
        return True
    if issubclass(kind, (torch.nn.Module, torch.Tensor)):
        return False
    # compilers, bindings and other internals of torch
    return _is_in(kind, _MACHINERY) or str(kind.__module__).startswith("torch._")


def _is_immutable(hidden: type) -> bool:
    """Whether objects of a type written in C cannot change, or only what Python sees of them."""
    if issubclass(hidden, _IMMUTABLE) or _is_in(hidden, _IMMUTABLE_PACKAGES) or hidden.__name__ == "PyCapsule":
        return True
    if any(issubclass(hidden, _loaded(*name)) for name in _IMMUTABLE_LOADED):
        return True
    if hidden.__module__ == "pybind11_builtins" and hidden.__name__ != "pybind11_object":
        return True  # what it makes functions of
    return any("__get__" in vars(base) for base in hidden.__mro__)  # a function or another descriptor of a library


def _hidden_obstacle(kind: type, restored: type | None) -> str:
    """What objects of this type are, if they may hold more than is restored.

    Args:
        kind: The type.
        restored: The base with a way of its own to be restored.
    """
    hidden = hidden_base(kind)
    if hidden is None or _is_immutable(hidden):
        return ""
    if restored is not None and (issubclass(restored, hidden) or _package(restored) == _package(hidden) != "builtins"):
        return ""
    if _package(kind) == "torch" and hidden.__module__.startswith(("torch._", "pybind11_builtins")):
        return ""  # groups, their work, streams and other bindings, which are machinery, too
    if issubclass(hidden, BaseException) and hidden.__module__ == "builtins":
        return ""
    return _ITERATOR if hasattr(kind, "__next__") else describe_type(kind)


def _obstacle_of(kind: type) -> str:
    """What objects of this type are, if nothing of them can be restored."""
    for base, what in _OBSTACLES.items():
        if issubclass(kind, base):
            return what
    if kind.__name__ in _SCRIPTED and kind.__module__.startswith("torch"):
        return describe_type(kind)
    if kind.__module__ == "multiprocessing.synchronize" and kind.__name__ not in _LOCKS:
        return describe_type(kind)
    if _is_machinery(kind) or issubclass(kind, tuple(ITEMS)):
        return ""
    for (module, name), what in _LOADED_OBSTACLES.items():
        if issubclass(kind, _loaded(module, name)):
            return what
    if any(_is_in(base, _OUTSIDE) for base in kind.__mro__) and not issubclass(kind, _PLAIN):
        return describe_type(kind)
    return ""


def kinds_and_obstacle(kind: type) -> tuple[tuple[Kind, ...], str]:
    """Return the kinds of state of objects of this type, and what these are if they cannot be restored."""
    if obstacle := _obstacle_of(kind):
        return (), obstacle
    for base, fixed in _WITHOUT_ATTRIBUTES.items():
        if issubclass(kind, base):
            return (fixed,), ""
    if issubclass(kind, type):
        return (_CLASS,), ""
    found = ((base, state) for base, state in ITEMS.items() if issubclass(kind, base))
    loaded = (
        (base, state)
        for (module, name), state in _LOADED.items()
        if isinstance(base := _loaded(module, name), type) and issubclass(kind, base)
    )
    restored: type | None
    state: Kind | list[Kind] | None
    restored, state = next(loaded, None) or next(found, (None, None))
    states = state.copy() if isinstance(state, list) else [state] if state is not None else []
    if restored is None and _is_machinery(kind):
        return (), ""
    if issubclass(kind, BaseException):
        states.append(_EXCEPTION)
    if getattr(kind, "__dictoffset__", 0) and not any(issubclass(kind, _loaded(*one)) for one in _ATTRIBUTES_APART):
        states.append(_ATTRIBUTES)
    if slots := _slots(kind):
        states.append(_slots_kind(slots))
    return tuple(states), _hidden_obstacle(kind, restored)


def _slots(kind: type) -> tuple[Any, ...]:
    members = [vars(base).values() for base in kind.__mro__ if "__slots__" in vars(base)]
    return tuple(item for values in members for item in values if isinstance(item, types.MemberDescriptorType))


def _attributes(value: Any) -> dict[str, Any]:
    attributes: Any = object.__getattribute__(value, "__dict__")
    return attributes if type(attributes) is dict else {}


def _members_kind(names: Callable[[type], Sequence[str]]) -> Kind:
    """The kind of types written in C that show and take all they hold as attributes."""

    def save(value: Any) -> list[Any]:
        return [getattr(value, name, _MISSING) for name in names(type(value))]

    def restore(value: Any, saved: list[Any]) -> None:
        for name, now, before in zip(names(type(value)), save(value), saved, strict=True):
            if now is not before:
                setattr(value, name, before)

    return objects(save, restore)


@functools.cache
def _c_attributes(kind: type) -> tuple[str, ...]:
    hidden = hidden_base(kind)
    assert hidden is not None
    found = [name for name, item in vars(hidden).items() if isinstance(item, types.GetSetDescriptorType)]
    return tuple(name for name in found if name not in ("__dict__", "__weakref__", "ndim"))


@functools.cache
def _exception_members(kind: type) -> tuple[str, ...]:
    own = [
        name
        for base in kind.__mro__
        if base.__module__ == "builtins"
        for name, item in vars(base).items()
        if isinstance(item, types.MemberDescriptorType)
    ]
    return ("args", "__traceback__", "__context__", "__cause__", *own)


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


def _same_attributes(value: Any, saved: tuple[type, dict[str, Any]]) -> bool:
    return type(value) is saved[0] and same_dict(_attributes(value), saved[1])


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

    return objects(save, restore)


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
    return value.__code__, value.__defaults__, value.__kwdefaults__, dict(value.__dict__)


def _set_function(value: Any, saved: tuple[Any, ...]) -> None:
    if not _same_function(value, saved):
        value.__code__, value.__defaults__, value.__kwdefaults__, attributes = saved
        set_dict(value.__dict__, attributes)


def _same_function(value: Any, saved: tuple[Any, ...]) -> bool:
    code, defaults, keywords, attributes = saved
    return (
        value.__code__ is code
        and value.__defaults__ is defaults
        and value.__kwdefaults__ is keywords
        and same_dict(value.__dict__, attributes)
    )


def _function_children(value: Any, saved: tuple[Any, ...]) -> Iterable[Any]:
    return (*saved[1:3], *saved[3].values(), *(value.__closure__ or ()))


def _save_position(value: Any) -> tuple[Any, ...]:
    return tuple(value.__reduce__()[1:])


def _set_position(value: Any, saved: tuple[Any, ...]) -> None:
    if len(saved) > 1:
        value.__setstate__(saved[1])
    if not _same_position(value, saved):
        raise NotRestorableError("it was exhausted")


def _same_position(value: Any, saved: tuple[Any, ...]) -> bool:
    now = _save_position(value)
    is_range = bool(saved[0]) and type(saved[0][0]) is range
    return now[1:] == saved[1:] and (now[0] == saved[0] if is_range else all_same(now[0], saved[0]))


def _save_seed(value: Any) -> tuple[Any, ...]:
    return value.n_children_spawned, value.__reduce__()[2]


def _set_seed(value: Any, saved: tuple[Any, ...]) -> None:
    if value.n_children_spawned != saved[0]:
        value.__setstate__(saved[1])


def _set_seed_of(value: Any, saved: list[Any]) -> None:
    if value.seed_seq is not saved[0]:
        value.__setstate__((value.state, saved[0]))


def _save_cache(value: Any) -> Any:
    info = value.cache_info()
    if vars(value).get("__module__") == "__main__" and any((info.hits, info.misses, info.currsize)):
        raise NotRestorableError("a cache of calls")
    return info


def _set_cache(value: Any, saved: Any) -> None:
    if vars(value).get("__module__") == "__main__" and value.cache_info() != saved:
        value.cache_clear()


def _set_fields(value: Any, saved: Any) -> None:
    for index in range(len(value.dtype.names or ())):
        value[index] = saved[index]


def _save_blocks(value: Any) -> list[Any]:
    return [value._dtype, value._ndarray]


def _set_blocks(value: Any, saved: list[Any]) -> None:
    if not all_same(_save_blocks(value), saved):
        value.__setstate__(tuple(saved))


def _save_simple(value: Any) -> bytes:
    if isinstance(value, ctypes.c_void_p | ctypes.c_char_p | ctypes.c_wchar_p | ctypes.py_object):
        raise NotRestorableError(_POINTED)
    return bytes(value)


def _set_simple(value: Any, saved: bytes) -> None:
    ctypes.memmove(ctypes.addressof(value), saved, len(saved))


def _weak_set(value: Any, saved: Any) -> None:
    value.clear()
    value.update(saved)


def _check_view(value: Any, saved: Any) -> None:
    assert value.nbytes >= 0  # raises ValueError if the cell has released it


def _mapping_children(value: Any, saved: Any) -> Iterable[Any]:
    # The namespace of a class must not be written to, so that only its values count.
    return list(value.values()) if "__module__" in value else gc.get_referents(value)


def _bound_to(value: Any, saved: Any) -> tuple[Any, ...]:
    return (getattr(value, "__self__", None) if isinstance(value, _BOUND[:2]) else value.mapping,)


def _refers(children: Callable[[Any, Any], Iterable[Any]]) -> Kind:
    """The kind of objects that cannot change, but what they refer to."""
    return Kind(nothing, keep, children, always)


_CLASS = Kind(_save_class, _set_class, values, lambda value, saved: same_dict(_save_class(value), saved))
_ATTRIBUTES = Kind(_save_attributes, _set_attributes, lambda value, saved: saved[1].values(), _same_attributes)
_EXCEPTION = _members_kind(_exception_members)
_C_ATTRIBUTES = _members_kind(_c_attributes)
_WEAK_DICT = Kind(
    lambda value: dict(value.items()),
    _weak_set,
    lambda _, saved: (*saved, *saved.values()),
    lambda value, saved: same_dict(dict(value.items()), saved),
)
_POSITION = Kind(_save_position, _set_position, lambda _, saved: saved[0], _same_position)
_WITHOUT_ATTRIBUTES: dict[Any, Kind] = {
    types.FunctionType: Kind(_save_function, _set_function, _function_children, _same_function),
    types.MethodType: _refers(lambda value, _: (value.__self__, value.__func__)),
    types.CellType: objects(_save_cell, _set_cell),
    types.MappingProxyType: _refers(_mapping_children),
    _BOUND: _refers(_bound_to),
    (staticmethod, classmethod): _refers(lambda value, _: (value.__func__,)),
    property: _refers(lambda value, _: (value.fget, value.fset, value.fdel)),
    memoryview: objects(lambda value: [value.obj], _check_view),
    _ITERATORS: _POSITION,
}


def _logger_kind(*names: str) -> Kind:
    members = _members_kind(lambda _: names)

    def restore(value: Any, saved: list[Any]) -> None:
        members.restore(value, saved)
        value.setLevel(value.level)  # loggers keep what they have looked up

    return Kind(members.save, restore, members.children, members.same)


_LOADED: dict[tuple[str, str], Kind | list[Kind]] = {
    ("numpy", "ndarray"): array_kind,
    ("numpy", "void"): [leaf(lambda value: value.copy(), _set_fields), _refers(lambda value, _: (value.base,))],
    ("numpy.random", "RandomState"): _NUMBERS,
    ("numpy.random", "BitGenerator"): [
        leaf(lambda value: value.state, lambda value, saved: setattr(value, "state", saved)),
        objects(lambda value: [value.seed_seq], _set_seed_of),
    ],
    ("numpy.random", "SeedSequence"): leaf(_save_seed, _set_seed),
    ("numpy.random", "Generator"): _refers(lambda value, _: (value.bit_generator,)),
    ("torch", "Generator"): _NUMBERS,
    ("torch", "UntypedStorage"): storage_kind,
    ("torch", "Tensor"): tensor_kind,
    ("pandas._libs.internals", "BlockManager"): _C_ATTRIBUTES,
    ("pandas._libs.internals", "Block"): _C_ATTRIBUTES,
    ("pandas._libs.internals", "BlockValuesRefs"): _C_ATTRIBUTES,
    ("pandas._libs.internals", "BlockPlacement"): _refers(lambda *_: ()),
    ("pandas._libs.arrays", "NDArrayBacked"): objects(_save_blocks, _set_blocks),
    ("logging", "Logger"): _logger_kind("level", "disabled", "propagate", "handlers", "filters"),
    ("logging", "Handler"): _logger_kind("level", "formatter", "filters"),
    **dict.fromkeys(_SIMPLE_MACHINERY, _refers(lambda *_: ())),
    ("functools", "_lru_cache_wrapper"): leaf(_save_cache, _set_cache),
    ("_thread", "_local"): Kind(
        lambda value: dict(value.__dict__),
        lambda value, saved: set_dict(value.__dict__, saved),
        values,
        lambda value, saved: same_dict(value.__dict__, saved),
    ),
    ("_ctypes", "_SimpleCData"): leaf(_save_simple, _set_simple),
    ("weakref", "WeakValueDictionary"): _WEAK_DICT,
    ("weakref", "WeakKeyDictionary"): _WEAK_DICT,
    ("weakref", "WeakSet"): objects(list, _weak_set),
}
"""By module and name, so that NumPy and the rest are not imported."""
