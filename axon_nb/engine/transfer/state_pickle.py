"""Pickles the state of a session without the contents of its storages: those are references to where they are kept.

A tensor is its layout and the place of its storage, so that neither torch nor cloudpickle spends time on it. Who may
load the pickle decides what else needs care: another rank (`namespace_pickle`), or the next process of this one
(`protection.structure`).
"""

from __future__ import annotations

import functools
import io
import pickle
import re
import struct
import sys
import types
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import torch
from torch import nn

from axon_nb.comm.placements import placed
from axon_nb.engine.session import current
from axon_nb.engine.sharding.sharded import loaded_class
from axon_nb.engine.snapshot.memory import bytes_of, storage_key

Place = tuple[int, int]
"""Where the bytes of a storage lie in a file, and how many there are."""
_Save = Callable[[torch.UntypedStorage], Place]
_Make = Callable[[Any, _Save], "StatePickler"]
_STORAGES = (torch.storage.TypedStorage, torch.UntypedStorage)
_TENSORS = (torch.Tensor, nn.Parameter)
_BY_NAME = (type, types.FunctionType)
_EACH_OBJECT = (*_BY_NAME, nn.Module, torch.Tensor)
"""Types of which each object may need other care."""
_CANNOT_PICKLE = re.compile(r"cannot pickle '([^']+)'")
_PLAIN = {"_thread.lock": "a lock", "_thread.RLock": "a lock", "generator": "a generator", "module": "a module"}
_END = struct.Struct("<QQI")
"""Offset, bytes and CRC-32 of the structure: the last bytes of a `StateFile`."""


class CannotCopyError(Exception):
    """This object cannot be copied to another process; the message says what it is."""


class StatePickler(cloudpickle.Pickler):
    """Pickles everything but the contents of storages.

    Args:
        file: Where the pickle goes.
        save: Returns the place of a storage's content.
    """

    def __init__(self, file: Any, save: _Save) -> None:
        super().__init__(file, protocol=5)
        self._save = save
        self._plain: set[type] = set()
        """Types whose objects need no care."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how to recreate an object; called for all but the most basic types."""
        kind = type(obj)
        if kind in self._plain or (kind in _BY_NAME and _is_global(obj)):
            return NotImplemented
        if kind in _STORAGES:
            dtype = obj.dtype if kind is torch.storage.TypedStorage else None
            return _storage_at, (*self._place(obj.untyped() if dtype is not None else obj), dtype)
        if kind in _TENSORS and _is_strided(obj) and placed(obj) is None:
            return self.reduce_tensor(obj, kind)
        reduced = self.reduce_object(obj, kind)
        if reduced is NotImplemented and not issubclass(kind, _EACH_OBJECT):
            self._plain.add(kind)
        return reduced

    def reduce_tensor(self, tensor: Any, kind: type) -> tuple[Any, tuple[Any, ...]]:
        """Return how to recreate a tensor of which its layout in the storage says all."""
        layout = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        requires_grad = tensor.requires_grad and tensor.is_leaf
        return _tensor_at, (*self._place(tensor.untyped_storage()), layout, requires_grad, kind is nn.Parameter)

    def reduce_object(self, obj: Any, kind: type) -> Any:
        """Return how to recreate any other object; NotImplemented: as pickle does."""
        if kind is loaded_class("numpy", "ndarray") and _owns_memory(obj):
            memory = torch.from_numpy(obj.ravel(order="K").view("uint8"))
            return _make_array, (memory, obj.dtype, obj.shape, obj.strides)
        if kind is torch.Tensor and not obj.is_leaf:
            return _identity, (obj.detach(),)
        return super().reducer_override(obj)

    def _place(self, storage: torch.UntypedStorage) -> tuple[Place, str]:
        return (self._save(storage) if storage.nbytes() else (0, 0)), str(storage.device)


def _identity(value: Any) -> Any:
    return value


def _is_global(obj: Any) -> bool:
    """Whether a function or class is what a module has under its name, so that a pickle may refer to it by name."""
    module = sys.modules.get(obj.__module__)
    return obj.__module__ != "__main__" and vars(module or object).get(obj.__qualname__) is obj


def _is_strided(tensor: torch.Tensor) -> bool:
    """Whether its layout in a storage says all about a tensor, besides declared placements."""
    is_common = tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda") and not tensor.is_quantized
    return is_common and not (vars(tensor) or tensor._backward_hooks or tensor.is_conj() or tensor.is_neg())


def _storage_at(place: Place, device: str, dtype: torch.dtype | None) -> Any:
    raise pickle.UnpicklingError("the content of a storage is in a file")  # see `_Unpickler.find_class`


