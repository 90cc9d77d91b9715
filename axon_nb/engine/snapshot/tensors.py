"""Tensors and NumPy arrays as parts of a session's state: which storage each has, and how it gets it back.

Private hooks into torch, `snapshot.tensors` in the register.
"""

from __future__ import annotations

import operator
import sys
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from axon_nb.engine.snapshot.containers import Kind, keep

plain = torch._C.DisableTorchFunctionSubclass
"""Within this context, subclasses of tensors do not see what is done with them."""


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
    obstacle: str = ""
    """Why its content cannot be copied."""


def _save_tensor(tensor: Any) -> TensorState:
    is_leaf = tensor.is_leaf
    grad = tensor.grad if is_leaf or tensor.retains_grad else None  # torch warns about the others
    state, wraps = (is_leaf, tensor.requires_grad, grad), hasattr(type(tensor), "__tensor_flatten__")
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


def _place(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _set_tensor(tensor: Any, saved: TensorState) -> None:
    storage = saved.storage
    if storage is not None and (tensor.untyped_storage() is not storage or _place(tensor) != saved.place):
        dtype, *place = saved.place
        if storage.nbytes() < saved.size:
            storage.resize_(saved.size)  # `set_` refuses what does not fit
        tensor.data = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)


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
        is_same = now.storage is storage and now.grad is saved.grad and now._replace(version=saved.version) == saved
        return now if is_same else None
    if (
        not tensor.is_leaf
        or tensor.grad is not saved.grad
        or tensor.requires_grad != saved.requires_grad
        or tensor.untyped_storage() is not storage
        or storage.nbytes() != saved.size
        or _place(tensor) != saved.place
    ):
        return None
    version = None if saved.version is None else tensor._version
    return saved if version == saved.version else saved._replace(version=version)


tensor_kind = Kind(
    _save_tensor,
    _set_tensor,
    lambda _, saved: (saved.grad,),
    lambda value, saved: refresh_tensor(value, saved) is not None,
)


@dataclass(frozen=True, slots=True)
class ArrayState:
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


def _array_layout(value: Any) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.strides, value.ctypes.data, value.flags.writeable


def _save_array(value: Any) -> ArrayState:
    numpy = sys.modules["numpy"]
    array = value if type(value) is numpy.ndarray else numpy.ndarray.view(value, numpy.ndarray)
    base, layout = numpy.ndarray.base.__get__(value), _array_layout(array)
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


def _set_array(value: Any, saved: ArrayState) -> None:
    numpy = sys.modules["numpy"]
    array = numpy.ndarray.view(value, numpy.ndarray)
    dtype, shape, strides, address, is_writable = saved.layout
    if array.ctypes.data != address:
        raise ValueError("NumPy has replaced its memory")
    if _array_layout(array) != saved.layout:
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


def _items_of(array: Any) -> list[Any]:
    return array.ravel().tolist()  # type: ignore[no-any-return]


def _array_children(value: Any, saved: ArrayState) -> list[Any]:
    items = _items_of(saved.objects) if saved.objects is not None and saved.objects.dtype.hasobject else []
    return items if saved.memory is not None else [saved.base, *items]


def _same_array(value: Any, saved: ArrayState) -> bool:
    numpy = sys.modules["numpy"]
    array = value if type(value) is numpy.ndarray else numpy.ndarray.view(value, numpy.ndarray)
    if _array_layout(array) != saved.layout or numpy.ndarray.base.__get__(value) is not saved.base:
        return False
    if saved.objects is None:
        return True
    # The items of a structured array are new tuples each time, so that it counts as changed.
    return array.dtype.kind == "O" and all(map(operator.is_, array.flat, saved.objects.flat))


array_kind = Kind(_save_array, _set_array, _array_children, _same_array)
storage_kind = Kind(
    lambda value: ArrayState(None, torch.empty(0, dtype=torch.uint8, device=value.device).set_(value), None),
    keep,
    lambda *_: (),
    lambda value, saved: saved.memory.numel() == value.nbytes() and saved.memory.data_ptr() == value.data_ptr(),
)
