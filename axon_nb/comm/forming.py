"""How often the process groups of this process have been formed anew under the objects that hold them.

After that nothing is under way in any group: who keeps books about calls that have begun looks here and forgets them.
"""

from __future__ import annotations

import itertools

__all__ = ["formed_anew", "forming"]

_count = itertools.count(1)
_forming = [0]


def forming() -> int:
    """The number of the last forming; 0: the groups are those that were formed first."""
    return _forming[0]


def formed_anew() -> None:
    """All groups of this process have been, or are being, formed anew."""
    _forming[0] = next(_count)
