"""`subgroup` in a cell: the process group of exactly the ranks that run it, made once for each such set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from axon_nb.engine.groups.install import c10d, named_group
from axon_nb.engine.session import RankSession

__all__ = ["NAME", "bind", "of"]

NAME = "subgroup"

_made: Counter[str] = Counter()
"""How many groups this rank has made for each set: a destroyed one's name is not used again."""


def bind(session: RankSession, ranks: Sequence[int], *, wanted: bool) -> None:
    """Put the group of `ranks` under its name into the namespace; collective over them when it is made.

    A variable of that name that the user has set stays as it is.

    Args:
        session: This rank.
        ranks: The ranks that run the cell, this one among them.
        wanted: Whether the cell speaks of it; if not, the name only follows the cell's ranks where that is free.

    Raises:
        Aborted: the cell was ended while its ranks met.
    """
    space = session.kernel.shell.user_ns
    mine = session.subgroup
    if (NAME in space and space[NAME] is not mine) or not (wanted or NAME in space):
        return
    group = of(session, ranks, make=wanted)
    if group is None:
        space.pop(NAME, None)  # rather than the group of other ranks
        return
    session.subgroup = space[NAME] = group


def of(session: RankSession, ranks: Sequence[int], *, make: bool = True) -> Any:
    """The group of exactly `ranks`; with `make` it is made where there is none, which all of them must do.

    Raises:
        Aborted: the cell was ended while its ranks met.
    """
    if len(ranks) == session.config.world_size:
        return dist.group.WORLD
    group = _find(ranks)
    return _make(session, ranks) if group is None and make else group


def _stem(ranks: Sequence[int]) -> str:
    return f"{NAME}_{'_'.join(map(str, sorted(ranks)))}_"


def _find(ranks: Sequence[int]) -> Any:
    stem = _stem(ranks)
    return next((group for group, name in list(c10d._world.pg_names.items()) if name.startswith(stem)), None)


def _make(session: RankSession, ranks: Sequence[int]) -> Any:
    stem = _stem(ranks)
    _made[stem] += 1
    name = f"{stem}{_made[stem]}"
    with named_group(name):
        # Of its own members alone, as the others do not run the cell.
        return dist.new_group(list(ranks), use_local_synchronization=True, group_desc=f"{NAME} of a cell")
