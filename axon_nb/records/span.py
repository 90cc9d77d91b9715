"""A time span that a rank spent on one action."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Span", "span_of"]


class Span(NamedTuple):
    """One finished action of one rank: a forward, a collective, a pipeline step, a cell.

    A named tuple, as one is created per communication call and a frozen dataclass takes five times as long.
    """

    rank: int
    """Rank in the default group."""
    kind: str
    """Family of the action: ``cell``, ``forward``, ``backward``, ``optimizer``, ``collective``, ``p2p``, ``wait``."""
    name: str
    """The action itself, such as ``all_reduce``."""
    start_ns: int
    """Start, nanoseconds of the host's monotonic clock."""
    end_ns: int
    """End, same clock; never before the start."""
    group: str = ""
    """Name of the process group; empty if no group is involved."""
    bytes: int = 0
    """Payload in bytes on this rank; 0 if no data moves."""
    stage: int = -1
    """Pipeline stage, -1 outside a pipeline."""
    microbatch: int = -1
    """Microbatch, -1 outside a pipeline."""
    sequence: int = 0
    """Sequence number of the collective in its group, the same on all ranks. For a pipeline action: when its rank
    started the step, in nanoseconds. 0 if unknown."""


span_of: Callable[[tuple[Any, ...]], Span] = functools.partial(tuple.__new__, Span)
"""Create a span from a tuple of all fields: for hot paths, as `Span(…)` takes three times as long."""
