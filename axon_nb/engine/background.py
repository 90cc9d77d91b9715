"""Threads of the user's own that live on between cells, and so may communicate while no cell runs."""

from __future__ import annotations

import threading

__all__ = ["note_own_threads", "users_threads"]

_own: set[int | None] = set()
_HARMLESS = ("axon_nb", "IPython", "IOPub", "Control", "Heartbeat", "asyncio")
"""How the names of threads begin that do not run the user's code."""


def note_own_threads() -> None:
    """The threads that there are now are the kernel's and ours; call it before the first cell."""
    _own.update(thread.ident for thread in threading.enumerate())


def users_threads() -> list[str]:
    """Names of the threads that have come since and may be running the user's code."""
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.ident not in _own
        and not thread.name.startswith(_HARMLESS)
        # Started by every progress bar, and only ever redraws.
        and type(thread).__module__.partition(".")[0] != "tqdm"
    ]
