"""Copies a rank's namespace to a fresh one: pickled as one graph, storages apart, and sent through the default group.

A pickled tensor is its layout and the place of its storage, so that neither torch nor cloudpickle spends time on it.
Who may load the pickle decides what else needs care: another rank (here), or the next process of this one
(`protection.slots`).

As it is one graph, optimizers keep pointing at their parameters. On the other rank, functions and classes of cells live
in that rank's namespace, and process groups become its own groups of the same name. What belongs to a rank (its place
in a sampler, its device) is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import os
import pickle
import struct
import sys
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data.distributed import DistributedSampler

from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.placements import placed
from axon_nb.comm.world import World
from axon_nb.engine.elastic.sharded_states import (
    apply_fsdp,
    fsdp_calls,
    fsdp_models,
    reduce_sharded,
    sharded_optimizers,
    zero_optimizers,
)
from axon_nb.engine.groups import creation
from axon_nb.engine.groups.recovery import rebuild_reducer
from axon_nb.engine.live_objects import register
from axon_nb.engine.session import current, own_rank, user_variables
from axon_nb.engine.sharding import device_mesh_type, is_dtensor, is_sharded, is_stage, loaded_class
from axon_nb.engine.snapshot.memory import bytes_of, storage_key
from axon_nb.engine.snapshot.state import StateFinder
from axon_nb.random_states import random_states, set_random_states
from axon_nb.records.protocol.transfer import PackedNamespace
from axon_nb.shell.value_pickle import namespace, reduce_function, unpicklable

Place = tuple[int, int]
"""Where the bytes of a storage lie in a file, and how many there are."""
_Save = Callable[[torch.UntypedStorage], Place]
_Make = Callable[[Any, _Save], "StatePickler"]
_STORAGES = (torch.storage.TypedStorage, torch.UntypedStorage)
_TENSORS = (torch.Tensor, nn.Parameter)
_BY_NAME = (type, types.FunctionType)
_EACH_OBJECT = (*_BY_NAME, nn.Module, torch.Tensor)
"""Types of which each object may need other care."""
_END = struct.Struct("<QQI")
"""Offset, bytes and CRC-32 of the structure: the last bytes of a `StateFile`."""
_CHUNK_BYTES = 64 << 20
ImportContext = tuple[tuple[str, ...], str, tuple[str, ...]]
"""Import path, working folder, and modules."""


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
    if what := unpicklable(error):
        return f"holds {what}, which stays with its process"
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


class NamespacePickler(StatePickler):
    """Pickles objects of a rank's namespace; see the module."""

    def reduce_object(self, obj: Any, kind: type) -> Any:
        """See `StatePickler`."""
        if issubclass(kind, dist.ProcessGroup):
            return _find_group, (obj.group_name,)
        if kind is types.FunctionType and obj.__globals__ is namespace():
            return reduce_function(obj)
        old_size = 0 if own_rank() is None else current().resized_from
        if old_size and (reduced := reduce_sharded(obj, kind, old_size)) is not None:
            return reduced
        self.raise_if_uncopyable(obj, kind)
        if kind is ProcessGroup:
            return (ProcessGroup.wrap, (obj.torch_group,)) if obj.is_member else super().reduce_object(obj, kind)
        if kind is World:
            return World.init, ()
        if kind is torch.device:
            return _make_device, (str(obj), obj == current().device)
        if kind is torch.Generator:
            return _make_generator, (str(obj.device), obj.get_state())
        if issubclass(kind, DistributedDataParallel):
            return _reduce_ddp(obj)
        if issubclass(kind, DistributedSampler):
            of_this_rank = (obj.rank, obj.num_replicas) == (dist.get_rank(), dist.get_world_size())
            return _new, (kind,), (dict(vars(obj)), of_this_rank), None, None, _set_sampler
        if issubclass(kind, LRScheduler):
            return _new, (kind,), dict(vars(obj)), None, None, _set_scheduler
        if (shared := shared_state(obj, kind)) is not None:
            return _join_shared, (kind, dict(shared))
        return super().reduce_object(obj, kind)

    def raise_if_uncopyable(self, obj: Any, kind: type) -> None:
        """Raise CannotCopyError for an object that belongs to this rank or this process alone."""
        if is_sharded(obj):
            raise CannotCopyError("is sharded: each rank holds its own part")
        if is_stage(obj):
            raise CannotCopyError("is a pipeline stage: each rank holds its own")
        if issubclass(kind, device_mesh_type()):
            raise CannotCopyError("is a device mesh: recreate it on all ranks")
        raise_if_of_process(kind)


