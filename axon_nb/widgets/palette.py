"""Colours and patterns: Okabe and Ito's palette, which colour-blind people can tell apart, and never colour alone.

How kinds of spans are drawn and what they are called: Okabe and Ito's colours, and a pattern besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from axon_nb.records.telemetry import Activity

__all__ = [
    "ACTIVITY_CODES",
    "BUBBLE",
    "OKABE_ITO",
    "OTHER",
    "PAINTS",
    "SPAN_CODES",
    "SPAN_PAINTS",
    "Paint",
    "Pattern",
    "SpanPaint",
    "contrast",
    "needs_outline",
    "paints_for_page",
]

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


SpanPattern = Literal["solid", "rows", "cross", "bars", "dots", "hatch", "line", "dashed"]


@dataclass(frozen=True, slots=True)
class SpanPaint:
    """One kind of span."""

    kind: str
    label: str
    """Words for the legend."""
    color: str
    """Hex RGB."""
    pattern: SpanPattern
    lane: int
    """0: what the rank's own code does; 1: what communication is under way; -1: the cell, above both."""


SPAN_PAINTS = (
    SpanPaint("cell", "cell", OKABE_ITO["grey"], "line", -1),
    SpanPaint("forward", "forward", OKABE_ITO["green"], "solid", 0),
    SpanPaint("backward", "backward", OKABE_ITO["purple"], "rows", 0),
    SpanPaint("optimizer", "optimizer", OKABE_ITO["vermillion"], "cross", 0),
    SpanPaint("collective", "collective", OKABE_ITO["blue"], "bars", 1),
    SpanPaint("p2p", "send, recv", OKABE_ITO["sky"], "dots", 1),
    SpanPaint("wait", "waiting", OKABE_ITO["orange"], "hatch", 0),
    SpanPaint("other", "other", OKABE_ITO["grey"], "bars", 0),
    SpanPaint("bubble", "bubble", OKABE_ITO["grey"], "dashed", 0),
)
"""One paint a kind; the position is the kind's code on the wire."""

SPAN_CODES = {paint.kind: code for code, paint in enumerate(SPAN_PAINTS)}
OTHER = SPAN_CODES["other"]
BUBBLE = SPAN_CODES["bubble"]


def paints_for_page() -> list[dict[str, object]]:
    """The paints as `static/timeline/store.js` reads them."""
    return [
        {
            "kind": paint.kind,
            "label": paint.label,
            "color": paint.color,
            "pattern": paint.pattern,
            "lane": paint.lane,
            "outline": needs_outline(paint.color),
        }
        for paint in SPAN_PAINTS
    ]
