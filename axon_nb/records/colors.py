"""Colours of what views and figures draw, for light pages, dark pages, and pictures that cannot know the page.

A hue is a kind of work, the same in every view. What that work makes in memory has its hue: forward makes activations,
backward gradients, the optimizer its state, collectives communication buffers.
"""

from __future__ import annotations

from msgspec import Struct

INK = "#767676"
"""Of lines in saved pictures."""


class Color(Struct, frozen=True):
    """One colour as hex RGB; each has a contrast of at least 3:1 to the pages that it is for."""

    light: str
    dark: str
    both: str
    """For saved pictures, which cannot know the page's theme."""


KINDS = {
    "forward": Color("#0A7A71", "#45BFA9", "#088F70"),
    "backward": Color("#8659DE", "#9A78EA", "#8A66E0"),
    "optimizer": Color("#A8460E", "#D96F3A", "#B04D14"),
    "collective": Color("#185AA8", "#A3C8FF", "#2664B0"),
    "p2p": Color("#3D9DBA", "#3F9FC0", "#3D9DBA"),
    "wait": Color("#C78100", "#EBA93C", "#C78100"),
    "other": Color("#6C7382", "#8D95A5", "#697080"),
}
"""Kinds of spans. Waiting is pale, with a line at its foot in this colour."""

ROLES = {
    "parameters": Color("#2F3F5E", "#5F6A90", "#6B637D"),
    "gradients": KINDS["backward"],
    "optimizer": KINDS["optimizer"],
    "buffers": Color("#8A3580", "#B66C88", "#904684"),
    "activations": KINDS["forward"],
    "unsharded": KINDS["p2p"],
    "communication": KINDS["collective"],
    "fragmentation": Color("#8C949F", "#6B7280", "#8C949F"),
    "copies": KINDS["wait"],
    "other": KINDS["other"],
    "resident": KINDS["other"],
}
"""Roles of memory."""

RANKS = (
    Color("#0F4EA3", "#3274BD", "#2F60B0"),
    Color("#2A8596", "#9BE3EE", "#3A9AA8"),
    Color("#6A2A72", "#E4A0FA", "#8E4A98"),
    Color("#C47F00", "#CF8B2E", "#C07C05"),
    Color("#4CA385", "#5FBF95", "#3E9475"),
    Color("#A07AE8", "#9A84F5", "#9673E4"),
    Color("#8F1D22", "#C9553C", "#B63442"),
    Color("#7A7420", "#DDD873", "#80902B"),
)
"""Ranks; neighbours differ in lightness. A mark always carries its rank's number, too."""

STATES = {
    "ok": (Color("#177A41", "#57C785", "#177A41"), Color("#E7F5EC", "#12281B", "")),
    "warn": (Color("#8F5C00", "#F0B44C", "#8F5C00"), Color("#FDF3DC", "#2C2310", "")),
    "error": (Color("#C4282D", "#FF7A73", "#D0484C"), Color("#FDEEED", "#321614", "")),
}
"""Colours of words, each with that of the plane behind them; their contrast is at least 4.5:1."""

LIMIT = STATES["error"][0]
"""Of the line at a limit."""


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two hex colours, from 1 to 21, as WCAG 2 defines it."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
