"""The states of containers and of Python's own generators: their items, and how they get them back in place."""

from __future__ import annotations

import array
import collections
import functools
import io
import operator
import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """One kind of state; an object may have several, such as the items and the attributes of a dict's subclass."""

    save: Callable[[Any], Any]
    """Returns the state of an object."""
    restore: Callable[[Any, Any], None]
    """Gives an object a state back."""
    children: Callable[[Any, Any], Iterable[Any]]
    """Returns the objects within, of an object and its state."""
    same: Callable[[Any, Any], bool] | None
    """Whether an object still has a state, which refers to the same objects; None: nothing is within, save it again."""


def nothing(value: Any) -> None:
    """Save nothing: the object cannot change."""


def keep(value: Any, saved: Any) -> None:
    """Restore nothing: only what the object refers to can change."""


def always(value: Any, saved: Any) -> bool:
    """Say that an object is the same, as it cannot change."""
    return True


def within(value: Any, saved: Any) -> Iterable[Any]:
    """Return the objects in a state that is a sequence of them."""
    return saved  # type: ignore[no-any-return]


def leaf(save: Callable[[Any], Any], restore: Callable[[Any, Any], None]) -> Kind:
    """Return the kind of a state without objects within, which is cheap to save."""
    return Kind(save, restore, lambda *_: (), None)


def _entries(value: Any, saved: dict[Any, Any]) -> Iterable[Any]:
    yield from saved
    yield from saved.values()


def values(value: Any, saved: dict[Any, Any]) -> Iterable[Any]:
    """Return the objects in a state that holds them by name."""
    return saved.values()


def all_same(now: Any, saved: Any) -> bool:
    """Whether two sequences have the same objects."""
    return len(now) == len(saved) and all(map(operator.is_, now, saved))


def same_dict(now: dict[Any, Any], saved: dict[Any, Any]) -> bool:
    """Whether two dicts have the same objects in the same order; a subclass's own methods do not count."""
    if not now and not saved:  # most dicts of modules
        return True
    return (
        len(now) == len(saved)
        and all(map(operator.is_, dict.values(now), dict.values(saved)))
        and all(map(operator.is_, dict.keys(now), dict.keys(saved)))
    )


def set_dict(value: dict[Any, Any], saved: dict[Any, Any]) -> None:
    """Give a dict its items back, in their order."""
    if not same_dict(value, saved):
        dict.clear(value)
        dict.update(value, saved)


def _save_ordered(value: Any) -> dict[Any, Any]:
    return dict(collections.OrderedDict.items(value))


def _same_ordered(value: Any, saved: dict[Any, Any]) -> bool:
    if not value and not saved:
        return True
    keys, items = collections.OrderedDict.keys(value), collections.OrderedDict.values(value)
    return (
        len(value) == len(saved)
        and all(map(operator.is_, keys, saved))
        and all(map(operator.is_, items, saved.values()))
    )


def _set_ordered(value: Any, saved: dict[Any, Any]) -> None:
    if not _same_ordered(value, saved):
        collections.OrderedDict.clear(value)
        for key, item in saved.items():
            collections.OrderedDict.__setitem__(value, key, item)


def _save_default(value: Any) -> tuple[Any, dict[Any, Any]]:
    return value.default_factory, dict(dict.items(value))


def _set_default(value: Any, saved: tuple[Any, dict[Any, Any]]) -> None:
    value.default_factory = saved[0]
    set_dict(value, saved[1])


def _default_entries(value: Any, saved: tuple[Any, dict[Any, Any]]) -> Iterable[Any]:
    yield saved[0]
    yield from _entries(value, saved[1])


def _same_list(value: list[Any], saved: list[Any]) -> bool:
    return len(value) == len(saved) and all(map(operator.is_, list.__iter__(value), saved))


def _set_list(value: list[Any], saved: list[Any]) -> None:
    if not _same_list(value, saved):
        list.__setitem__(value, slice(None), saved)


def _same_set(value: set[Any], saved: set[Any]) -> bool:
    return len(value) == len(saved) and set(map(id, set.__iter__(value))) == set(map(id, saved))


def _set_set(value: set[Any], saved: set[Any]) -> None:
    if not _same_set(value, saved):
        set.clear(value)
        set.update(value, saved)


def _set_deque(value: collections.deque[Any], saved: list[Any]) -> None:
    if not all_same(value, saved):
        collections.deque.clear(value)
        collections.deque.extend(value, saved)


def _set_bytes(value: bytearray, saved: bytes) -> None:
    if value != saved:
        value[:] = saved


def _save_array(value: array.array[Any]) -> array.array[Any]:
    return value[:]


def _set_array(value: array.array[Any], saved: array.array[Any]) -> None:
    if value.tobytes() != saved.tobytes():
        value[:] = saved


def _save_partial(value: Any) -> tuple[Any, ...]:
    return value.func, value.args, value.keywords


def _set_partial(value: Any, saved: tuple[Any, ...]) -> None:
    if not all_same(_save_partial(value), saved):
        value.__setstate__((*saved, vars(value)))


def _save_stream(value: Any) -> tuple[Any, ...]:
    return value.__getstate__()[:-1]  # type: ignore[no-any-return] # the last are the attributes


def _set_stream(value: Any, saved: tuple[Any, ...]) -> None:
    if _save_stream(value) != saved:
        value.__setstate__((*saved, None))


ITEMS: dict[type, Kind] = {
    collections.OrderedDict: Kind(_save_ordered, _set_ordered, _entries, _same_ordered),
    collections.defaultdict: Kind(
        _save_default,
        _set_default,
        _default_entries,
        lambda value, saved: value.default_factory is saved[0] and same_dict(value, saved[1]),
    ),
    dict: Kind(dict.copy, set_dict, _entries, same_dict),
    list: Kind(list.copy, _set_list, within, _same_list),
    tuple: Kind(nothing, keep, lambda value, _: tuple.__iter__(value), always),
    set: Kind(set.copy, _set_set, within, _same_set),
    frozenset: Kind(nothing, keep, lambda value, _: frozenset.__iter__(value), always),
    collections.deque: Kind(list, _set_deque, within, all_same),
    bytearray: leaf(bytes, _set_bytes),
    array.array: leaf(_save_array, _set_array),
    io.BytesIO: leaf(_save_stream, _set_stream),
    io.StringIO: leaf(_save_stream, _set_stream),
    random.Random: leaf(random.Random.getstate, random.Random.setstate),
    functools.partial: Kind(
        _save_partial, _set_partial, within, lambda value, saved: all_same(_save_partial(value), saved)
    ),
}
"""By type; a subclass comes before its base."""
