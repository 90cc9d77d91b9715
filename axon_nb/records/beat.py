"""The moments at which ranks tell what they do, the same for all: multiples of `BEAT_S` on the clock of the host.

Ranks that meet in collectives wait for each one that is held up by telling: all at once they are held up once, and one
after another each time.
"""

from __future__ import annotations

import time

__all__ = ["BEAT_S", "until_beat"]

BEAT_S = 1.0
"""Seconds between two of them."""


def until_beat(every_s: float = BEAT_S, *, now: float | None = None, late_s: float = 0.0) -> float:
    """Seconds until the clock is a multiple of `every_s` next, or `late_s` after one; never zero."""
    return every_s - ((time.monotonic() if now is None else now) - late_s) % every_s
