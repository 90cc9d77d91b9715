"""A stretch of time that a rank spent on one thing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Span", "span_of"]


class Span(NamedTuple):
    """One finished action of one rank: a forward, a collective, a pipeline step, a cell.

    A tuple: it is made for each communication, and a frozen dataclass takes five times as long to make.
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
    """Name of the process group, empty when no group takes part."""
    bytes: int = 0
    """Payload in bytes on this rank, 0 when nothing is moved."""
    stage: int = -1
    """Pipeline stage, -1 outside a pipeline."""
    microbatch: int = -1
    """Microbatch, -1 outside a pipeline."""
    sequence: int = 0
    """Running number of the collective in its group, the same on all ranks; of a pipeline's action: when its rank began
    the step that it belongs to, in nanoseconds. 0 where it is not known."""


span_of: Callable[[tuple[Any, ...]], Span] = functools.partial(tuple.__new__, Span)
"""A span of all its fields: for who makes one a call, as `Span(…)` takes three times as long."""
