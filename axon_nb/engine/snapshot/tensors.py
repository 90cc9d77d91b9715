"""Tensors and NumPy arrays as parts of a session's state: which storage each has, and how it gets it back.

Private hooks into torch, `snapshot.tensors` in the register.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from axon_nb.engine.snapshot.containers import Kind

__all__ = ["ArrayState", "TensorState", "array_kind", "plain", "set_gradient", "tensor_kind"]

plain = torch._C.DisableTorchFunctionSubclass
"""Within this context, subclasses of tensors do not see what is done with them."""


@dataclass(frozen=True, slots=True)
class TensorState:
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
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "a quantized tensor" if tensor.is_quantized else "a sparse tensor"
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


tensor_kind = Kind(_save_tensor, _set_tensor, lambda _, saved: (saved.grad,))


@dataclass(frozen=True, slots=True)
class ArrayState:
    """What a NumPy array is, besides the content of its memory."""

    base: Any
    """The array or tensor whose memory it shows; None: its own."""
    memory: torch.Tensor | None
    """Its own memory as bytes; None: of the base, of Python objects, or read-only."""
    objects: Any
    """A copy, if it holds Python objects; otherwise None."""
    shape: tuple[int, ...]


def _save_array(value: Any) -> ArrayState:
    numpy = sys.modules["numpy"]
    base, kinds = value.base, (numpy.ndarray, torch.Tensor)
    if isinstance(base, kinds) or not value.flags.writeable:
        return ArrayState(base if isinstance(base, kinds) else None, None, None, value.shape)
    if value.dtype.hasobject:
        return ArrayState(None, None, value.copy(), value.shape)
    flat = numpy.asarray(value).ravel(order="K")
    if not numpy.shares_memory(flat, value):
        return ArrayState(None, None, value.copy(), value.shape)
    return ArrayState(None, torch.from_numpy(flat.view(numpy.uint8)), None, value.shape)


def _set_array(value: Any, saved: ArrayState) -> None:
    if value.shape != saved.shape:
        value.shape = saved.shape
    if saved.objects is not None:
        value[...] = saved.objects


def _array_children(value: Any, saved: ArrayState) -> tuple[Any, ...]:
    if saved.objects is not None and saved.objects.dtype.hasobject:
        return tuple(saved.objects.flat)
    return (saved.base,)


array_kind = Kind(_save_array, _set_array, _array_children)
