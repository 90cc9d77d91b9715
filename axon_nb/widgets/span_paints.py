"""How kinds of spans are drawn and what they are called: Okabe and Ito's colours, and a pattern besides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from axon_nb.widgets.palette import OKABE_ITO, needs_outline

__all__ = ["BUBBLE", "OTHER", "SPAN_CODES", "SPAN_PAINTS", "SpanPaint", "paints_for_page"]

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