def raise_if_of_process(kind: type) -> None:
    """Raise CannotCopyError for objects of a type that belongs to its process."""
    if issubclass(kind, io.IOBase) and not issubclass(kind, (io.BytesIO, io.StringIO)):
        raise CannotCopyError("is an open file, which stays with its process")
    if issubclass(kind, types.GeneratorType):
        raise CannotCopyError("is a generator, which stays with its process")


def shared_state(obj: Any, kind: Any) -> dict[str, Any] | None:
    """Return the attributes that all objects of a class share in a process, as Accelerate's states do; else None."""
    shared = getattr(kind, "_shared_state", None)
    return shared if isinstance(shared, dict) and getattr(obj, "__dict__", None) is shared else None


def _join_shared(kind: Any, state: dict[str, Any]) -> Any:
    """Make one on another rank; what says which rank it is on, and its device, are that rank's own."""
    shared: dict[str, Any] = kind._shared_state
    if not shared:
        own = vars(loaded_class("accelerate.state", "PartialState")())
        shared.update({name: own.get(name, value) for name, value in state.items()})
    made = kind.__new__(kind)
    made.__dict__ = shared
    return made


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _find_group(name: str) -> Any:
    for group in creation.rebuildable_groups():
        if group.group_name == name:
            return group
    return dist.GroupMember.NON_GROUP_MEMBER


def _make_device(name: str, is_rank_device: bool) -> torch.device:
    return current().device if is_rank_device else torch.device(name)


def _make_generator(device: str, state: torch.Tensor) -> torch.Generator:
    target = current().device if device.startswith("cuda") else torch.device(device)
    return torch.Generator(target).set_state(state)


def _reduce_ddp(model: DistributedDataParallel) -> Any:
    state = dict(vars(model))
    group = state.pop("process_group")
    for name in ("reducer", "logger"):
        state.pop(name, None)
    return _new, (type(model),), (state, group), None, None, _set_ddp


def _set_ddp(model: DistributedDataParallel, state: tuple[dict[str, Any], Any]) -> None:
    # A new reducer does not communicate: those of the other ranks were rebuilt when this rank was replaced.
    attributes, model.process_group = state
    torch.nn.Module.__setstate__(model, attributes)
    register(model)
    rebuild_reducer(model)


def _set_sampler(sampler: Any, state: tuple[dict[str, Any], bool]) -> None:
    vars(sampler).update(state[0])
    if state[1]:
        sampler.rank = dist.get_rank()


def _set_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    vars(scheduler).update(state)
    optimizer = getattr(scheduler, "optimizer", None)
    step = getattr(optimizer, "step", None)
    if step is None or hasattr(step, "_wrapped_by_lr_sched"):
        return

    # A scheduler marks its optimizer's `step`, to warn if it was not called first; the mark is not pickled.
    @functools.wraps(step)
    def marked(*args: Any, **kwargs: Any) -> Any:
        vars(optimizer)["_opt_called"] = True
        return step(*args, **kwargs)

    vars(marked)["_wrapped_by_lr_sched"] = True
    vars(optimizer).update(step=marked, _opt_called=True)


def group_variables() -> dict[str, str]:
    """Return the variables of this rank that are process groups, with the names of the groups."""
    groups = {id(group): group.group_name for group in creation.rebuildable_groups()}
    variables = user_variables(current().kernel.shell)
    return {name: groups[id(value)] for name, value in variables.items() if id(value) in groups}


