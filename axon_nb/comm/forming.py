"""Counts how often the process groups of this process were rebuilt underneath the objects that hold them.

After a rebuild no communication is pending in any group: code that tracks pending calls compares the count and drops
its records.
"""

from __future__ import annotations

import itertools

__all__ = ["mark_rebuilt", "rebuild_count"]

_counter = itertools.count(1)
_last = [0]


def rebuild_count() -> int:
    """Return the number of the last rebuild; 0 if the groups are still the original ones."""
    return _last[0]


def mark_rebuilt() -> None:
    """Record that all groups of this process have been, or are being, rebuilt."""
    _last[0] = next(_counter)
