"""The size of the world on a rank that stays: its default group, torchrun's variables and the names in cells.

The default group stays the same object, so whatever holds it (DDP, samplers, `world`) belongs to the new world once the
groups are rebuilt.
"""

from __future__ import annotations

from typing import Any

import torch

from axon_nb.comm.group import ProcessGroup, forget, resolve
from axon_nb.engine import namespace
from axon_nb.engine.groups.install import c10d, rebuildable_groups
from axon_nb.engine.groups.recoverable import RecoverableGroup
from axon_nb.engine.live_objects import objects_of
from axon_nb.engine.session import current
from axon_nb.records.protocol.joining import JoinConfig


def set_world(config: JoinConfig) -> None:
    """Make this rank one of a world of another size, before its groups are rebuilt; does not communicate.

    The same call with the old configuration undoes it.

    Args:
        config: This rank's place in the new world.
    """
    session = current()
    before, session.config = session.config, config
    session.snapshots.forget_cells()  # their shards are those of the world before
    session.protection.forget()
    session.resized_from = 0 if session.resized_from == config.world_size else before.world_size
    if not session.resized_from:
        session.staged, session.staged_size = {}, 0
    default: Any = c10d._get_default_group()
    default.resize(config.rank, config.world_size)
    c10d._world.pg_group_ranks[default] = {rank: rank for rank in range(config.world_size)}
    # Wrappers hold ranks and size: `axon_nb.comm` creates one for each function that gets the group.
    forget(default)
    for wrapper in objects_of({ProcessGroup}):
        if wrapper.is_member and wrapper.torch_group is default:
            wrapper.info = resolve(default).info
    torch.set_num_threads(config.threads)
    namespace.set_world_environment(config)
    names = session.kernel.shell.user_ns
    for name in ("rank", "local_rank", "world_size"):
        if names.get(name) == getattr(before, name):  # not what the user stored under the name
            names[name] = getattr(config, name)
    session.subgroup = None


def groups_with_absent_ranks() -> list[RecoverableGroup]:
    """Return the groups of which some ranks are not in the world any more."""
    size = current().config.world_size
    ranks_of = c10d._world.pg_group_ranks
    return [group for group in rebuildable_groups() if max(ranks_of[group]) >= size]
