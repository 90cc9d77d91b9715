"""Colours of what the views draw, for light pages, dark pages and saved pictures, and the CSS that hands them to pages.

A hue is a kind of work, the same in every view. What that work makes in memory has its hue: forward makes activations,
backward gradients, the optimizer its state, collectives communication buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from axon_nb.records.telemetry import Activity

__all__ = [
    "ACTIVITIES",
    "ACTIVITY_CODES",
    "BUBBLE",
    "INK",
    "KINDS",
    "LIMIT",
    "OTHER",
    "RANKS",
    "ROLES",
    "SERIES_TOKENS",
    "SPAN_CODES",
    "SPAN_PAINTS",
    "STATES",
    "ActivityPaint",
    "Color",
    "SpanPaint",
    "contrast",
    "paints_for_page",
    "palette_css",
    "rank_color",
    "text_color",
]


@dataclass(frozen=True, slots=True)
class Color:
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
_WAIT_SOFT = Color("#FBECC9", "#3C2F12", "#C78100")

ROLES = {
    "parameters": Color("#2F3F5E", "#5F6A90", "#6B637D"),
    "gradients": KINDS["backward"],
    "optimizer": KINDS["optimizer"],
    "buffers": Color("#8A3580", "#B66C88", "#904684"),
    "activations": KINDS["forward"],
    "unsharded": KINDS["p2p"],
    "communication": KINDS["collective"],
    "fragmentation": Color("#8C949F", "#6B7280", "#8C949F"),
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

SERIES_TOKENS = {"steps/s": "kind-forward", "communication": "kind-collective", "memory": "kind-p2p"}
"""Colours of curves that are measured, by their names in CSS; others take those of ranks in turn."""

STATES = {
    "ok": (Color("#177A41", "#57C785", "#177A41"), Color("#E7F5EC", "#12281B", "")),
    "warn": (Color("#8F5C00", "#F0B44C", "#8F5C00"), Color("#FDF3DC", "#2C2310", "")),
    "error": (Color("#C4282D", "#FF7A73", "#D0484C"), Color("#FDEEED", "#321614", "")),
}
"""Colours of words, each with that of the plane behind them; their contrast is at least 4.5:1."""

LIMIT = STATES["error"][0]
"""Of the line at a limit."""
INK = "#767676"
"""Of lines in saved pictures."""


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two hex colours, from 1 to 21, as WCAG 2 defines it."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def text_color(color: str) -> str:
    """Return black or white, whichever is easier to read on a colour."""
    return max("#000000", "#FFFFFF", key=lambda text: contrast(text, color))


def rank_color(rank: int) -> Color:
    """Return the colour of a rank; the ninth has that of the first."""
    return RANKS[rank % len(RANKS)]


def _luminance(color: str) -> float:
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


# ---- activities and kinds of spans -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ActivityPaint:
    """How one activity is drawn, and its label."""

    activity: Activity
    label: str
    """Text for the legend."""
    token: str
    """Name of its colour in CSS, after ``--axon-``."""
    color: Color
    form: Literal["solid", "line", "wait", "hollow", "cross"]


ACTIVITIES = (
    ActivityPaint(Activity.IDLE, "idle", "kind-other", KINDS["other"], "line"),
    ActivityPaint(Activity.RUNNING, "running", "kind-forward", KINDS["forward"], "solid"),
    ActivityPaint(Activity.COLLECTIVE, "in a collective", "kind-collective", KINDS["collective"], "solid"),
    ActivityPaint(Activity.WAITING, "waiting", "kind-wait", KINDS["wait"], "wait"),
    ActivityPaint(Activity.DONE, "done", "kind-other", KINDS["other"], "hollow"),
    ActivityPaint(Activity.FAILED, "failed", "error", STATES["error"][0], "solid"),
    ActivityPaint(Activity.DEAD, "dead", "error", STATES["error"][0], "cross"),
)
"""One paint per activity; the position is the activity's code on the wire."""

ACTIVITY_CODES = {paint.activity: code for code, paint in enumerate(ACTIVITIES)}


@dataclass(frozen=True, slots=True)
class SpanPaint:
    """How one kind of span is drawn, and its label."""

    kind: str
    label: str
    """Text for the legend."""
    color: Color
    lane: int
    """0: the rank's own code; 1: its communication; -1: the cell, above both."""
    form: Literal["solid", "line", "wait", "bubble"] = "solid"


SPAN_PAINTS = (
    SpanPaint("cell", "cell", KINDS["other"], -1, "line"),
    SpanPaint("forward", "forward", KINDS["forward"], 0),
    SpanPaint("backward", "backward", KINDS["backward"], 0),
    SpanPaint("optimizer", "optimizer", KINDS["optimizer"], 0),
    SpanPaint("collective", "collective", KINDS["collective"], 1),
    SpanPaint("p2p", "send, recv", KINDS["p2p"], 1),
    SpanPaint("wait", "waiting", KINDS["wait"], 0, "wait"),
    SpanPaint("other", "own code", KINDS["other"], 0),
    SpanPaint("bubble", "bubble", KINDS["other"], 0, "bubble"),
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
            "token": "kind-other" if paint.kind in ("cell", "bubble") else f"kind-{paint.kind}",
            "form": paint.form,
            "lane": paint.lane,
        }
        for paint in SPAN_PAINTS
    ]


# ---- style sheets ----------------------------------------------------------------------------------------------------

_DARK = '[data-jp-theme-light="false"] .axon-view,\n.vscode-dark .axon-view,\n.axon-view[data-theme="dark"]'
_UNKNOWN_THEME = "body:not([data-jp-theme-light], .vscode-light) .axon-view:not([data-theme])"


def palette_css() -> str:
    """Return the colours as CSS variables, such as ``--axon-kind-forward``, of light and of dark pages."""
    light, dark = ("".join(f"  --axon-{name}: {value};\n" for name, value in _tokens(theme)) for theme in (0, 1))
    return (
        f".axon-view {{\n{light}}}\n{_DARK} {{\n{dark}}}\n"
        f"@media (prefers-color-scheme: dark) {{\n{_UNKNOWN_THEME} {{\n{dark}}}\n}}\n"
    )


def _tokens(theme: int) -> list[tuple[str, str]]:
    tokens = [("tone", ("#0B1020", "#FFFFFF")[theme]), ("on-paint", ("#FFFFFF", "#0B1020")[theme])]
    tokens += [("plain-page", ("#FFFFFF", "#111111")[theme]), ("plain-ink", ("#212529", "#E0E0E0")[theme])]
    colors = [(f"kind-{name}", color) for name, color in KINDS.items()]
    colors += [("kind-wait-soft", _WAIT_SOFT)]
    colors += [(f"role-{name}", color) for name, color in ROLES.items()]
    colors += [(f"rank-{number}", color) for number, color in enumerate(RANKS)]
    for name, (words, plane) in STATES.items():
        colors += [(name, words), (f"{name}-soft", plane)]
    return tokens + [(name, (color.light, color.dark)[theme]) for name, color in colors]
