"""What all views share as HTML and CSS: colours and paints, tables, figures and legends.

Saved pages need neither scripts nor a style sheet; live pages get the colours as CSS variables. The colours themselves
are in `axon_nb.records.colors`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from html import escape
from typing import Literal

from msgspec import Struct

from axon_nb.cluster.inspection import status
from axon_nb.records.colors import KINDS, RANKS, ROLES, STATES, Color, contrast
from axon_nb.records.telemetry import Activity

SERIES_TOKENS = {"steps/s": "kind-forward", "communication": "kind-collective", "memory": "kind-p2p"}
"""Colours of curves that are measured, by their names in CSS; others take those of ranks in turn."""
_WAIT_SOFT = Color("#FBECC9", "#3C2F12", "#C78100")
_DARK = '[data-jp-theme-light="false"] .axon-view,\n.vscode-dark .axon-view,\n.axon-view[data-theme="dark"]'
_INKS = ("#0B1020", "#FFFFFF")
"""Colours of words on light and on dark pages, and on paints."""
_UNKNOWN_THEME = "body:not([data-jp-theme-light], .vscode-light) .axon-view:not([data-theme])"
CODE = "font-family:var(--jp-code-font-family, ui-monospace, monospace)"
"""Style of code."""
MUTED = status.MUTED
"""Style of secondary text."""
WRAPPED_CELL = "padding:2px 14px 2px 0;text-align:left;vertical-align:middle;border:none"
"""Style of a table's cell with long text."""
CELL = f"{WRAPPED_CELL};white-space:nowrap"
"""Style of a table's cell with text that is not wrapped."""
NUMBER = "padding:2px 14px 2px 0;text-align:right;vertical-align:middle;border:none;white-space:nowrap"
"""Style of a table's cell with a number."""
_SMALL = f"font-size:85%;{MUTED}"
_WARN = "#C78100"
_TICKS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400),
)
"""Steps of a time axis, in seconds."""
_MIN_SEGMENT = 0.06
_CAPTION = re.compile(r"<figcaption[^>]*>(.*?)</figcaption>", re.DOTALL)
_QUOTED = re.compile("`([^`]+)`")


def text_color(color: str) -> str:
    """Return black or white, whichever is easier to read on a colour."""
    return max("#000000", "#FFFFFF", key=lambda text: contrast(text, color))


def rank_color(rank: int) -> Color:
    """Return the colour of a rank; they repeat after eight."""
    return RANKS[rank % len(RANKS)]


# ---- activities and kinds of spans -----------------------------------------------------------------------------------


class ActivityPaint(Struct, frozen=True):
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
    ActivityPaint(Activity.WAITING, "there for 0.25 s or more", "kind-wait", KINDS["wait"], "wait"),
    ActivityPaint(Activity.DONE, "done", "kind-other", KINDS["other"], "hollow"),
    ActivityPaint(Activity.PAUSED, "paused", "kind-wait", KINDS["wait"], "hollow"),
    ActivityPaint(Activity.FAILED, "failed", "error", STATES["error"][0], "solid"),
    ActivityPaint(Activity.DEAD, "dead", "error", STATES["error"][0], "cross"),
    ActivityPaint(Activity.STOPPED, "stopped", "kind-other", KINDS["other"], "cross"),
)
"""One paint per activity; the position is the activity's code on the wire."""


ACTIVITY_CODES = {paint.activity: code for code, paint in enumerate(ACTIVITIES)}


class SpanPaint(Struct, frozen=True):
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


def prose(text: str) -> str:
    """Return text as HTML, with what is in backticks as code."""
    return _QUOTED.sub(rf'<code style="{CODE}">\1</code>', escape(text))


def svg(width: int, height: int, body: str) -> str:
    """Return a picture, which may be stretched."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'preserveAspectRatio="none">{body}</svg>'
    )


def svg_uri(svg: str) -> str:
    """Return an SVG as an address for `<img src>`."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def table_style(*, margin: str = "0", widths: tuple[int, int] | None = None) -> str:
    """Return the style of a table.

    Args:
        margin: The margin, as CSS.
        widths: Minimum and maximum in px of a table that fills the page; None: as wide as its cells.
    """
    if widths is None:
        return f"border-collapse:collapse;border:none;margin:{margin};font-size:inherit;color:inherit"
    return (
        f"table-layout:auto;border-collapse:collapse;border:none;margin:{margin};width:100%;min-width:{widths[0]}px;"
        f"max-width:{widths[1]}px;font-size:inherit;color:inherit"
    )


def table(titles: Iterable[str], rows: Iterable[str], *, cell: str = CELL, style: str = "") -> str:
    """Return a table.

    Args:
        titles: Titles of the columns; if empty, the table has no head.
        rows: Results of `table_row`.
        cell: Style of the titles' cells.
        style: A result of `table_style`; empty: its default.
    """
    heads = "".join(
        f'<th scope="col" style="{cell};font-weight:normal;{_SMALL}">{escape(title)}</th>' for title in titles
    )
    head = f"<thead>{table_row(heads)}</thead>" if heads else ""
    return f'<table style="{style or table_style()}">{head}<tbody>{"".join(rows)}</tbody></table>'


