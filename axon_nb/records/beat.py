"""Common reporting times of all ranks: multiples of `TICK_S` on the host's clock.

Ranks in collectives wait for each rank that is delayed by reporting: if all report at once, this costs one delay, not
one per rank.
"""

from __future__ import annotations

import time

__all__ = ["TICK_S", "seconds_to_tick"]

TICK_S = 1.0
"""Seconds between two ticks."""


def seconds_to_tick(every_s: float = TICK_S, *, now: float | None = None, late_s: float = 0.0) -> float:
    """Seconds until the clock next reaches a multiple of `every_s`, plus `late_s`; never zero."""
    return every_s - ((time.monotonic() if now is None else now) - late_s) % every_s