def _tensor_at(place: Place, device: str, layout: tuple[Any, ...], requires_grad: bool, is_parameter: bool) -> Any:
    raise pickle.UnpicklingError("the content of a tensor is in a file")


def _owns_memory(array: Any) -> bool:
    """Whether its memory is one piece that can be written, which is copied as a storage is."""
    is_whole = array.flags.c_contiguous or array.flags.f_contiguous
    return bool(array.base is None and array.size and is_whole and array.flags.writeable and not array.dtype.hasobject)


def _make_array(memory: torch.Tensor, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    return type(memory.numpy())(shape, dtype, memory.numpy(), 0, strides)


def dump(make: _Make, content: Any, save: _Save) -> bytes:
    """Pickle the content of a session.

    Args:
        make: The class of the pickler.
        content: Any objects.
        save: Returns the place of a storage's content.

    Raises:
        Exception: something in it cannot be pickled; `find_uncopyable` says what.
    """
    file = io.BytesIO()
    make(file, save).dump(content)
    return file.getvalue()


def find_uncopyable(make: _Make, variables: Mapping[str, Any]) -> dict[str, str]:
    """Return, by name, why variables cannot be pickled; reads after the name. No content is copied."""
    reasons = {}
    for name, value in variables.items():
        try:
            dump(make, value, lambda _: (0, 0))
        except Exception as error:  # whatever an odd object raises
            reasons[name] = _failure_reason(error)
    return reasons


def _failure_reason(error: BaseException) -> str:
    if isinstance(error, CannotCopyError):
        return str(error)
    match = _CANNOT_PICKLE.search(str(error))
    if match:
        return f"holds {_PLAIN.get(match.group(1), f'a {match.group(1)}')}, which stays with its process"
    return f"does not pickle ({type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''})"


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, read: Callable[[int, int], bytearray]) -> None:
        super().__init__(file)
        self._read = read
        self._storage = functools.cache(self._load)

    def find_class(self, module: str, name: str) -> Any:
        """Return what the name stands for: for storages and tensors, a method that reads their contents."""
        if module == __name__ and name in ("_storage_at", "_tensor_at"):
            return getattr(self, name)
        return super().find_class(module, name)

    def _storage_at(self, place: Place, device: str, dtype: torch.dtype | None) -> Any:
        storage = (self._storage if place[1] else self._load)(place, device)
        if dtype is None:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    def _tensor_at(
        self, place: Place, device: str, layout: tuple[Any, ...], requires_grad: bool, is_parameter: bool
    ) -> torch.Tensor:
        storage, (dtype, *view) = self._storage_at(place, device, None), layout
        tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *view)
        return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)

    def _load(self, place: Place, device: str) -> torch.UntypedStorage:
        target = current().device if device.startswith("cuda") else torch.device(device)
        if not place[1]:
            return torch.UntypedStorage(0, device=target)
        content = torch.frombuffer(self._read(*place), dtype=torch.uint8)
        return content.clone().to(target).untyped_storage()


def load(file: Any, read: Callable[[int, int], bytearray]) -> Any:
    """Load what `dump` returned.

    Args:
        file: A binary file with the pickle.
        read: Returns contents of storages, by the two numbers of their places.
    """
    return _Unpickler(file, read).load()


class StateFile:
    """Writes contents of storages to a file, each once, and then what refers to them.

    Args:
        file: A binary file, at its begin.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._places: dict[tuple[str, int, int], tuple[Place, torch.UntypedStorage]] = {}
        """With the storage, so that its address stays its own."""

    def save(self, storage: torch.UntypedStorage) -> Place:
        """Return the place of a storage's content."""
        key = storage_key(storage)
        if key not in self._places:
            self._places[key] = (self._file.tell(), storage.nbytes()), storage
            self._file.write(bytes_of(storage).cpu().numpy().data)
        return self._places[key][0]

    def finish(self, structure: bytes | bytearray) -> int:
        """Write the structure; return the bytes of the file."""
        self._file.write(structure + _END.pack(self._file.tell(), len(structure), zlib.crc32(structure)))
        return int(self._file.tell())


def structure_of(view: Any) -> bytearray:
    """Return the structure in a `StateFile`.

    Args:
        view: Its bytes, such as a memoryview.

    Raises:
        ValueError: it is damaged.
    """
    offset, size, checksum = _END.unpack(view[-_END.size :])
    data = bytearray(view[offset : offset + size])
    if zlib.crc32(data) != checksum:
        raise ValueError("it does not match its checksum")
    return data
