"""The states of data: containers, Python's own generators, tensors and NumPy arrays; how they get them back in place.

A tensor's state says which storage it has. Private hooks into torch, `snapshot.tensors` in the register.
"""

from __future__ import annotations

import array
import collections
import functools
import io
import operator
import random
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from msgspec import Struct

plain = torch._C.DisableTorchFunctionSubclass
"""Within this context, subclasses of tensors do not see what is done with them."""


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


def objects(save: Callable[[Any], Any], restore: Callable[[Any, Any], None]) -> Kind:
    """Return the kind of a state that is a sequence of the objects within."""
    return Kind(save, restore, within, lambda value, saved: all_same(save(value), saved))


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
    array.array: leaf(lambda value: value[:], _set_array),
    io.BytesIO: leaf(_save_stream, _set_stream),
    io.StringIO: leaf(_save_stream, _set_stream),
    random.Random: leaf(random.Random.getstate, random.Random.setstate),
    functools.partial: objects(_save_partial, _set_partial),
}
"""By type; a subclass comes before its base."""


class TensorState(NamedTuple):
    """What a tensor is, besides the content of its storage and its attributes in Python."""

    storage: Any
    """None: it has none, as the wrapper that a DTensor is."""
    size: int
    """Bytes of the storage."""
    version: int | None
    place: tuple[Any, ...]
    """Data type, offset, shape and strides within the storage."""
    is_leaf: bool
    requires_grad: bool
    grad: Any
    hooks: tuple[Any, Any]
    """The dicts of the hooks that backward calls with its gradient, and once that is added; None: there are none."""
    obstacle: str = ""
    """Why its content cannot be copied."""


def _save_tensor(tensor: Any) -> TensorState:
    is_leaf = tensor.is_leaf
    grad = tensor.grad if is_leaf or tensor.retains_grad else None  # torch warns about the others
    state = (is_leaf, tensor.requires_grad, grad, _hooks(tensor))
    wraps = hasattr(type(tensor), "__tensor_flatten__")
    if wraps or tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
        return TensorState(None, 0, None, (), *state)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = (
            "a quantized tensor"
            if tensor.is_quantized
            else "a nested tensor"
            if tensor.is_nested
            else "a sparse tensor"
        )
        return TensorState(None, 0, None, (), *state, obstacle=kind)
    try:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
    except (NotImplementedError, RuntimeError):
        return TensorState(None, 0, None, (), *state, obstacle="a tensor without memory of its own")
    version = None if tensor.is_inference() else tensor._version
    return TensorState(storage, size, version, _place(tensor), *state)


def _hooks(tensor: Any) -> tuple[Any, Any]:
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def _set_hooks(tensor: Any, saved: tuple[Any, Any]) -> None:
    for hooks, before in zip(_hooks(tensor), saved, strict=True):
        if before is None and hooks:
            hooks.clear()  # the graph refers to this dict as well


def _place(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _set_tensor(tensor: Any, saved: TensorState) -> None:
    storage = saved.storage
    if storage is not None and (tensor.untyped_storage() is not storage or _place(tensor) != saved.place):
        dtype, *place = saved.place
        if storage.nbytes() < saved.size:
            storage.resize_(saved.size)  # `set_` refuses what does not fit
        tensor.data = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)
    _set_hooks(tensor, saved.hooks)


def set_gradient(tensor: Any, saved: TensorState) -> None:
    """Give a tensor its gradient back, once all tensors have their places: torch checks that the two fit."""
    if not saved.is_leaf:
        return
    if not tensor.is_leaf:
        tensor.detach_()
    if tensor.requires_grad != saved.requires_grad:
        tensor.requires_grad_(saved.requires_grad)
    if tensor.grad is not saved.grad:
        tensor.grad = saved.grad


def refresh_tensor(tensor: Any, saved: TensorState) -> TensorState | None:
    """Return the state of a tensor now, if it has the same storage, place and gradient as before; None: it has not."""
    storage = saved.storage
    if storage is None or not saved.is_leaf:
        now = _save_tensor(tensor)
        same_objects = now.storage is storage and now.grad is saved.grad and all_same(now.hooks, saved.hooks)
        is_same = same_objects and now._replace(version=saved.version, hooks=saved.hooks) == saved
        return now if is_same else None
    if (
        not tensor.is_leaf
        or tensor.grad is not saved.grad
        or tensor.requires_grad != saved.requires_grad
        or tensor.untyped_storage() is not storage
        or storage.nbytes() != saved.size
        or _place(tensor) != saved.place
        or not all_same(_hooks(tensor), saved.hooks)
    ):
        return None
    version = None if saved.version is None else tensor._version
    return saved if version == saved.version else saved._replace(version=version)


