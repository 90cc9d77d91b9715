"""How views paint what they draw, and the CSS that passes the colours to pages: see `axon_nb.records.colors`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from axon_nb.records.colors import KINDS, RANKS, ROLES, STATES, Color, contrast
from axon_nb.records.telemetry import Activity

SERIES_TOKENS = {"steps/s": "kind-forward", "communication": "kind-collective", "memory": "kind-p2p"}
"""Colours of curves that are measured, by their names in CSS; others take those of ranks in turn."""

_WAIT_SOFT = Color("#FBECC9", "#3C2F12", "#C78100")
_DARK = '[data-jp-theme-light="false"] .axon-view,\n.vscode-dark .axon-view,\n.axon-view[data-theme="dark"]'
_INKS = ("#0B1020", "#FFFFFF")
"""Colours of words on light and on dark pages, and on paints."""
_UNKNOWN_THEME = "body:not([data-jp-theme-light], .vscode-light) .axon-view:not([data-theme])"


def text_color(color: str) -> str:
    """Return black or white, whichever is easier to read on a colour."""
    return max("#000000", "#FFFFFF", key=lambda text: contrast(text, color))


def rank_color(rank: int) -> Color:
    """Return the colour of a rank; they repeat after eight."""
    return RANKS[rank % len(RANKS)]


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
    ActivityPaint(Activity.PAUSED, "paused", "kind-wait", KINDS["wait"], "hollow"),
    ActivityPaint(Activity.FAILED, "failed", "error", STATES["error"][0], "solid"),
    ActivityPaint(Activity.DEAD, "dead", "error", STATES["error"][0], "cross"),
    ActivityPaint(Activity.STOPPED, "stopped", "kind-other", KINDS["other"], "cross"),
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


def palette_css() -> str:
    """Return the colours as CSS variables, such as ``--axon-kind-forward``, of light and of dark pages."""
    light, dark = ("".join(f"  --axon-{name}: {value};\n" for name, value in _tokens(theme)) for theme in (0, 1))
    return (
        f".axon-view {{\n{light}}}\n{_DARK} {{\n{dark}}}\n"
        f"@media (prefers-color-scheme: dark) {{\n{_UNKNOWN_THEME} {{\n{dark}}}\n}}\n"
    )


def _tokens(theme: int) -> list[tuple[str, str]]:
    tokens = [("tone", _INKS[theme])]
    tokens += [("plain-page", ("#FFFFFF", "#111111")[theme]), ("plain-ink", ("#212529", "#E0E0E0")[theme])]
    colors = [(f"kind-{name}", color) for name, color in KINDS.items()]
    colors += [("kind-wait-soft", _WAIT_SOFT)]
    colors += [(f"role-{name}", color) for name, color in ROLES.items()]
    colors += [(f"rank-{number}", color) for number, color in enumerate(RANKS)]
    for name, (words, plane) in STATES.items():
        colors += [(name, words), (f"{name}-soft", plane)]
    paints = [(name, (color.light, color.dark)[theme]) for name, color in colors]
    inks = [(f"on-{name}", _ink_on(paint)) for name, paint in paints if name.startswith("role-")]
    return [*tokens, *paints, *inks]


def _ink_on(paint: str) -> str:
    return max(_INKS, key=lambda ink: contrast(ink, paint))
