"""What a caller may say about one cell; the keyword arguments of `Cluster.run` and its kin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from axon_nb.cluster.part import LiveView

__all__ = ["CellOptions"]


class CellOptions(TypedDict, total=False):
    """Each may be left out."""

    ranks: str | Iterable[int] | None
    """Which ranks, such as ``"0,2-3"`` or ``[0, 2]``; None, the default: all."""
    quiet: bool
    """Show nothing; what ranks print is in the result's `text`."""
    timeout: float | None
    """Limit in seconds; None, the default: none."""
    check: bool
    """Raise when a rank fails, the default; otherwise the failures are in the result's `errors`."""
    cell: int | None
    """Number that tracebacks name the code by; None, the default: a running number."""
    view: LiveView | None
    """A live view to flush while the cell runs."""
    alone: bool
    """Whether no other cell is sent before this one is over, so that communication with ranks that do not run it can be
    refused at once; not the default."""
    values: bool
    """Whether to fetch the values of the last expression; the default."""
    show_value: bool
    """Whether to show them as well; not the default."""
    facts: Mapping[str, Any]
    """What else the ranks are to know of the cell, such as what to measure."""
