"""Colours and patterns: Okabe and Ito's palette, which colour-blind people can tell apart, and never colour alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from axon_nb.records.state import Activity

__all__ = ["ACTIVITY_CODES", "OKABE_ITO", "PAINTS", "Paint", "Pattern", "contrast", "needs_outline"]

Pattern = Literal["solid", "bars", "hatch", "cross", "hollow", "line"]

OKABE_ITO = {
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
    "grey": "#767676",
}
"""The palette; its black is a grey here that shows on white as well as on a dark page."""

_PAGES = ("#FFFFFF", "#111111")


@dataclass(frozen=True, slots=True)
class Paint:
    """How one activity is drawn and what it is called."""

    activity: Activity
    label: str
    """Words for the legend."""
    color: str
    """Hex RGB."""
    pattern: Pattern
    """What is drawn over, or instead of, the plain colour."""


PAINTS = (
    Paint(Activity.IDLE, "idle", OKABE_ITO["grey"], "line"),
    Paint(Activity.RUNNING, "running", OKABE_ITO["green"], "solid"),
    Paint(Activity.COLLECTIVE, "in a collective", OKABE_ITO["blue"], "bars"),
    Paint(Activity.WAITING, "waiting", OKABE_ITO["orange"], "hatch"),
    Paint(Activity.DONE, "done", OKABE_ITO["grey"], "hollow"),
    Paint(Activity.FAILED, "failed", OKABE_ITO["vermillion"], "cross"),
    Paint(Activity.DEAD, "dead", OKABE_ITO["grey"], "cross"),
)
"""One paint an activity; the position is the activity's code on the wire."""

ACTIVITY_CODES = {paint.activity: code for code, paint in enumerate(PAINTS)}


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two hex colours after WCAG 2, from 1 to 21."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def needs_outline(color: str) -> bool:
    """Whether a colour is below 3:1 on a white or on a dark page, so that its shapes need an outline."""
    return min(contrast(color, page) for page in _PAGES) < 3


def _luminance(color: str) -> float:
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
