"""Finds the live objects of some torch classes, and the storages of all live tensors.

A scan of all objects of a process takes 20 to 100 ms, more than the rest of a recovery. So each class is scanned for
once, when its objects are first requested, and tracked from then on: its constructor registers new objects. A class
without one is scanned for each time. Modules changed by `fully_shard` are in a table of torch's own.

Storages of tensors need a scan of every object, so they are searched for rarely.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from axon_nb.engine.frames import gc_paused

DDP = ("torch.nn.parallel.distributed", "DistributedDataParallel")
FSDP = ("torch.distributed.fsdp", "FSDPModule")
FSDP1 = ("torch.distributed.fsdp", "FullyShardedDataParallel")
_STATES = ("torch.distributed._composable_state", "_module_state_mapping")
_CONSTRUCTORS = ("__init__", "__setstate__")

_tracked: dict[type, weakref.WeakValueDictionary[int, Any]] = {}
_MAX_SCAN_SHARE = 0.001
"""Largest share of the time spent on scans."""


def _lookup(place: tuple[str, str]) -> Any:
    return getattr(sys.modules.get(place[0]), place[1], None)


def live_objects(*kinds: tuple[str, str]) -> list[list[Any]]:
    """The live objects of each kind, one list per kind.

    Args:
        *kinds: (module, class); empty if the module has not been imported.
    """
    changed = _modules_of_fsdp() if FSDP in kinds else None
    classes = {kind: _lookup(kind) for kind in kinds if kind != FSDP or changed is None}
    unknown = [cls for cls in classes.values() if cls is not None and cls not in _tracked]
    scanned = dict(zip(unknown, _scan(unknown), strict=True)) if unknown else {}
    for kind, cls in classes.items():
        # `fully_shard` changes the class of existing modules, and CUDAGraph has no constructor in Python.
        if cls in scanned and kind != FSDP and any(name in vars(cls) for name in _CONSTRUCTORS):
            _track(cls, scanned[cls])
    return [_tracked_or(scanned, classes[kind]) if kind in classes else changed or [] for kind in kinds]


def _modules_of_fsdp() -> list[Any] | None:
    """The modules changed by `fully_shard`, from torch's table; None: there is no such table."""
    states, kind = _lookup(_STATES), _lookup(FSDP)
    return None if states is None or kind is None else [one for one in list(states) if isinstance(one, kind)]


def _tracked_or(scanned: Mapping[type, list[Any]], cls: Any) -> list[Any]:
    if cls not in _tracked:
        return scanned.get(cls, [])
    references = _tracked[cls].valuerefs()  # a copy: other threads may make objects
    return [item for item in (reference() for reference in references) if item is not None]


def register(item: Any) -> None:
    """Track an object that was made without its class's constructor, if its class is tracked."""
    for cls, registry in _tracked.items():
        if isinstance(item, cls):
            registry[id(item)] = item


def _track(cls: type, existing: Iterable[Any]) -> None:
    """Track the objects of a class and its subclasses from now on."""
    registry: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary((id(item), item) for item in existing)
    _tracked[cls] = registry

    def registering(original: Any) -> Any:
        @functools.wraps(original)
        def make(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            with contextlib.suppress(TypeError):  # a subclass with slots
                registry[id(self)] = self

        return make

    for name in _CONSTRUCTORS:
        if name in vars(cls):
            setattr(cls, name, registering(vars(cls)[name]))


def _scan(classes: Sequence[type]) -> list[list[Any]]:
    """The objects of each class among all that were created since the rank joined."""
    subclasses = [set(with_subclasses(cls)) for cls in classes]
    objects = objects_of(set().union(*subclasses))
    return [[item for item in objects if type(item) in matching] for matching in subclasses]


def with_subclasses(cls: type) -> Iterator[type]:
    """Yield a class and all that derive from it."""
    yield cls
    subclass: type
    for subclass in type.__subclasses__(cls):
        yield from with_subclasses(subclass)


def objects_of(types: set[type]) -> list[Any]:
    """All objects of exactly these types.

    Before Python 3.14, other threads' tuples that are not finished are among the objects, and a reference to one makes
    its thread fail with a SystemError (https://github.com/python/cpython/issues/127058). So the references to all
    objects are dropped within one call of C code, where threads do not switch: `list` calls `gc.get_objects`, and
    skips the objects of other types.
    """
    with gc_paused(on_main=True):  # finalizers and callbacks of the collector are Python code
        skipped: dict[type, tuple[()]] = dict.fromkeys(map(type, _all_objects()), ())
        for kind in types:
            skipped.pop(kind, None)
        flatten, select = itertools.chain.from_iterable, cast(Any, skipped.get)
        # type() instead of isinstance: lazy proxies answer the latter with side effects.
        objects = list(flatten(itertools.starmap(select, itertools.groupby(_all_objects(), type))))
    return [item for item in objects if type(item) in types]  # another thread may have made the first of its type


def _all_objects() -> Iterator[Any]:
    return itertools.chain.from_iterable(map(gc.get_objects, (None,)))


def storages_of(tensors: Iterable[Any], device_type: str) -> dict[int, int]:
    """Bytes of each distinct storage of these tensors on a device type, by address."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        try:
            storage = local.untyped_storage()
            if storage.device.type == device_type and storage.nbytes():
                sizes[storage.data_ptr()] = storage.nbytes()
        except Exception:  # no storage: sparse, fake, wrapped, uninitialized; a subclass may raise anything
            continue
    return sizes


class LiveTensors:
    """Storages of all live tensors; rescans only when the cost of the last scan has been amortised."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}
        self._due = 0.0

    def storages(self, device_type: str, *, now: bool = False) -> dict[int, int]:
        """As `storages_of`, for all live tensors; returns the last result if a rescan is not due, unless `now`."""
        start = time.monotonic()
        if now or start >= self._due:
            self._storages = storages_of(objects_of(set(with_subclasses(torch.Tensor))), device_type)
            end = time.monotonic()
            self._due = end + (end - start) / _MAX_SCAN_SHARE
        return self._storages
