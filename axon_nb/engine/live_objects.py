"""The living objects of some classes of torch, known from when they are made.

Looking through all objects of a process takes 20 to 100 ms, more than all the rest of a recovery. So each class is
followed from the first time that somebody asks for its objects: those that are there then are found by one such pass,
and later ones are noted when they are made. Modules that `fully_shard` has changed are in a table of torch's own.

The storages of all tensors of this process that Python knows: found seldom, as it means a look at every object.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

__all__ = ["LivingTensors", "living", "storages_of"]

_FSDP = ("torch.distributed.fsdp", "FSDPModule")
_STATES = ("torch.distributed._composable_state", "_module_state_mapping")
_MAKERS = ("__init__", "__setstate__")

_followed: dict[type, weakref.WeakValueDictionary[int, Any]] = {}


def _found(place: tuple[str, str]) -> Any:
    return getattr(sys.modules.get(place[0]), place[1], None)


def living(*kinds: tuple[str, str]) -> list[list[Any]]:
    """The objects of each kind, a list for each.

    Args:
        *kinds: (module, class): looked up where the module has been imported, else there is none.
    """
    classes = {kind: _found(kind) for kind in kinds}
    states = _found(_STATES)
    if states is not None and classes.get(_FSDP) is not None:
        modules = [module for module in list(states) if isinstance(module, classes[_FSDP])]
    else:
        modules = None
    unknown = [
        wanted
        for kind, wanted in classes.items()
        if wanted is not None and wanted not in _followed and (kind != _FSDP or modules is None)
    ]
    passed = dict(zip(unknown, _look_through_all(unknown), strict=True)) if unknown else {}
    for kind, wanted in classes.items():
        if wanted in passed and kind != _FSDP:  # whose objects are not made, but changed into it
            _follow(wanted, passed[wanted])
    found = []
    for kind, wanted in classes.items():
        if kind == _FSDP and modules is not None:
            found.append(modules)
        elif wanted in _followed:
            references = _followed[wanted].valuerefs()  # a copy: other threads may make objects
            found.append([item for item in (reference() for reference in references) if item is not None])
        else:
            found.append(passed.get(wanted, []))
    return found


def _follow(wanted: type, there: Iterable[Any]) -> None:
    """Note the objects of a class, and of those that are derived from it, from now on."""
    noted: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary((id(item), item) for item in there)
    _followed[wanted] = noted

    def noting(maker: Any) -> Any:
        @functools.wraps(maker)
        def make(self: Any, *args: Any, **kwargs: Any) -> None:
            maker(self, *args, **kwargs)
            with contextlib.suppress(TypeError):  # a derived class with slots
                noted[id(self)] = self

        return make

    for name in _MAKERS:
        if name in vars(wanted):
            setattr(wanted, name, noting(vars(wanted)[name]))


def _look_through_all(classes: Sequence[type]) -> list[list[Any]]:
    """The objects of each class, among all that came since the rank joined."""
    objects = gc.get_objects()
    found: list[list[Any]] = [[] for _ in classes]
    # Types first, of which there are few. type() and not isinstance: lazy proxies answer the latter with side effects.
    places = {
        kind: place
        for kind in set(map(type, objects))
        for place, wanted in zip(found, classes, strict=True)
        if issubclass(kind, wanted)
    }
    if places:
        for item in objects:
            if (place := places.get(type(item))) is not None:
                place.append(item)
    return found


_SHARE = 0.001
"""At most this part of the time goes into looking."""


def storages_of(tensors: Iterable[Any], device_type: str) -> dict[int, int]:
    """Bytes of the storages of these tensors on a kind of device, each once, by where it is in memory."""
    found: dict[int, int] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        try:
            storage = local.untyped_storage()
            if storage.device.type == device_type and storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # sparse, fake, wrapped: it has none
            continue
    return found


class LivingTensors:
    """Looks again when enough time has passed for what a look costs."""

    def __init__(self) -> None:
        self._found: dict[int, int] = {}
        self._due = 0.0

    def storages(self, device_type: str, *, now: bool = False) -> dict[int, int]:
        """As `storages_of` of all tensors; those of the last look when it is too early for another, unless `now`."""
        began = time.monotonic()
        if now or began >= self._due:
            objects = gc.get_objects()
            # type() and not isinstance: lazy proxies answer the latter with side effects.
            kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
            self._found = storages_of((item for item in objects if type(item) in kinds), device_type)
            del objects
            end = time.monotonic()
            self._due = end + (end - began) / _SHARE
        return self._found
