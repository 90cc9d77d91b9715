"""What a slot holds besides the contents of storages: the variables of this rank, and what belongs to its session.

It begins with what a replacement needs before it can load the rest: its groups, its import path and modules.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

from axon_nb.engine.elastic.pickling import apply_fsdp, fsdp_calls
from axon_nb.engine.groups import install, recovery
from axon_nb.engine.namespace import user_variables
from axon_nb.engine.protection.shards import adopt_shards, own_shards
from axon_nb.engine.protection.slots import read_bytes, read_headers
from axon_nb.engine.protection.structure import Place, dump, find_uncopyable, load
from axon_nb.engine.session import RankSession
from axon_nb.engine.snapshot.random_states import set_random_states
from axon_nb.engine.snapshot.snapshot import Snapshot
from axon_nb.engine.snapshot.tensors import TensorState
from axon_nb.engine.transfer.copy_namespace import apply_import_context, import_context
from axon_nb.host.resources.kept_memory import find_kept_memory
from axon_nb.records.protocol.recovery import GroupRecord

__all__ = ["kept_groups", "pack", "start_of", "unpack"]

_LENGTH_BYTES = 8


def pack(
    session: RankSession,
    snapshot: Snapshot,
    save: Callable[[torch.UntypedStorage], Place],
    left_out: dict[str, str],
) -> bytearray:
    """Pickle everything but the contents of storages.

    Args:
        session: The rank.
        snapshot: Its state now.
        save: Returns where the copy of a storage lies.
        left_out: By name, why variables cannot be copied; gets those that are new.
    """
    shards = own_shards()
    content: dict[str, Any] = {
        "gradients": list(_gradients(snapshot, shards.split)),
        "fsdp_calls": fsdp_calls(),
        "shards": shards.pieces,
        "resize_functions": session.resize_functions,
        "steps": list(zip(snapshot.state.optimizers, snapshot.steps, strict=True)),
        "random": snapshot.random,
    }

    def dump_content() -> bytes:
        content["variables"] = {name: value for name, value in variables.items() if name not in left_out}
        return dump(content, save, shards.split)

    variables = user_variables(session.kernel.shell)
    try:
        data = dump_content()
    except Exception:  # the probe says what it was
        left_out |= find_uncopyable(content["variables"], shards.split)
        data = dump_content()
    start = pickle.dumps((import_context(content["variables"]), recovery.list_groups()))
    return bytearray(len(start).to_bytes(_LENGTH_BYTES) + start + data)


def _gradients(snapshot: Snapshot, managed: dict[int, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _, tensor, saved in snapshot.state.nodes:
        if type(saved) is TensorState and saved.is_leaf and saved.grad is not None and id(tensor) not in managed:
            yield tensor, saved.grad


def unpack(session: RankSession, data: bytearray, read: Callable[[int, int], bytearray]) -> None:
    """Make a new rank what its predecessor was.

    Args:
        session: The new rank.
        data: What `pack` returned.
        read: Returns bytes of the slot's file.
    """
    start = start_of(data)
    apply_import_context(pickle.loads(start)[0])
    content = load(memoryview(data)[_LENGTH_BYTES + len(start) :], read)
    for tensor, gradient in content["gradients"]:
        tensor.grad = gradient
    session.kernel.shell.user_ns.update(content["variables"])
    apply_fsdp(content["fsdp_calls"])
    adopt_shards(content["shards"])
    session.resize_functions.update(content["resize_functions"])
    for optimizer, steps in content["steps"]:
        session.steps.set(optimizer, steps)
    set_random_states(content["random"])
    install.forget_equal_meshes()  # loading has filled the cache; that of the other ranks is empty


def start_of(data: bytearray) -> bytes:
    """Return the pickle of import context and groups, of what `pack` returned."""
    return bytes(data[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES])])


def kept_groups(rank: int) -> list[GroupRecord]:
    """Return the groups that the predecessor of this process had, besides the default one; call it before joining."""
    if (fd := find_kept_memory(rank)) is None:
        return []
    for header in read_headers(fd).values():
        size = int.from_bytes(read_bytes(fd, header.offset, _LENGTH_BYTES))
        groups: list[GroupRecord] = pickle.loads(read_bytes(fd, header.offset + _LENGTH_BYTES, size))[1]
        return groups
    return []
