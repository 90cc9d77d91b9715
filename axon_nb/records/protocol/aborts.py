"""Requests that end a running cell: the abort, and the stop before a certain collective."""

from __future__ import annotations

from dataclasses import dataclass

from axon_nb.records.protocol.messages import Request


@dataclass(frozen=True, slots=True)
class AbortReply:
    """What an abort found."""

    interrupted: bool
    """Whether a cell was interrupted."""
    pending: int
    """Earlier interrupts that the main thread has not handled yet: it is in C code."""
    line: int | None
    """Line of the cell, if there are pending interrupts."""


@dataclass(frozen=True, slots=True)
class AbortRequest(Request[AbortReply]):
    """Abort the cell, and every wait in a group, until the groups are rebuilt."""

    run: str | None = None
    """The cell's run: a rank that has not started it rejects it. None: any cell."""
    again: bool = False
    """Whether the groups were closed by an earlier abort: only wake waiting threads."""
    by_user: bool = False
    """Whether the user interrupted the cell: as in a terminal, its child processes are interrupted too."""


@dataclass(frozen=True, slots=True)
class StopRequest(Request[None]):
    """Stop before a certain collective, the same on all ranks: a consistent cut."""

    group: str
    """Name of the group; empty: count the collectives of all groups."""
    at: int
    """Number of the last collective that may start."""
