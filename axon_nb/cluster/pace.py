"""How often ranks are asked while they work, so that answering takes little of their time, however large a model is."""

from __future__ import annotations

__all__ = ["Pace"]

_SHARE = 0.004
"""Of a rank's time: what one view takes at most. Ranks that meet in collectives wait for the one that answers."""
_SELDOM_S = 10.0
"""Even of a huge model nothing that is shown is older."""


class Pace:
    """Seconds between two questions.

    Args:
        least_s: No fewer, however little an answer costs.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = self.every_s = least_s
        self._before = 0.0

    def took(self, seconds: float) -> None:
        """The last answer has cost so much; one that costs more than the one before it changes nothing yet."""
        usual, self._before = min(seconds, self._before), seconds
        self.every_s = max(self._least_s, min(usual / _SHARE, _SELDOM_S))
