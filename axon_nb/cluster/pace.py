"""How often ranks are asked while they work, so that answering takes little of their time, however large a model is.

All views ask at the same moments (`records.beat`), and all ranks at once.
"""

from __future__ import annotations

import math

from axon_nb.records.beat import TICK_S, seconds_to_tick

__all__ = ["Pace"]

_SHARE = 0.004
"""Of a rank's time: what one view takes at most. Ranks that meet in collectives wait for the one that answers."""
_SELDOM_S = 10.0
"""Even of a huge model nothing that is shown is older, give or take a beat."""


class Pace:
    """Seconds between two questions, a multiple of `TICK_S`.

    Args:
        least_s: No fewer, however little an answer costs.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._before = 0.0
        self.every_s = _in_beats(least_s)

    def took(self, seconds: float) -> None:
        """The last answer has cost so much; one that costs more than the one before it changes nothing yet."""
        usual, self._before = min(seconds, self._before), seconds
        self.every_s = _in_beats(max(self._least_s, min(usual / _SHARE, _SELDOM_S)))

    @property
    def wait_s(self) -> float:
        """Seconds until the next question."""
        return seconds_to_tick(self.every_s)


def _in_beats(seconds: float) -> float:
    return math.ceil(seconds / TICK_S) * TICK_S