tensor_kind = Kind(
    _save_tensor,
    _set_tensor,
    lambda _, saved: (saved.grad, *saved.hooks),
    lambda value, saved: refresh_tensor(value, saved) is not None,
)


class ArrayState(Struct, frozen=True):
    """What a NumPy array or a storage of torch is, besides the content of its memory."""

    base: Any
    """What owns the memory that an array shows; None: it is its own."""
    memory: torch.Tensor | None
    """Its own memory as bytes; None: it is of the base, or holds Python objects."""
    objects: Any
    """A copy, if it holds Python objects or has gaps; otherwise None."""
    layout: tuple[Any, ...] = ()
    """Data type, shape, strides, address, and whether it can be written; nothing for a storage."""

    def has_moved(self, value: Any) -> bool:
        """Whether an array's own memory is not that of then."""
        return bool(self.layout) and value.ctypes.data != self.layout[3]


def _ndarray_layout(value: Any) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.strides, value.ctypes.data, value.flags.writeable


def _save_ndarray(value: Any) -> ArrayState:
    numpy = sys.modules["numpy"]
    array = value if type(value) is numpy.ndarray else numpy.ndarray.view(value, numpy.ndarray)
    base, layout = numpy.ndarray.base.__get__(value), _ndarray_layout(array)
    if array.dtype.hasobject:
        return ArrayState(base, None, array.copy(), layout)
    if isinstance(base, (numpy.ndarray, torch.Tensor)) or (base is not None and not layout[-1]):
        return ArrayState(base, None, None, layout)
    if is_read_only := not layout[-1]:  # its owner can make it writable
        numpy.ndarray.setflags(value, write=True)
        array = numpy.ndarray.view(value, numpy.ndarray)
    try:
        flat = array.ravel(order="K")
        if not numpy.shares_memory(flat, array):
            return ArrayState(base, None, array.copy(), layout)
        return ArrayState(base, torch.from_numpy(flat.view(numpy.uint8)), None, layout)
    finally:
        if is_read_only:
            numpy.ndarray.setflags(value, write=False)


def _set_ndarray(value: Any, saved: ArrayState) -> None:
    numpy = sys.modules["numpy"]
    array = numpy.ndarray.view(value, numpy.ndarray)
    dtype, shape, strides, address, is_writable = saved.layout
    if array.ctypes.data != address:
        raise ValueError("NumPy has replaced its memory")
    if _ndarray_layout(array) != saved.layout:
        with warnings.catch_warnings():  # NumPy deprecates what the cell did as well
            warnings.simplefilter("ignore", DeprecationWarning)
            numpy.ndarray.dtype.__set__(value, dtype)
            numpy.ndarray.shape.__set__(value, shape)
            if value.strides != strides:
                numpy.ndarray.strides.__set__(value, strides)
            array = numpy.ndarray.view(value, numpy.ndarray)
    if saved.objects is not None:
        if not array.flags.writeable:
            numpy.ndarray.setflags(value, write=True)
            array = numpy.ndarray.view(value, numpy.ndarray)
        array[...] = saved.objects
    if value.flags.writeable != is_writable:
        numpy.ndarray.setflags(value, write=is_writable)


def _ndarray_children(value: Any, saved: ArrayState) -> list[Any]:
    items = saved.objects.ravel().tolist() if saved.objects is not None and saved.objects.dtype.hasobject else []
    return items if saved.memory is not None else [saved.base, *items]


def _same_ndarray(value: Any, saved: ArrayState) -> bool:
    numpy = sys.modules["numpy"]
    array = value if type(value) is numpy.ndarray else numpy.ndarray.view(value, numpy.ndarray)
    if _ndarray_layout(array) != saved.layout or numpy.ndarray.base.__get__(value) is not saved.base:
        return False
    if saved.objects is None:
        return True
    # The items of a structured array are new tuples each time, so that it counts as changed.
    return array.dtype.kind == "O" and all(map(operator.is_, array.flat, saved.objects.flat))


array_kind = Kind(_save_ndarray, _set_ndarray, _ndarray_children, _same_ndarray)


storage_kind = Kind(
    lambda value: ArrayState(None, torch.empty(0, dtype=torch.uint8, device=value.device).set_(value), None),
    keep,
    lambda *_: (),
    lambda value, saved: saved.memory.numel() == value.nbytes() and saved.memory.data_ptr() == value.data_ptr(),
)