def table_row(*cells: str) -> str:
    """Return a row of cells, each of them HTML."""
    return f'<tr style="background:none">{"".join(cells)}</tr>'


def row_title(html: str, cell: str = CELL) -> str:
    """Return the first cell of a row, in a style."""
    return f'<th scope="row" style="{cell};font-weight:600">{html}</th>'


def data_cells(texts: Iterable[str], cell: str = CELL) -> str:
    """Return cells of text, in one style."""
    return "".join(f'<td style="{cell}">{escape(text)}</td>' for text in texts)


def figures(entries: Iterable[tuple[str, str, str]]) -> str:
    """Return numbers in a row.

    Args:
        entries: (name, value, remark) of each.
    """
    parts = "".join(
        f'<span style="white-space:nowrap"><span style="{_SMALL}">{escape(name)}</span><br>'
        f'<b style="font-size:115%;font-weight:600">{escape(value)}</b> <span style="{_SMALL}">{escape(remark)}</span>'
        "</span>"
        for name, value, remark in entries
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:4px 24px;margin:4px 0">{parts}</div>' if parts else ""


def notice(claim: str, text: str) -> str:
    """Return a highlighted sentence about what is wrong."""
    return (
        f'<div style="margin:4px 0;padding:2px 10px;border-left:3px solid {_WARN}"><b style="font-weight:600">'
        f"{escape(claim)}</b> {prose(text)}</div>"
    )


def note_lines(notes: Iterable[str]) -> str:
    """Return sentences to put below a figure."""
    return "".join(f'<div style="{MUTED}">{prose(note)}</div>' for note in notes)


def legend(entries: Iterable[tuple[str, str]], *, width: int = 24, height: int = 14, margin: str = "left") -> str:
    """Return samples with their names.

    Args:
        entries: (SVG, label) of each.
        width: Width of a sample in px.
        height: Height of a sample in px.
        margin: The side of an entry that has one.
    """
    return "".join(
        f'<span style="white-space:nowrap;margin-{margin}:14px"><img alt="" src="{svg_uri(svg)}" width="{width}" '
        f'height="{height}" style="display:inline-block;vertical-align:middle;margin:0 5px 0 0">{label}</span> '
        for svg, label in entries
    )


def figure(body: str, *, heading: str, beside: str = "") -> str:
    """Return a figure.

    Args:
        body: HTML below the caption.
        heading: Text of the caption.
        beside: HTML below the caption, which is folded with the body.
    """
    beside = f'<div style="margin:0 0 4px">{beside}</div>' if beside else ""
    return (
        '<figure style="margin:4px 0;overflow-x:auto;font-size:var(--jp-ui-font-size1, 13px);'
        'color:var(--jp-ui-font-color1, inherit)">'
        f'<figcaption style="margin:0 0 4px"><b>{escape(heading)}</b></figcaption>{beside}{body}</figure>'
    )


def time_axis(end: float) -> str:
    """Return the ticks of a time axis from 0 to `end` seconds, as wide as the page."""
    step = next((step for step in _TICKS if end / step <= 6), 86400.0)
    count = max(1, int(end / step + 1e-9))
    ticks = [(i * step, step) for i in range(count)]
    if (rest := end - count * step) > step / 1000:
        ticks.append((count * step, rest))
    return _axis_row(
        (width / end if end else 1.0, _tick(at) if width > 0.4 * step or not at else "") for at, width in ticks
    )


def segments(parts: Iterable[tuple[float, str]]) -> str:
    """Return parts of a time axis side by side.

    Args:
        parts: Share of the width, 0 to 1, and text of each; there is no text where it does not fit.
    """
    return _axis_row((share, text if share >= _MIN_SEGMENT else "") for share, text in parts)


def _axis_row(parts: Iterable[tuple[float, str]]) -> str:
    """Return cells with left borders, whose text takes the page's colours and needs no script."""
    style = f"padding:0 0 0 3px;text-align:left;border:none;border-left:1px solid;white-space:nowrap;{MUTED}"
    cells = "".join(f'<td style="{style};width:{100 * share:.2f}%">{escape(text)}</td>' for share, text in parts)
    axis_style = (
        "border-collapse:collapse;border:none;table-layout:fixed;width:100%;margin:0;font-size:smaller;color:inherit"
    )
    return table((), [table_row(cells)], style=axis_style)


def _tick(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def foldable(body: str, *, after: str = "") -> str:
    """Return an open picture whose first caption folds it; `static/shared/wire.js` does so while a view is live.

    Args:
        body: The picture.
        after: The cell after which it is, for a caption that names none.
    """
    caption = _CAPTION.search(body)
    summary = caption[1] if caption else "picture"
    summary += f" · after {after}" if after and "In [" not in summary else ""
    return f'<details open class="axon-picture"><summary>{summary}</summary>{_CAPTION.sub("", body, count=1)}</details>'
