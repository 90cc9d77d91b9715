"""`subgroup` in a cell: the process group of exactly the ranks that run it, created once per set of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from axon_nb.engine.groups.install import c10d, named_group
from axon_nb.engine.session import RankSession

NAME = "subgroup"


def bind(session: RankSession, ranks: Sequence[int], *, wanted: bool) -> None:
    """Bind the group of `ranks` to its name in the namespace; collective over them if the group is created.

    A variable of that name that the user has set is not changed.

    Args:
        session: This rank.
        ranks: The ranks that run the cell, including this one.
        wanted: Whether the cell mentions the name. If not, an existing binding is only updated to the cell's ranks.

    Raises:
        AbortedError: the cell was aborted while its ranks were creating the group.
    """
    namespace = session.kernel.shell.user_ns
    bound = session.subgroup
    if (NAME in namespace and namespace[NAME] is not bound) or not (wanted or NAME in namespace):
        return
    group = get(session, ranks, create=wanted)
    if group is None:
        namespace.pop(NAME, None)  # rather than leave the group of other ranks
        return
    session.subgroup = namespace[NAME] = group


def get(session: RankSession, ranks: Sequence[int], *, create: bool = True) -> Any:
    """Return the group of exactly `ranks`; with `create`, a missing one is created, which all of them must do.

    Raises:
        AbortedError: the cell was aborted while its ranks were creating the group.
    """
    if len(ranks) == session.config.world_size:
        return dist.group.WORLD
    group = _find(ranks)
    return _create(session, ranks) if group is None and create else group


def _prefix(ranks: Sequence[int]) -> str:
    return f"{NAME}_{'_'.join(map(str, sorted(ranks)))}_"


def _find(ranks: Sequence[int]) -> Any:
    prefix = _prefix(ranks)
    return next((group for group, name in list(c10d._world.pg_names.items()) if name.startswith(prefix)), None)


def _create(session: RankSession, ranks: Sequence[int]) -> Any:
    prefix = _prefix(ranks)
    session.num_subgroups[prefix] += 1
    name = f"{prefix}{session.num_subgroups[prefix]}"
    with named_group(name):
        # Only its members create it, as the other ranks do not run the cell.
        return dist.new_group(list(ranks), use_local_synchronization=True, group_desc=f"{NAME} of a cell")
