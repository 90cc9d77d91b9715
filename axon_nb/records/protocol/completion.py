"""What a front end asks while somebody types; a rank refuses a question that takes it more than a moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from axon_nb.records.protocol.messages import Request

__all__ = [
    "CompleteReply",
    "CompleteRequest",
    "InspectReply",
    "InspectRequest",
    "KnownName",
    "NamesReply",
    "NamesRequest",
]


@dataclass(frozen=True, slots=True)
class CompleteReply:
    """Completions at one place."""

    fragment: str
    """The text before the cursor that is replaced."""
    matches: tuple[str, ...]
    """By what."""


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
    """Sections that are left out."""


@dataclass(frozen=True, slots=True)
class KnownName:
    """What can be completed after one variable without asking again."""

    type: str = ""
    """Its type, with the module; empty if there was no time to look."""
    own: tuple[str, ...] = ()
    """Attributes that its type does not have."""
    keys: tuple[str, ...] = ()
    """Keys or columns, as Python source."""


@dataclass(frozen=True, slots=True)
class NamesReply:
    """The names of a rank, small enough to be kept in the notebook."""

    names: Mapping[str, KnownName]
    """By variable."""
    types: Mapping[str, tuple[str, ...]]
    """Attributes by type, of those that the notebook does not know."""


@dataclass(frozen=True, slots=True)
class NamesRequest(Request[NamesReply]):
    """Ask for the names after a cell, for completions while the rank does not answer."""

    known: tuple[str, ...] = ()
    """Types whose attributes the notebook has."""
