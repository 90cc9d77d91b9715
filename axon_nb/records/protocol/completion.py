"""Requests of a front end while the user types; a rank refuses one that takes too long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from axon_nb.records.protocol.messages import Request


@dataclass(frozen=True, slots=True)
class CompleteReply:
    """Completions at one place."""

    fragment: str
    """The text before the cursor to replace."""
    matches: tuple[str, ...]
    """The candidates."""


@dataclass(frozen=True, slots=True)
class CompleteRequest(Request[CompleteReply]):
    """Complete a line of code."""

    line: str
    cursor: int
    """Column of the cursor."""


@dataclass(frozen=True, slots=True)
class InspectReply:
    """Help on a name."""

    found: bool
    """Whether the rank has it."""
    data: Mapping[str, str]
    """Text by mime type."""


@dataclass(frozen=True, slots=True)
class InspectRequest(Request[InspectReply]):
    """Show help on a name, as `x?` and `x??` do."""

    name: str
    detail: int
    """0 or 1, as for IPython."""
    omit: tuple[str, ...] = ()
    """Sections to leave out."""


@dataclass(frozen=True, slots=True)
class KnownName:
    """What can be completed after one variable without another request."""

    type: str = ""
    """Its type, with the module; empty if there was no time for it."""
    own: tuple[str, ...] = ()
    """Attributes that its type lacks."""
    keys: tuple[str, ...] = ()
    """Keys or columns, as Python source."""


@dataclass(frozen=True, slots=True)
class NamesReply:
    """The names of a rank, small enough to be stored in the notebook."""

    names: Mapping[str, KnownName]
    """By variable."""
    types: Mapping[str, tuple[str, ...]]
    """Attributes by type, for types that the notebook does not know yet."""


@dataclass(frozen=True, slots=True)
class NamesRequest(Request[NamesReply]):
    """Request the names after a cell, for completion while the rank does not reply."""

    known: tuple[str, ...] = ()
    """Types whose attributes the notebook has."""
