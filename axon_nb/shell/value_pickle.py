"""Values as parts that travel without a copy: a pickle (protocol 5), and the memory of tensors, arrays and tables.

The notebook uses it as well, and imports torch only when a tensor arrives. If torch cannot be imported, a tensor
arrives as a NumPy array (bfloat16 as float32). An array of another library on a device, such as CuPy's, is sent as a
NumPy array: the other side may have neither the library nor a GPU.

Functions of cells arrive in the namespace of the receiving process, as if they were defined in a cell there. By itself,
cloudpickle would give each function a private copy of the names it uses, which later cells could not reassign.
"""

from __future__ import annotations

import dis
import importlib
import io
import pickle
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle
from IPython.core.getipython import get_ipython

from axon_nb.shell.foreign_arrays import as_numpy, is_on_device

__all__ = ["namespace", "pack", "reduce_function", "unpack"]

_ATTRIBUTES = (
    "__name__",
    "__qualname__",
    "__module__",
    "__doc__",
    "__defaults__",
    "__kwdefaults__",
    "__annotations__",
)
_MAX_INLINE_BYTES = 4 << 10
"""Smaller memory travels within the pickle."""


def namespace() -> dict[str, Any]:
    """Return the variables that this process's cells see; without IPython those of the main module."""
    shell = get_ipython()
    return vars(sys.modules["__main__"]) if shell is None else shell.user_ns


def reduce_function(function: types.FunctionType, *, with_names: bool = False) -> Any:
    """Return how to recreate a function whose globals are `namespace()`.

    Args:
        function: The function.
        with_names: Whether to send the global names that it uses along; they never replace a variable.
    """
    cells = function.__closure__ or ()
    state = {
        "attributes": {name: getattr(function, name) for name in _ATTRIBUTES},
        "dict": dict(vars(function)),
        "closure": [_contents(cell) for cell in cells],
        "names": _used_globals(function) if with_names else {},
    }
    return _make_function, (function.__code__, len(cells)), state, None, None, _set_function


def _used_globals(function: types.FunctionType) -> dict[str, Any]:
    variables = function.__globals__
    hidden = getattr(get_ipython(), "user_ns_hidden", {})  # the shell's own names, such as `get_ipython`
    names = dict.fromkeys(_global_names(function.__code__))
    return {name: variables[name] for name in names if name in variables and name not in hidden}


def _global_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _contents(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not bound yet
        return []


def _make_function(code: types.CodeType, num_cells: int) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in range(num_cells))
    return types.FunctionType(code, namespace(), code.co_name, None, cells)


def _set_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    for name, value in state["attributes"].items():
        setattr(function, name, value)
    vars(function).update(state["dict"])
    for cell, contents in zip(function.__closure__ or (), state["closure"], strict=True):
        if contents:
            cell.cell_contents = contents[0]
    for name, value in state["names"].items():
        function.__globals__.setdefault(name, value)


class _TensorMemory:
    """The memory of a tensor; tensors that view the same elements share it, such as tied weights."""

    def __init__(self, data: Any) -> None:
        self.data = data


class _ValuePickler(cloudpickle.Pickler):
    def __init__(self, file: Any, buffer_callback: Any, *, with_names: bool, as_is: bool) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._with_names = with_names
        self._as_is = as_is
        self._memory: dict[Any, _TensorMemory] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Return how to recreate an object; called for all but the most basic types."""
        kind = type(obj)
        if kind is _TensorMemory:
            return _identity, (pickle.PickleBuffer(obj.data),)
        if kind is types.FunctionType and obj.__globals__ is namespace():
            return reduce_function(obj, with_names=self._with_names)
        if not self._as_is and is_on_device(obj):
            return _identity, (as_numpy(obj),)
        torch = sys.modules.get("torch")
        if torch is not None and kind in (torch.Tensor, torch.nn.Parameter) and _is_dense(torch, obj):
            return self._reduce_tensor(torch, obj)
        return super().reducer_override(obj)

    def _reduce_tensor(self, torch: Any, tensor: Any) -> Any:
        order = sorted(range(tensor.ndim), key=lambda dim: -tensor.stride(dim))
        if not tensor.detach().permute(order).is_contiguous():
            order = list(range(tensor.ndim))
        key = (str(tensor.device), tensor.data_ptr(), tensor.dtype, tensor.stride(), tensor.shape, tensor.is_conj())
        memory = self._memory.get(key) if tensor.numel() else None
        dense = tensor.detach().resolve_conj().resolve_neg().cpu().permute(order).contiguous()
        if memory is None:
            flat = dense.as_strided((dense.numel(),), (1,))  # one element may have any stride
            data = flat.view(torch.uint8).numpy() if flat.numel() else b""
            memory = self._memory[key] = _TensorMemory(data)
        dtype = str(tensor.dtype).removeprefix("torch.")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        requires_grad = tensor.requires_grad and tensor.is_leaf
        return _make_tensor, (memory, dtype, tuple(dense.shape), tuple(order), (is_parameter, requires_grad))


def _is_dense(torch: Any, tensor: Any) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return plain and tensor.device.type != "meta" and not vars(tensor)


def _identity(data: Any) -> Any:
    return data


def _make_tensor(
    data: Any, dtype: str, shape: tuple[int, ...], order: tuple[int, ...], flags: tuple[bool, bool]
) -> Any:
    is_parameter, requires_grad = flags
    inverse = sorted(range(len(order)), key=order.__getitem__)
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return _make_array(data, dtype, shape).transpose(inverse)
    flat = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8, device="cpu")
    tensor = flat.view(getattr(torch, dtype)).reshape(shape).permute(inverse)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _make_array(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import numpy as np

    if dtype == "bfloat16":  # the upper half of a float32
        upper = np.frombuffer(data, np.uint16).astype(np.uint32)
        return (upper << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


def pack(value: Any, *, with_names: bool = False, as_is: bool = False) -> list[Any]:
    """Pack a value into parts: the pickle, then memory that the value still owns; do not change it until it is sent.

    Args:
        value: Anything that cloudpickle can pickle.
        with_names: Whether functions of cells take along the global names that they use.
        as_is: Whether arrays of other libraries on a device stay such arrays.
    """
    stream, memory = io.BytesIO(), []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _MAX_INLINE_BYTES:
            return True
        memory.append(raw)
        return False

    _ValuePickler(stream, keep_in_band, with_names=with_names, as_is=as_is).dump(value)
    return [stream.getbuffer(), *memory]


def unpack(parts: Sequence[Any]) -> Any:
    """Unpack a value; its arrays and tensors are views of `parts`, which must not be used otherwise.

    Raises:
        Exception: anything that its classes raise, such as ImportError.
    """
    return pickle.loads(parts[0], buffers=parts[1:])
