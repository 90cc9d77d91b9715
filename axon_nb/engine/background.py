"""Threads of the user's own that live on between cells, and so may communicate while no cell runs."""

from __future__ import annotations

import threading

__all__ = ["note_own_threads", "users_threads"]

_own: set[int | None] = set()
_HARMLESS = ("axon_nb", "IPython", "IOPub", "Control", "Heartbeat", "asyncio", "QueueFeederThread", "InductorSubproc")
"""How the names of threads begin that do not run the user's code: the kernel's, a DataLoader's, torch.compile's."""
_PINS_MEMORY = "(_pin_memory_loop)"
"""How that of a DataLoader's other thread ends."""


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
        and not thread.name.endswith(_PINS_MEMORY)
        # Started by every progress bar, and only ever redraws.
        and type(thread).__module__.partition(".")[0] != "tqdm"
    ]
