"""Values as parts that travel without a copy: a pickle (protocol 5), and the memory of tensors, arrays and tables.

The notebook uses it as well, and imports torch only when a tensor arrives. If torch cannot be imported, a tensor
arrives as a NumPy array (bfloat16 as float32). An array of another library on a device, such as CuPy's, is sent as a
NumPy array, through DLPack or NumPy's interface: the other side may have neither the library nor a GPU.

Functions of cells arrive in the namespace of the receiving process, as if they were defined in a cell there. By itself,
cloudpickle would give each function a private copy of the names it uses, which later cells could not reassign.
"""

from __future__ import annotations

import dis
import importlib
import io
import pickle
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
from IPython.core.getipython import get_ipython

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
_CANNOT_PICKLE = re.compile(r"cannot pickle '([^']+)'")
_NAMES = {"_thread.lock": "a lock", "_thread.RLock": "a lock", "weakref": "a weak reference"}
_HOST = (1, 3)
"""DLPack's types of devices whose memory the CPU reads: its own, and pinned memory."""
_CUDA = 2


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
        if kind is memoryview:
            return _make_view, (obj.tobytes(), obj.format, obj.shape, obj.readonly)
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(obj, torch.Tensor):
            return self._reduce_tensor(torch, obj) if is_dense(obj) else _reduce_other_tensor(torch, obj)
        if numpy is not None and isinstance(obj, numpy.ndarray) and (reduced := _reduce_subclass(numpy, obj)):
            return reduced
        return super().reducer_override(obj)

    def _reduce_tensor(self, torch: Any, tensor: Any) -> Any:
        kind, attributes = type(tensor), dict(vars(tensor))
        requires_grad = tensor.requires_grad and tensor.is_leaf
        tensor = tensor.detach().as_subclass(torch.Tensor)
        order = sorted(range(tensor.ndim), key=lambda dim: -tensor.stride(dim))
        if not tensor.permute(order).is_contiguous():
            order = list(range(tensor.ndim))
        key = (str(tensor.device), tensor.data_ptr(), tensor.dtype, tensor.stride(), tensor.shape, tensor.is_conj())
        memory = self._memory.get(key) if tensor.numel() else None
        dense = tensor.resolve_conj().resolve_neg().cpu().permute(order).contiguous()
        if memory is None:
            flat = dense.as_strided((dense.numel(),), (1,))  # one element may have any stride
            data = flat.view(torch.uint8).numpy() if flat.numel() else b""
            memory = self._memory[key] = _TensorMemory(data)
        dtype = str(tensor.dtype).removeprefix("torch.")
        flags = (issubclass(kind, torch.nn.Parameter), requires_grad)
        reduced = (memory, dtype, tuple(dense.shape), tuple(order), flags)
        if kind in (torch.Tensor, torch.nn.Parameter) and not attributes:
            return _make_tensor, reduced
        return _make_subclass, (kind, attributes, *reduced)


def is_dense(tensor: Any) -> bool:
    """Whether a tensor is what lies in its memory, besides its class, its attributes and autograd."""
    torch = sys.modules["torch"]
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        own = ("__reduce_ex__", "__getstate__", "__setstate__", "__slots__", "__tensor_flatten__", "__torch_dispatch__")
        bases = kind.__mro__[: kind.__mro__.index(torch.Tensor)]
        if any(name in vars(base) for base in bases if base is not torch.nn.Parameter for name in own):
            return False
    plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return plain and tensor.device.type != "meta"


def dressed(tensor: Any, kind: Any, attributes: dict[str, Any], *, requires_grad: bool) -> Any:
    """Return a plain tensor as one of class `kind`; attributes set by a class that is not here are kept."""
    torch = sys.modules["torch"]
    if kind is torch.nn.Parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad)
    else:
        tensor = (tensor if kind is torch.Tensor else tensor.as_subclass(kind)).requires_grad_(requires_grad)
    vars(tensor).update(attributes)
    return tensor


