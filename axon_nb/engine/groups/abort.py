"""The abort flag of a rank: while it is set, waits end and no communication starts."""

from __future__ import annotations

import sys
import threading

from axon_nb.engine.step_frames import step_depth


class AbortedError(RuntimeError):
    """The cell was aborted while this rank was in a communication call, or before it started one."""


class BrokenGroupError(AbortedError):
    """Communication is not possible until a rank is replaced."""


class AbortFlag:
    """Set by the control thread, cleared when the groups are rebuilt; also holds where the cell is to stop."""

    def __init__(self) -> None:
        self._flag = threading.Event()
        self.set = self._flag.set
        self.is_set = self._flag.is_set
        self._broken = ""
        self._stop: tuple[str, int] | None = None

    def clear(self, *, broken: str = "") -> None:
        """Allow communication again.

        Args:
            broken: Why the groups cannot be rebuilt: communication is then refused, but cells still run.
        """
        self._broken = broken
        self._flag.clear()

    def raise_if_set(self, where: str = "") -> None:
        """Raise if communication must not start.

        Raises:
            AbortedError: the cell is being aborted, or the groups are disabled.
        """
        if self._flag.is_set():
            raise AbortedError(f"aborted{' before ' + where if where else ''}")
        if self._broken:
            raise BrokenGroupError(f"{where or 'communication'} failed: {self._broken}.")

    def stop_at(self, sequence: int | None, *, group: str = "") -> None:
        """Stop before the collective after number `sequence` of `group` (empty: of all groups); None cancels that."""
        self._stop = None if sequence is None else (group, sequence)

    def stop_requested(self) -> bool:
        """Whether the cell is to stop before one of the next collectives."""
        return self._stop is not None

    def raise_at_cut(self, sequence: int, total: int, *, group: str, name: str) -> None:
        """Raise if the cell is to stop before this collective; an optimizer step in progress finishes first.

        Args:
            sequence: Number of the collective in `group`, in this cell.
            total: Its number among the collectives of all groups.
            group: Name of its group.
            name: The operation.

        Raises:
            KeyboardInterrupt: the cell stops here; every rank raises it before the same collective.
        """
        stop = self._stop  # the control thread may change it meanwhile
        if stop is None or stop[0] not in ("", group):
            return
        number = sequence if stop[0] else total
        if number > stop[1] and not step_depth(sys._getframe(1)):
            raise KeyboardInterrupt(f"stopped before {name}, like all ranks")
