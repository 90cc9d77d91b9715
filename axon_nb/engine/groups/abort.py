"""The abort flag of this rank: while it is set no wait lasts and no communication begins."""

from __future__ import annotations

import threading

__all__ = ["ABORT", "Aborted", "GroupBroken", "raise_if_aborted", "stand_down"]

ABORT = threading.Event()
"""Set by the control thread, cleared when the groups are formed anew."""

_broken: list[str] = []


class Aborted(RuntimeError):
    """The cell was ended while this rank was in, or came to, a communication call."""


class GroupBroken(Aborted):
    """Communication is not possible, and will not be before a rank is replaced."""


def stand_down(reason: str) -> None:
    """The groups cannot be formed anew: cells may run, communication is refused with `reason`; empty: it is not."""
    _broken[:] = [reason] if reason else []
    ABORT.clear()


def raise_if_aborted(where: str = "") -> None:
    """Raise when communication may not begin.

    Raises:
        Aborted: the cell is being ended, or the groups are broken.
    """
    if ABORT.is_set():
        raise Aborted(f"aborted{' before ' + where if where else ''}")
    if _broken:
        raise GroupBroken(f"{where or 'communication'} is not possible: {_broken[0]}.")