def holds_exactly(joined: Any, part: Any) -> bool:
    """Whether the dtype of `joined` holds the whole numbers of one of its parts, an array, a tensor or a table."""
    if part.ndim == 2 and hasattr(part, "columns"):
        columns = range(part.shape[1])
        return all(holds_exactly(joined.iloc[:, column], part.iloc[:, column]) for column in columns)
    if part.dtype == joined.dtype:
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(part, torch.Tensor):
        if part.is_floating_point() or part.is_complex() or part.is_meta:
            return True
        there = part.to(joined.dtype)
        return bool(((there.real if there.is_complex() else there).to(part.dtype) == part).all())
    if getattr(part.dtype, "kind", "") not in ("i", "u"):
        return True
    there = part.astype(joined.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, about numbers that came to lie outside
        return bool((there.astype(part.dtype) == part).all())


def _reduce_other_tensor(torch: Any, tensor: Any) -> Any:
    requires_grad = tensor.requires_grad and tensor.is_leaf
    if tensor.is_nested and tensor.layout is torch.strided:
        return _make_nested, ([part.detach().clone() for part in tensor.detach().unbind()], requires_grad)
    if not (
        tensor.is_leaf and tensor.device.type in ("cpu", "meta")
    ):  # neither autograd's history nor a device travels
        attributes = {name: item for name, item in vars(tensor).items() if not name.startswith("_")}
        tensor = tensor.detach() if tensor.device.type == "meta" else tensor.detach().cpu()
        vars(tensor).update(attributes)
        tensor.requires_grad_(requires_grad)
    function, arguments, *state = tensor.__reduce_ex__(5)
    return _make_quietly, (function, *arguments), *state


def _reduce_subclass(numpy: Any, array: Any) -> Any:
    """Return how to recreate an array of a class of which NumPy would lose something; None: of another."""
    kind = type(array)
    if isinstance(array, numpy.ma.MaskedArray):
        return (_make_hard, (array.copy().soften_mask(),)) if array.hardmask else None
    ways = ("__reduce__", "__reduce_ex__", "__setstate__")
    is_own = any(getattr(kind, way) is not getattr(numpy.ndarray, way) for way in ways)
    if is_own or isinstance(array, numpy.memmap) or not getattr(array, "__dict__", None):
        return None
    return _make_array_of, (array.view(numpy.ndarray), kind, vars(array))


def _identity(data: Any) -> Any:
    return data


def _make_view(data: bytes, code: Any, shape: tuple[int, ...], is_readonly: bool) -> memoryview:
    return memoryview(data if is_readonly else bytearray(data)).cast(code, shape)


def _make_hard(array: Any) -> Any:
    return array.harden_mask()


def _make_array_of(array: Any, kind: Any, attributes: dict[str, Any]) -> Any:
    array = array.view(kind)
    vars(array).update(attributes)
    return array


def _make_quietly(function: Any, *arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what it does itself
        return function(*arguments)


def _make_nested(parts: list[Any], requires_grad: bool) -> Any:
    torch = importlib.import_module("torch")
    return _make_quietly(torch.nested.nested_tensor, parts).requires_grad_(requires_grad)


def _make_subclass(kind: Any, attributes: dict[str, Any], *reduced: Any) -> Any:
    tensor = _make_tensor(*reduced)
    if "torch" not in sys.modules:
        return tensor
    return dressed(tensor.detach(), kind, attributes, requires_grad=tensor.requires_grad)


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


def unpicklable(error: BaseException) -> str:
    """Name what Python refuses to pickle, such as ``a lock``; empty if the error is another one."""
    match = _CANNOT_PICKLE.search(str(error))
    return _NAMES.get(match[1], f"a {match[1]}") if match else ""


def cannot_pickle(error: BaseException) -> str:
    """Say why `pack` failed; reads after the name of the value and a colon."""
    match = _CANNOT_PICKLE.search(str(error))
    if match:
        return f"{type(error).__name__}: cannot pickle {match.group(1)!r} object, which stays with its process"
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def is_on_device(value: Any) -> bool:
    """Whether this is an array of another library whose memory the CPU cannot read."""
    device = _dlpack_device(value)
    return device is not None and device[0] not in _HOST


def array_device(value: Any) -> str | None:
    """Return where an array of another library is, such as ``cuda:0``; None if it is no such array."""
    device = _dlpack_device(value)
    if device is None:
        return "cpu" if _has_interface(value) else None
    return "cpu" if device[0] in _HOST else f"{'cuda' if device[0] == _CUDA else 'device'}:{device[1]}"


def as_numpy(value: Any) -> Any:
    """Return an array of another library as a NumPy array.

    Raises:
        TypeError: none of the ways that such libraries offer works.
    """
    import numpy as np

    torch = sys.modules.get("torch")
    ways: list[Callable[[], Any]] = []
    if _has_interface(value):
        ways.append(lambda: np.asarray(value))
    elif is_on_device(value):
        if type(value).__module__.partition(".")[0] == "cupy":
            ways.append(value.get)  # it waits for what is queued, in every version
        ways.append(lambda: np.from_dlpack(value, device="cpu"))  # NumPy 2.1 and later
        if torch is not None:
            ways.append(lambda: torch.from_dlpack(value).cpu().numpy())
        ways.append(lambda: np.asarray(value))
    else:
        ways.append(lambda: np.from_dlpack(value))
    reasons = []
    for way in ways:
        try:
            array = way()
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        if isinstance(array, np.ndarray) and not array.dtype.hasobject:
            return array
    raise TypeError(f"{type(value).__name__} gives no NumPy array: {'; '.join(reasons)}")


def _has_interface(value: Any) -> bool:
    return not isinstance(value, type) and isinstance(getattr(value, "__array_interface__", None), dict)


def _dlpack_device(value: Any) -> tuple[int, int] | None:
    """Return DLPack's type and number of the device; None for tensors, NumPy arrays and other objects."""
    if not hasattr(type(value), "__dlpack_device__"):
        return None
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if (numpy and isinstance(value, numpy.ndarray)) or (torch and isinstance(value, torch.Tensor)):
        return None
    try:
        kind, number = value.__dlpack_device__()
        return int(kind), int(number)
    except Exception:  # such as an array whose memory was donated
        return None
