"""Colours and patterns of activities and of kinds of spans, with their labels.

The colours are Okabe and Ito's, which colour-blind people can distinguish; patterns differ as well.
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
"""The palette; its black is replaced by a grey that is visible on light and dark pages."""

_PAGES = ("#FFFFFF", "#111111")


@dataclass(frozen=True, slots=True)
class Paint:
    """How one activity is drawn, and its label."""

    activity: Activity
    label: str
    """Text for the legend."""
    color: str
    """Hex RGB."""
    pattern: Pattern
    """Drawn over, or instead of, the plain colour."""


PAINTS = (
    Paint(Activity.IDLE, "idle", OKABE_ITO["grey"], "line"),
    Paint(Activity.RUNNING, "running", OKABE_ITO["green"], "solid"),
    Paint(Activity.COLLECTIVE, "in a collective", OKABE_ITO["blue"], "bars"),
    Paint(Activity.WAITING, "waiting", OKABE_ITO["orange"], "hatch"),
    Paint(Activity.DONE, "done", OKABE_ITO["grey"], "hollow"),
    Paint(Activity.FAILED, "failed", OKABE_ITO["vermillion"], "cross"),
    Paint(Activity.DEAD, "dead", OKABE_ITO["grey"], "cross"),
)
"""One paint per activity; the position is the activity's code on the wire."""

ACTIVITY_CODES = {paint.activity: code for code, paint in enumerate(PAINTS)}


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two hex colours, from 1 to 21, as WCAG 2 defines it."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def needs_outline(color: str) -> bool:
    """Whether a colour's contrast is below 3:1 on a light or dark page, so that its shapes need an outline."""
    return min(contrast(color, page) for page in _PAGES) < 3


def _luminance(color: str) -> float:
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


SpanPattern = Literal["solid", "rows", "cross", "bars", "dots", "hatch", "line", "dashed"]


@dataclass(frozen=True, slots=True)
class SpanPaint:
    """How one kind of span is drawn, and its label."""

    kind: str
    label: str
    """Text for the legend."""
    color: str
    """Hex RGB."""
    pattern: SpanPattern
    lane: int
    """0: the rank's own code; 1: its communication; -1: the cell, above both."""


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
"""One paint per kind; the position is the kind's code on the wire."""

SPAN_CODES = {paint.kind: code for code, paint in enumerate(SPAN_PAINTS)}
OTHER = SPAN_CODES["other"]
BUBBLE = SPAN_CODES["bubble"]


def paints_for_page() -> list[dict[str, object]]:
    """Return the paints of spans as `static/timeline/store.js` reads them."""
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
