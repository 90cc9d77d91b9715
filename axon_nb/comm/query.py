"""This process's rank and world size as functions. Not in `__all__`: in cells, both names are numbers."""

from __future__ import annotations

from axon_nb.comm.group import GroupLike, resolve

__all__ = ["is_main_process", "rank", "world_size"]


def rank(group: GroupLike = None) -> int:
    """Return this process's rank in the group.

    Raises:
        NotInGroupError: this process is not a member.
    """
    return resolve(group).rank()


def world_size(group: GroupLike = None) -> int:
    """Return the number of ranks in the group."""
    return resolve(group).size()


def is_main_process(group: GroupLike = None) -> bool:
    """Whether this process is rank 0 of the group."""
    return rank(group) == 0
