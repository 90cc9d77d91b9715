"""The clock of another host, compared with this host's: an interval for their difference that messages narrow down.

As in NTP (RFC 5905), a question and its answer give four times. The difference lies between two bounds that are exact
however long either message took: the question arrived after it was sent, and so did the answer. Bounds of several
exchanges are intersected (Marzullo), which takes the fastest message of each direction. The time between exchanges
widens them by as much as two clocks may drift.
"""

from __future__ import annotations

from dataclasses import dataclass

_MAX_DRIFT = 1e-4
"""Seconds per second: two quartz clocks that differ by 50 parts per million each, in opposite directions."""


@dataclass(frozen=True, slots=True)
class HostClock:
    """How the monotonic clock of another host is related to this host's."""

    offset_ns: int
    """What to add to its times to get this host's, in nanoseconds."""
    error_ns: int
    """By how much the offset may be wrong, in nanoseconds."""


class ClockEstimate:
    """Follows the clock of another host over the messages that are exchanged with it anyway."""

    def __init__(self) -> None:
        self._low = self._high = 0.0
        self._at_ns: int | None = None
        """When the last answer arrived; None: none has."""

    def add(self, asked_ns: int, received_ns: int, replied_ns: int, returned_ns: int) -> None:
        """Add an exchange.

        Args:
            asked_ns: When the question was sent, on this host's clock, as all times in nanoseconds.
            received_ns: When it was received, on the other host's clock.
            replied_ns: When the answer was sent, on the other host's clock.
            returned_ns: When the answer was received, on this host's clock.
        """
        low, high = asked_ns - received_ns, returned_ns - replied_ns
        if high < low:  # a clock was set between question and answer
            return
        drift = 0.0 if self._at_ns is None else _MAX_DRIFT * (returned_ns - self._at_ns)
        bounds = max(low, self._low - drift), min(high, self._high + drift)
        if self._at_ns is None or bounds[0] > bounds[1]:  # the other host was suspended: earlier exchanges are void
            bounds = low, high
        (self._low, self._high), self._at_ns = bounds, returned_ns

    def at(self, now_ns: int) -> HostClock | None:
        """Return the estimate for a time of this host's clock, in nanoseconds; None before the first exchange."""
        if self._at_ns is None:
            return None
        error = (self._high - self._low) / 2 + _MAX_DRIFT * max(0, now_ns - self._at_ns)
        return HostClock(round((self._low + self._high) / 2), round(error))
