"""After each cell the names of ranks are asked for, so that they can be completed while ranks do not answer."""

from __future__ import annotations

import asyncio
from typing import Any

from axon_nb.cluster import assist, current

__all__ = ["after_cell", "forget"]

_QUIET_S = 0.2
"""The ranks are asked when no other cell has ended for so long: cells that follow each other are not held up."""
_timers: list[asyncio.TimerHandle] = []


def after_cell(result: Any = None) -> None:
    """A cell of the notebook has ended; IPython's event `post_run_cell`."""
    forget()
    if current.get() is None:
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # a terminal
        _refresh()
        return
    _timers.append(loop.call_later(_QUIET_S, _refresh))


def forget() -> None:
    """Ask no more for what has run so far."""
    while _timers:
        _timers.pop().cancel()


def _refresh() -> None:
    cluster = current.get()
    if cluster is not None:
        assist.of(cluster.state).refresh()
