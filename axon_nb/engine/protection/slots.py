"""Two slots in the memory that outlives this rank, and what each holds: storages, variables, groups and shards.

The file begins with a page that holds a header per slot. A header counts only if its number, which is written after
everything that it describes, is not 0. Before the memory of a slot is used again, the number becomes 0. So whenever the
process dies, a slot is complete or it does not exist.

What is not a storage is pickled. The pickle begins with what a replacement needs before it can load the rest: its
groups, its import path and modules. What is sharded stays so: the replacement has the same rank. It makes the same
calls of `fully_shard`, and then gets the shards that were there. Process groups and meshes become its own.
"""

from __future__ import annotations

import functools
import mmap
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from axon_nb.comm.placements import declare_placements, placed
from axon_nb.engine.elastic import sharded_states
from axon_nb.engine.elastic.sharded_states import fsdp_calls, fsdp_models, placeholder, reduce_sharded
from axon_nb.engine.groups import creation, recovery
from axon_nb.engine.session import RankSession, current, user_variables
from axon_nb.engine.sharding import device_mesh_type, is_dtensor, is_sharded, loaded_class
from axon_nb.engine.snapshot.history import Snapshot
from axon_nb.engine.transfer import namespace as namespaces
from axon_nb.host.shared_memory import find_kept_memory
from axon_nb.records.protocol.recovery import GroupRecord
from axon_nb.torch_api import torch_api

