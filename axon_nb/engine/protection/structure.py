"""The structure of a session, pickled for a replacement of this rank: everything but the contents of storages.

Storages and arrays are references to their copies in the slot. What is sharded stays so: the replacement has the same
rank, so it gets the same shards, and makes the same calls of `fully_shard`. Process groups and meshes become its own.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from axon_nb.comm.placements import placed
from axon_nb.engine.elastic.pickling import placeholder, reduce
from axon_nb.engine.groups import install
from axon_nb.engine.session import current
from axon_nb.engine.sharding.sharded import device_mesh_type, is_dtensor, is_sharded, loaded_class
from axon_nb.engine.transfer.namespace_pickle import (
    CannotCopyError,
    NamespacePickler,
    copy_failure_reason,
    raise_if_of_process,
)

__all__ = ["Place", "dump", "find_uncopyable", "load"]

Place = tuple[int, int]
"""Where the bytes of a storage lie in the slot's file, and how many there are."""


_Split = tuple[Any, tuple[Any, ...]]
"""Mesh and placements of a DTensor."""
_Whole = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of the whole tensor."""
_STORAGES = (torch.storage.TypedStorage, torch.UntypedStorage)
_TENSORS = (torch.Tensor, nn.Parameter)
_BY_NAME = (type, types.FunctionType)
_EACH_OBJECT = (*_BY_NAME, nn.Module, torch.Tensor)
"""Types of which each object may need other care."""


class _NullFile(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


class _Pickler(NamespacePickler):
    """Pickles for the same rank.

    Args:
        file: Where the pickle goes.
        save: Returns the place of a storage's copy.
        managed: By the `id` of each parameter that FSDP2 manages, mesh and placements of the DTensor that it was before
            `fully_shard`; None: a plain tensor.
    """

    def __init__(self, file: Any, save: Callable[[torch.UntypedStorage], Place], managed: Mapping[int, Any]) -> None:
        super().__init__(file, protocol=5)
        self._save = save
        self._managed = managed
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
        if kind in _TENSORS and id(obj) not in self._managed and _is_strided(obj):
            layout = obj.dtype, obj.storage_offset(), tuple(obj.shape), obj.stride()
            requires_grad = obj.requires_grad and obj.is_leaf
            return _tensor_at, (*self._place(obj.untyped_storage()), layout, requires_grad, kind is nn.Parameter)
        reduced = self._reduce(obj, kind)
        if reduced is NotImplemented and not issubclass(kind, _EACH_OBJECT):
            self._plain.add(kind)
        return reduced

    def _place(self, storage: torch.UntypedStorage) -> tuple[Place, str]:
        return (self._save(storage) if storage.nbytes() else (0, 0)), str(storage.device)

    def _reduce(self, obj: Any, kind: type) -> Any:
        if id(obj) in self._managed:
            whole = tuple(obj.shape), obj.stride()
            return _make_placeholder, (whole, obj.dtype, obj.requires_grad, self._managed[id(obj)])
        if is_dtensor(obj):
            is_parameter = isinstance(obj, nn.Parameter)
            split, whole = (obj.device_mesh, obj.placements), (tuple(obj.shape), obj.stride())
            return _make_dtensor, (obj.to_local().detach(), split, whole, (obj.requires_grad, is_parameter))
        if issubclass(kind, device_mesh_type()):
            if (root := obj._get_root_mesh()) is not obj and obj.mesh_dim_names:
                return _slice_mesh, (root, obj.mesh_dim_names)
            groups = [str(group.group_name) for group in obj.get_all_groups()]
            return _make_mesh, (groups, obj.device_type, obj.mesh.tolist(), obj.mesh_dim_names)
        if kind is loaded_class("numpy", "ndarray") and _owns_memory(obj):
            memory = torch.from_numpy(obj.ravel(order="K").view("uint8"))
            return _make_array, (memory, obj.dtype, obj.shape, obj.strides)
        if (reduced := reduce(obj, kind, current().config.world_size)) is not None:
            return reduced
        if isinstance(obj, torch.Tensor) and type(obj) is torch.Tensor and not obj.is_leaf:
            return _identity, (obj.detach(),)
        return super().reducer_override(obj)

    def raise_if_uncopyable(self, obj: Any, kind: type) -> None:
        """Raise CannotCopyError for what belongs to this process alone."""
        if is_sharded(obj):
            raise CannotCopyError("is sharded by FSDP1: use `fully_shard`")
        raise_if_of_process(kind)


def _identity(value: Any) -> Any:
    return value


def _is_global(obj: Any) -> bool:
    """Whether a function or class is what a module has under its name, so that a pickle may refer to it by name."""
    module = sys.modules.get(obj.__module__)
    return obj.__module__ != "__main__" and vars(module or object).get(obj.__qualname__) is obj


def _is_strided(tensor: torch.Tensor) -> bool:
    """Whether a place in a storage says all about a tensor."""
    is_common = tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda") and not tensor.is_quantized
    has_more = vars(tensor) or tensor._backward_hooks or tensor.is_conj() or tensor.is_neg()
    return is_common and not has_more and placed(tensor) is None


def _storage_at(place: Place, device: str, dtype: torch.dtype | None) -> Any:
    raise pickle.UnpicklingError("the content of a storage is in a slot")  # see `_Unpickler.find_class`


def _tensor_at(place: Place, device: str, layout: tuple[Any, ...], requires_grad: bool, is_parameter: bool) -> Any:
    raise pickle.UnpicklingError("the content of a tensor is in a slot")


def _owns_memory(array: Any) -> bool:
    """Whether its memory is one piece that can be written, which is copied as a storage is."""
    is_whole = array.flags.c_contiguous or array.flags.f_contiguous
    return bool(array.base is None and array.size and is_whole and array.flags.writeable and not array.dtype.hasobject)


def _make_array(memory: torch.Tensor, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    return type(memory.numpy())(shape, dtype, memory.numpy(), 0, strides)


def _make_mesh(groups: list[str], device_type: str, ranks: Any, names: tuple[str, ...] | None) -> Any:
    own = {str(group.group_name): group for group in install.rebuildable_groups()}
    members: Any = [own[name] for name in groups]
    return DeviceMesh.from_group(members if len(members) > 1 else members[0], device_type, ranks, mesh_dim_names=names)


def _slice_mesh(root: Any, names: tuple[str, ...]) -> Any:
    return root[names]


def _make_placeholder(whole: _Whole, dtype: torch.dtype, requires_grad: bool, split: _Split | None) -> Any:
    if split is None:
        return placeholder(whole[0], dtype, requires_grad, True)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, _ = compute_local_shape_and_global_offset(whole[0], *split)
    return _make_dtensor(torch.empty(local, dtype=dtype, device="meta"), split, whole, (requires_grad, True))


def _make_dtensor(local: torch.Tensor, split: _Split, whole: _Whole, kind: tuple[bool, bool]) -> Any:
    dtensor: Any = loaded_class("torch.distributed.tensor", "DTensor")
    shape, stride = whole
    requires_grad, is_parameter = kind
    tensor = dtensor.from_local(local, *split, run_check=False, shape=torch.Size(shape), stride=stride).detach()
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def dump(content: Any, save: Callable[[torch.UntypedStorage], Place], managed: Mapping[int, Any]) -> bytes:
    """Pickle the content of a session.

    Args:
        content: Any objects.
        save: Returns where the copy of a storage lies.
        managed: See `_Pickler`.

    Raises:
        Exception: something in it cannot be pickled; `find_uncopyable` says what.
    """
    file = io.BytesIO()
    _Pickler(file, save, managed).dump(content)
    return file.getvalue()


def find_uncopyable(variables: Mapping[str, Any], managed: Mapping[int, Any]) -> dict[str, str]:
    """Return, by name, why variables cannot be pickled; reads after the name."""
    reasons = {}
    for name, value in variables.items():
        try:
            _Pickler(_NullFile(), lambda _: (0, 0), managed).dump(value)
        except Exception as error:  # whatever an odd object raises
            reasons[name] = copy_failure_reason(error)
    return reasons


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: memoryview, read: Callable[[int, int], bytearray]) -> None:
        super().__init__(io.BytesIO(data))
        self._read = read
        self._storages: dict[tuple[Place, str], torch.UntypedStorage] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what the name stands for: for storages and tensors, a method that reads the slot."""
        if module == __name__ and name in ("_storage_at", "_tensor_at"):
            return getattr(self, name)
        return super().find_class(module, name)

    def _storage_at(self, place: Place, device: str, dtype: torch.dtype | None) -> Any:
        key = place, device
        if key not in self._storages or not place[1]:
            self._storages[key] = self._load(place, torch.device(device))
        storage = self._storages[key]
        if dtype is None:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    def _tensor_at(
        self, place: Place, device: str, layout: tuple[Any, ...], requires_grad: bool, is_parameter: bool
    ) -> torch.Tensor:
        storage, (dtype, *view) = self._storage_at(place, device, None), layout
        tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *view)
        return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)

    def _load(self, place: Place, device: torch.device) -> torch.UntypedStorage:
        if not place[1]:
            return torch.UntypedStorage(0, device=device)
        content = torch.frombuffer(self._read(*place), dtype=torch.uint8)
        return content.clone().to(current().device if device.type == "cuda" else device).untyped_storage()


def load(data: memoryview, read: Callable[[int, int], bytearray]) -> Any:
    """Load what `dump` returned.

    Args:
        data: The pickle.
        read: Returns bytes of the slot's file.
    """
    return _Unpickler(data, read).load()
