"""The states of containers and of Python's own generators: their items, and how they get them back in place."""

from __future__ import annotations

import array
import collections
import functools
import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

__all__ = ["ITEMS", "Kind", "keep", "nothing", "set_dict", "values", "within"]


class Kind(NamedTuple):
    """One kind of state; an object may have several, such as the items and the attributes of a dict's subclass."""

    save: Callable[[Any], Any]
    """Returns the state of an object."""
    restore: Callable[[Any, Any], None]
    """Gives an object a state back."""
    children: Callable[[Any, Any], Iterable[Any]]
    """Returns the objects within, of an object and its state."""


def nothing(value: Any) -> None:
    """Save nothing: the object cannot change."""


def keep(value: Any, saved: Any) -> None:
    """Restore nothing: only what the object refers to can change."""


def within(value: Any, saved: Any) -> Iterable[Any]:
    """Return the objects in a state that is a sequence of them."""
    return saved  # type: ignore[no-any-return]


def _entries(value: Any, saved: dict[Any, Any]) -> Iterable[Any]:
    yield from saved
    yield from saved.values()


def values(value: Any, saved: dict[Any, Any]) -> Iterable[Any]:
    """Return the objects in a state that holds them by name."""
    return saved.values()


def _same_items(now: dict[Any, Any], saved: dict[Any, Any]) -> bool:
    if len(now) != len(saved):
        return False
    pairs = zip(dict.items(now), dict.items(saved), strict=True)
    return all(key is old_key and item is old_item for (key, item), (old_key, old_item) in pairs)


def set_dict(value: dict[Any, Any], saved: dict[Any, Any]) -> None:
    """Give a dict its items back, in their order."""
    if not _same_items(value, saved):
        dict.clear(value)
        dict.update(value, saved)


def _save_ordered(value: Any) -> dict[Any, Any]:
    return dict(collections.OrderedDict.items(value))


def _set_ordered(value: Any, saved: dict[Any, Any]) -> None:
    if not _same_items(_save_ordered(value), saved):
        collections.OrderedDict.clear(value)
        for key, item in saved.items():
            collections.OrderedDict.__setitem__(value, key, item)


def _set_list(value: list[Any], saved: list[Any]) -> None:
    if len(value) != len(saved) or any(a is not b for a, b in zip(list.__iter__(value), saved, strict=True)):
        list.__setitem__(value, slice(None), saved)


def _set_set(value: set[Any], saved: set[Any]) -> None:
    if set(map(id, value)) != set(map(id, saved)):
        set.clear(value)
        set.update(value, saved)


def _set_deque(value: collections.deque[Any], saved: list[Any]) -> None:
    collections.deque.clear(value)
    collections.deque.extend(value, saved)


def _set_bytes(value: bytearray, saved: bytes) -> None:
    if value != saved:
        value[:] = saved


def _save_array(value: array.array[Any]) -> array.array[Any]:
    return value[:]


def _set_array(value: array.array[Any], saved: array.array[Any]) -> None:
    value[:] = saved


ITEMS: dict[type, Kind] = {
    collections.OrderedDict: Kind(_save_ordered, _set_ordered, _entries),
    dict: Kind(dict.copy, set_dict, _entries),
    list: Kind(list.copy, _set_list, within),
    tuple: Kind(nothing, keep, lambda value, _: tuple.__iter__(value)),
    set: Kind(set.copy, _set_set, within),
    frozenset: Kind(nothing, keep, lambda value, _: frozenset.__iter__(value)),
    collections.deque: Kind(list, _set_deque, within),
    bytearray: Kind(bytes, _set_bytes, lambda *_: ()),
    array.array: Kind(_save_array, _set_array, lambda *_: ()),
    random.Random: Kind(random.Random.getstate, random.Random.setstate, lambda *_: ()),
    functools.partial: Kind(nothing, keep, lambda value, _: (value.func, value.args, value.keywords)),
}
