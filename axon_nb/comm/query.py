"""Who this process is, as functions. Not in `__all__` of the package: cells have `rank` and `world_size` as numbers."""

from __future__ import annotations

from axon_nb.comm.group import GroupLike, resolve

__all__ = ["is_main_process", "rank", "world_size"]


def rank(group: GroupLike = None) -> int:
    """This process's rank in the group.

    Raises:
        NotInGroup: it is no member.
    """
    return resolve(group).rank()


def world_size(group: GroupLike = None) -> int:
    """Number of ranks in the group."""
    return resolve(group).size()


def is_main_process(group: GroupLike = None) -> bool:
    """Whether this process is rank 0 of the group."""
    return rank(group) == 0