def pack(names: Sequence[str] = ()) -> PackedNamespace:
    """Pickle variables, and keep the payload for `send`.

    Args:
        names: Which; empty: all that can be copied.
    """
    variables = user_variables(current().kernel.shell)
    selection = {name: variables[name] for name in names if name in variables} if names else variables
    skipped = {name: f"does not exist on rank {current().config.rank}" for name in names if name not in variables}
    skipped |= find_uncopyable(NamespacePickler, selection)
    copied = {name: value for name, value in selection.items() if name not in skipped}
    functions = {} if names else current().resize_functions
    without = find_uncopyable(NamespacePickler, functions)
    skipped |= {f"on_resize({name})": reason for name, reason in without.items()}
    models = fsdp_models() if current().resized_from else {}
    for name in {*models, *sharded_optimizers(), *zero_optimizers()} & skipped.keys() if current().resized_from else ():
        raise RuntimeError(f"`{name}` {skipped[name]}")
    content = {
        "variables": copied,
        "gradients": [pair for pair in StateFinder(copied).find().gradients() if not is_dtensor(pair[0])],
        "fsdp_calls": fsdp_calls(models),
        "resize_functions": {name: value for name, value in functions.items() if name not in without},
        "random": random_states(),
    }
    file = io.BytesIO()
    state = StateFile(file)
    state.finish(pickle.dumps((import_context(copied),)) + dump(NamespacePickler, content, state.save))
    current().namespace_payload = payload = bytearray(file.getbuffer())
    return PackedNamespace(
        copied=tuple(copied),
        skipped=skipped,
        size=len(payload),
        digest=hashlib.sha256(payload).hexdigest(),
    )


def send(ranks: Sequence[int]) -> None:
    """Send the payload to each of `ranks`, which must be in `receive`."""
    session = current()
    payload, session.namespace_payload = torch.frombuffer(session.namespace_payload, dtype=torch.uint8), bytearray()
    for rank in ranks:
        for chunk in payload.split(_CHUNK_BYTES):
            dist.send(chunk.to(_transfer_device()), rank)


def receive(source: int, size: int, digest: str, groups: Mapping[str, str]) -> None:
    """Receive the payload from `source` and put its variables into the namespace.

    Args:
        source: The rank that is in `send`.
        size: Bytes of the payload.
        digest: Its SHA-256, checked because a pickle runs code and Gloo's connections are not authenticated.
        groups: Variables that are process groups on other ranks, with the names of the groups.

    Raises:
        RuntimeError: the payload does not match its digest.
    """
    payload = torch.empty(size, dtype=torch.uint8, device="cpu")
    for chunk in payload.split(_CHUNK_BYTES):
        buffer = chunk.to(_transfer_device())
        dist.recv(buffer, source)
        if buffer is not chunk:
            chunk.copy_(buffer)
    data: Any = payload.numpy()
    if hashlib.sha256(data).hexdigest() != digest:
        raise RuntimeError(f"the data received from rank {source} does not match its digest")
    view = memoryview(data)
    receive_content(structure_of(view), lambda offset, size: bytearray(view[offset : offset + size]))
    # Last: on a source that is not a member of such a group, the variable is only a number.
    current().kernel.shell.user_ns.update({name: _find_group(group) for name, group in groups.items()})


def receive_content(data: bytearray, read: Callable[[int, int], bytearray]) -> dict[str, Any]:
    """Take over the state of another process: variables, gradients, calls of `fully_shard`, functions, random states.

    Args:
        data: A pickled tuple that begins with what `import_context` returned, and then the content.
        read: See `load`.

    Returns:
        The content.
    """
    file = io.BytesIO(data)
    path, folder, modules = pickle.load(file)[0]
    sys.path[:] = path
    with contextlib.suppress(OSError):
        os.chdir(folder)
    for name in modules:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # a variable that needs it fails with the reason when it is loaded
                importlib.import_module(name)
    content: dict[str, Any] = load(file, read)
    for tensor, gradient in content["gradients"]:
        tensor.grad = gradient
    current().kernel.shell.user_ns.update(content["variables"])
    apply_fsdp(content["fsdp_calls"])
    current().resize_functions.update(content["resize_functions"])
    set_random_states(content["random"])
    return content


def import_context(variables: Mapping[str, Any]) -> ImportContext:
    """Return what these variables need to be loaded elsewhere."""
    packages = {value.__name__.partition(".")[0] for value in variables.values() if isinstance(value, types.ModuleType)}
    return tuple(sys.path), os.getcwd(), _modules_of(frozenset(packages), tuple(sys.modules))


@functools.lru_cache(maxsize=1)  # protection asks after every step
def _modules_of(packages: frozenset[str], loaded: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in loaded if name.partition(".")[0] in packages)


def _transfer_device() -> torch.device:
    return current().device if dist.get_backend() == "nccl" else torch.device("cpu")
