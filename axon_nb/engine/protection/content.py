"""What a slot holds besides the contents of storages: the variables of this rank, and what belongs to its session.

It begins with what a replacement needs before it can load the rest: its groups, its import path and modules.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import torch

from axon_nb.engine.elastic.pickling import fsdp_calls
from axon_nb.engine.elastic.sharded_states import fsdp_models
from axon_nb.engine.groups import install, recovery
from axon_nb.engine.namespace import user_variables
from axon_nb.engine.protection.slots import read_bytes, read_headers
from axon_nb.engine.protection.structure import adopt_shards, own_shards, structure_pickler
from axon_nb.engine.session import RankSession
from axon_nb.engine.snapshot.snapshot import Snapshot
from axon_nb.engine.transfer.copy_namespace import ImportContext, import_context, receive_content
from axon_nb.engine.transfer.state_pickle import Place, dump, find_uncopyable
from axon_nb.host.resources.kept_memory import find_kept_memory
from axon_nb.records.protocol.recovery import GroupRecord


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
    models = fsdp_models()
    shards = own_shards(models)
    make = structure_pickler(shards.split)
    content: dict[str, Any] = {
        "gradients": [pair for pair in snapshot.state.gradients() if id(pair[0]) not in shards.split],
        "fsdp_calls": fsdp_calls(models),
        "shards": shards.pieces,
        "resize_functions": session.resize_functions,
        "steps": session.steps.save(snapshot.state.optimizers),
        "random": snapshot.random,
    }

    def dump_content() -> bytes:
        content["variables"] = {name: value for name, value in variables.items() if name not in left_out}
        return dump(make, content, save)

    variables = user_variables(session.kernel.shell)
    try:
        data = dump_content()
    except Exception:  # the probe says what it was
        left_out |= find_uncopyable(make, content["variables"])
        data = dump_content()
    return bytearray(_start(import_context(content["variables"]), tuple(recovery.list_groups())) + data)


@functools.lru_cache(maxsize=1)  # thousands of names, which seldom change from one step to the next
def _start(context: ImportContext, groups: tuple[GroupRecord, ...]) -> bytes:
    return pickle.dumps((context, groups))


def unpack(session: RankSession, data: bytearray, read: Callable[[int, int], bytearray]) -> None:
    """Make a new rank what its predecessor was.

    Args:
        session: The new rank.
        data: What `pack` returned.
        read: Returns bytes of the slot's file.
    """
    content = receive_content(data, read)
    adopt_shards(content["shards"])
    session.steps.load(content["steps"])
    install.forget_equal_meshes()  # loading has filled the cache; that of the other ranks is empty


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
