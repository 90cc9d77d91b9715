"""The abort flag of this rank: while it is set no wait lasts and no communication begins."""

from __future__ import annotations

import sys
import threading

from axon_nb.engine.groups.stepping import step_depth

__all__ = ["ABORT", "Aborted", "GroupBroken", "is_to_stop", "raise_at_cut", "raise_if_aborted", "stand_down", "stop_at"]

ABORT = threading.Event()
"""Set by the control thread, cleared when the groups are formed anew."""

_broken: list[str] = []
_stop_at: list[tuple[str, int]] = []


class Aborted(RuntimeError):
    """The cell was ended while this rank was in, or came to, a communication call."""


class GroupBroken(Aborted):
    """Communication is not possible, and will not be before a rank is replaced."""


def stand_down(reason: str) -> None:
    """The groups cannot be formed anew: cells may run, communication is refused with `reason`; empty: it is not."""
    _broken[:] = [reason] if reason else []
    ABORT.clear()


def stop_at(sequence: int | None, *, group: str = "") -> None:
    """Stop before the collective after number `sequence` of `group` (empty: of all together); None: do not stop."""
    _stop_at[:] = [] if sequence is None else [(group, sequence)]


def is_to_stop() -> bool:
    """Whether a collective is to be found before which the cell stops."""
    return bool(_stop_at)


def raise_at_cut(sequence: int, total: int, *, group: str, name: str) -> None:
    """Raise before a collective when the cell is to stop there; a step of an optimizer is made to its end first.

    Args:
        sequence: The collective's number in `group`, in this cell.
        total: Its number among those of all groups.
        group: Its group.
        name: What it is.

    Raises:
        KeyboardInterrupt: it is; every rank gets it before the same collective.
    """
    if not _stop_at or _stop_at[0][0] not in ("", group):
        return
    number = sequence if _stop_at[0][0] else total
    if number > _stop_at[0][1] and not step_depth(sys._getframe(1)):
        raise KeyboardInterrupt(f"stopped before {name}, as all ranks")


def raise_if_aborted(where: str = "") -> None:
    """Raise when communication may not begin.

    Raises:
        Aborted: the cell is being ended, or the groups are broken.
    """
    if ABORT.is_set():
        raise Aborted(f"aborted{' before ' + where if where else ''}")
    if _broken:
        raise GroupBroken(f"{where or 'communication'} is not possible: {_broken[0]}.")