_PAGE = mmap.PAGESIZE
_HEADER_BYTES = 1024
_NUMBER = struct.Struct("<Q")
_LENGTHS = struct.Struct("<II")
"""Bytes and CRC-32 of the record."""
_CHUNK_BYTES = 64 << 20
_ALIGN = 64
_Split = tuple[Any, tuple[Any, ...]]
"""Mesh and placements of a DTensor."""
_Pieces = dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor | None]]
_Whole = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of the whole tensor."""


class Header(Struct, frozen=True):
    """What one slot holds."""

    run: str
    """Id of the cell, the same on all its ranks."""
    fence: tuple[int, int]
    """In that cell, how often ranks had communicated between two steps, and the number of steps since."""
    step: int
    """Steps of the optimizer that has made most."""
    offset: int
    """Where the pickled structure lies in the file."""
    size: int
    """Its bytes."""
    checksum: int
    """Its CRC-32."""


class SlotMemory:
    """Allocates memory in the file of this rank; an `Allocator` of snapshots.

    The end of the file when this begins is kept, so that a replacement can copy what its predecessor left there first.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._end = max(-(-os.fstat(fd).st_size // _PAGE) * _PAGE, _PAGE)
        os.ftruncate(fd, self._end)
        self._headers = mmap.mmap(fd, _PAGE)
        self._number = max(_NUMBER.unpack_from(self._headers, index * _HEADER_BYTES)[0] for index in (0, 1))
        self._before = range(_PAGE, self._end)
        self._chunk, self._used, self._chunk_offset = self._headers, _PAGE, 0
        self._places: dict[int, tuple[mmap.mmap, int, int, torch.Tensor]] = {}
        """By address of a buffer: its chunk, its position there, the chunk's offset in the file, and all of it."""
        self._free: dict[int, list[torch.Tensor]] = {}
        """By their size class."""
        self._idle: dict[int, torch.Tensor] = {}
        """By address, what is free and may have pages, as it was used: mostly it is used for the same storage again."""

    def allocate(self, size: int) -> torch.Tensor:
        """See `Allocator`."""
        rounded = _size_class(size)
        if free := self._free.get(rounded):
            buffer = free.pop()
            last = self._idle.pop(buffer.data_ptr(), buffer)
            return last if last.numel() == size else buffer[:size]
        if self._used + rounded > len(self._chunk):
            self._map(max(rounded, _CHUNK_BYTES))
        buffer = torch.frombuffer(self._chunk, dtype=torch.uint8, count=rounded, offset=self._used)
        self._places[buffer.data_ptr()] = self._chunk, self._used, self._chunk_offset, buffer
        self._used += rounded
        return buffer[:size]

    def _map(self, size: int) -> None:
        length = -(-size // _PAGE) * _PAGE
        os.ftruncate(self._fd, self._end + length)
        self._chunk, self._used, self._chunk_offset = mmap.mmap(self._fd, length, offset=self._end), 0, self._end
        self._end += length

    def release(self, buffer: torch.Tensor) -> None:
        """See `Allocator`."""
        address = buffer.data_ptr()
        whole = self._places[address][-1]
        self._free.setdefault(whole.numel(), []).append(whole)
        self._idle[address] = buffer

    def buffers(self) -> list[torch.Tensor]:
        """Return all buffers, also those that are free now."""
        return [whole for *_, whole in list(self._places.values())]

    def offset(self, buffer: torch.Tensor) -> int:
        """Return where in the file a buffer lies."""
        _, position, chunk_offset, _ = self._places[buffer.data_ptr()]
        return chunk_offset + position

    def write(self, data: bytes | bytearray) -> torch.Tensor:
        """Copy bytes into a buffer, at least one."""
        buffer = self.allocate(max(1, len(data)))
        if len(data):
            buffer[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        return buffer

    def invalidate(self, index: int) -> None:
        """Say that a slot is incomplete, before its memory is used again."""
        _NUMBER.pack_into(self._headers, index * _HEADER_BYTES, 0)

    def publish(self, index: int, header: Header) -> None:
        """Say that a slot, 0 or 1, is complete."""
        record, start = msgspec.json.encode(header), index * _HEADER_BYTES
        begin = start + _NUMBER.size + _LENGTHS.size
        self._headers[begin : begin + len(record)] = record
        _LENGTHS.pack_into(self._headers, start + _NUMBER.size, len(record), zlib.crc32(record))
        self._number += 1
        _NUMBER.pack_into(self._headers, start, self._number)

    def forget_predecessor(self) -> None:
        """Give back the memory that the file held before this process used it."""
        if self._before:
            with mmap.mmap(self._fd, self._before.stop) as before:
                before.madvise(mmap.MADV_REMOVE, self._before.start, len(self._before))
            self._before = range(0)

    def trim(self) -> None:
        """Give the pages of free buffers back to the system."""
        for address in self._idle:
            chunk, position, _, buffer = self._places[address]
            first = -(-position // _PAGE) * _PAGE
            last = (position + buffer.numel()) // _PAGE * _PAGE
            if first < last:
                chunk.madvise(mmap.MADV_REMOVE, first, last - first)
        self._idle.clear()

    def clear(self) -> None:
        """Invalidate both slots and give all memory back; buffers must not be used any more."""
        self.invalidate(0)
        self.invalidate(1)
        os.ftruncate(self._fd, 0)


def _size_class(size: int) -> int:
    """Round up by at most an eighth, so that buffers of similar sizes can replace each other."""
    step = max(_ALIGN, 1 << max(0, size.bit_length() - 4))
    return max(_ALIGN, -(-size // step) * step)


def read_headers(fd: int) -> dict[int, Header]:
    """Return the complete slots by index, the latest first."""
    page = os.pread(fd, _PAGE, 0)
    found = []
    for index in (0, 1):
        start = index * _HEADER_BYTES
        if len(page) < _PAGE or not (number := _NUMBER.unpack_from(page, start)[0]):
            continue
        length, checksum = _LENGTHS.unpack_from(page, start + _NUMBER.size)
        begin = start + _NUMBER.size + _LENGTHS.size
        record = page[begin : begin + length]
        if record and zlib.crc32(record) == checksum:
            found.append((number, index, msgspec.json.decode(record, type=Header)))
    return {index: header for _, index, header in sorted(found, reverse=True, key=lambda one: one[0])}


def read_bytes(fd: int, offset: int, size: int) -> bytearray:
    """Read bytes of the file.

    Raises:
        ValueError: the file ends before.
    """
    data, done = bytearray(size), 0
    while done < size:
        count = os.preadv(fd, [memoryview(data)[done:]], offset + done)
        if not count:
            raise ValueError("the protected state is incomplete")
        done += count
    return data


class _Pickler(namespaces.NamespacePickler):
    """Pickles for the same rank.

    Args:
        managed: By the `id` of each parameter that FSDP2 manages, mesh and placements of the DTensor that it was before
            `fully_shard`; None: a plain tensor.
        file: Takes the structure.
        save: Saves the content of a storage.
    """

    def __init__(
        self, managed: Mapping[int, Any], file: Any, save: Callable[[torch.UntypedStorage], namespaces.Place]
    ) -> None:
        super().__init__(file, save)
        self._managed = managed

    def reduce_object(self, obj: Any, kind: type) -> Any:
        """See `StatePickler`."""
        if id(obj) in self._managed:
            whole = tuple(obj.shape), obj.stride()
            return _make_placeholder, (whole, obj.dtype, obj.requires_grad, self._managed[id(obj)])
        if is_dtensor(obj):
            is_parameter = isinstance(obj, nn.Parameter)
            split, whole = (obj.device_mesh, obj.placements), (tuple(obj.shape), obj.stride())
            return _make_dtensor, (obj.to_local().detach(), split, whole, (obj.requires_grad, is_parameter))
        if (declared := placed(obj)) is not None:
            return (
                *obj.__reduce_ex__(5)[:2],
                (declared.mesh, declared.placements, declared.shape),
                None,
                None,
                _declare,
            )
        if issubclass(kind, device_mesh_type()):
            if (root := torch_api().root_mesh(obj)) is not obj and obj.mesh_dim_names:
                return _slice_mesh, (root, obj.mesh_dim_names)
            groups = [str(group.group_name) for group in obj.get_all_groups()]
            return _make_mesh, (groups, obj.device_type, obj.mesh.tolist(), obj.mesh_dim_names)
        if (reduced := reduce_sharded(obj, kind, current().config.world_size)) is not None:
            return reduced
        if (shared := namespaces.shared_state(obj, kind)) is not None:
            return _make_sharing, (kind,), dict(shared), None, None, _set_shared
        return super().reduce_object(obj, kind)

    def raise_if_uncopyable(self, obj: Any, kind: type) -> None:
        """Raise CannotCopyError for what belongs to this process alone."""
        if is_sharded(obj):
            raise namespaces.CannotCopyError("is sharded by FSDP1: use `fully_shard`")
        namespaces.raise_if_of_process(kind)


def _make_sharing(kind: Any) -> Any:
    made = kind.__new__(kind)
    made.__dict__ = kind._shared_state
    return made


def _set_shared(obj: Any, state: dict[str, Any]) -> None:
    vars(obj).clear()
    vars(obj).update(state)


def _declare(tensor: torch.Tensor, state: tuple[Any, ...]) -> None:
    mesh, placements, shape = state
    declare_placements(tensor, mesh, placements, shape=shape)


def _make_mesh(groups: list[str], device_type: str, ranks: Any, names: tuple[str, ...] | None) -> Any:
    own = {str(group.group_name): group for group in creation.rebuildable_groups()}
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


def own_shards(models: Mapping[str, Any]) -> tuple[dict[int, Any], _Pieces]:
    """Return what this rank holds of the parameters that FSDP2 manages.

    Args:
        models: By variable.

    Returns:
        By the parameter's `id`, mesh and placements of the DTensor that it was before, None for a plain tensor; and
        shard and gradient, by variable and parameter.
    """
    split, pieces = dict[int, Any](), _Pieces()
    for variable, model in models.items():
        for name, group, record in sharded_states.fsdp_parameters(model):
            parameter = record.sharded_param
            gradient = parameter.grad
            split[id(parameter)] = _split_before(parameter, group) if record.is_dtensor else None
            local = gradient.to_local().detach() if gradient is not None else None
            pieces[variable, name] = parameter.to_local().detach(), local
    return split, pieces


def _split_before(parameter: Any, group: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return mesh and placements of the DTensor that FSDP2 has sharded: those that follow FSDP2's own."""
    mesh, own = parameter.device_mesh, group.mesh_info.mesh.ndim
    return torch_api().root_mesh(mesh)[mesh.mesh_dim_names[own:]], tuple(parameter.placements[own:])


def adopt_shards(pieces: _Pieces) -> None:
    """Give the parameters of FSDP2 models, which have no data yet, these shards; does not communicate."""
    replaced = {}
    for variable, model in fsdp_models().items():
        for name, _, record in list(sharded_states.fsdp_parameters(model)):
            before = record.sharded_param
            replaced[id(before)] = before, sharded_states.set_shard(record, *pieces[variable, name])
    sharded_states.replace_parameters(replaced)


def pack(
    session: RankSession,
    snapshot: Snapshot,
    save: Callable[[torch.UntypedStorage], namespaces.Place],
    left_out: dict[str, str],
) -> bytearray:
    """Pickle everything but the contents of storages.

    Args:
        session: The rank.
        snapshot: Its state now.
        save: Returns where the copy of a storage lies.
        left_out: By name, why variables cannot be copied; gets those that are new.
    """
    models = fsdp_models()
    split, pieces = own_shards(models)
    make = functools.partial(_Pickler, split)
    content: dict[str, Any] = {
        "gradients": [pair for pair in snapshot.state.gradients() if id(pair[0]) not in split],
        "fsdp_calls": fsdp_calls(models),
        "shards": pieces,
        "resize_functions": session.resize_functions,
        "steps": session.steps.save(snapshot.state.optimizers),
        "random": snapshot.random,
    }

    def dump_content() -> bytes:
        content["variables"] = {name: value for name, value in variables.items() if name not in left_out}
        return namespaces.dump(make, content, save)

    variables = user_variables(session.kernel.shell)
    try:
        data = dump_content()
    except Exception:  # the probe says what it was
        left_out |= namespaces.find_uncopyable(make, content["variables"])
        data = dump_content()
    return bytearray(_start(namespaces.import_context(content["variables"]), tuple(recovery.list_groups())) + data)


@functools.lru_cache(maxsize=1)  # thousands of names, which seldom change from one step to the next
def _start(context: namespaces.ImportContext, groups: tuple[GroupRecord, ...]) -> bytes:
    return pickle.dumps((context, groups))


def unpack(session: RankSession, data: bytearray, read: Callable[[int, int], bytearray]) -> None:
    """Make a new rank what its predecessor was.

    Args:
        session: The new rank.
        data: What `pack` returned.
        read: Returns bytes of the slot's file.
    """
    content = namespaces.receive_content(data, read)
    adopt_shards(content["shards"])
    session.steps.load(content["steps"])
    creation.forget_equal_meshes()  # loading has filled the cache; that of the other ranks is empty


def groups_in(data: bytearray) -> list[GroupRecord]:
    """Return the groups, besides the default one, of the rank that packed this; nothing else is loaded."""
    groups: tuple[GroupRecord, ...] = pickle.loads(data)[1]
    return list(groups)


def kept_groups(rank: int) -> list[GroupRecord]:
    """Return the groups that the predecessor of this process had, besides the default one; call it before joining."""
    if (fd := find_kept_memory(rank)) is None:
        return []
    for header in read_headers(fd).values():
        return groups_in(read_bytes(fd, header.offset, header.size))
    return []
