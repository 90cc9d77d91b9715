"""What the saved pages of all views share: figures, tables and pictures that need neither scripts nor a style sheet."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from html import escape

CODE = "font-family:var(--jp-code-font-family, ui-monospace, monospace)"
"""Style of code."""
MUTED = "color:var(--jp-ui-font-color2, inherit)"
"""Style of secondary text."""
WRAPPED_CELL = "padding:2px 14px 2px 0;text-align:left;vertical-align:middle;border:none"
"""Style of a table's cell with long text."""
CELL = f"{WRAPPED_CELL};white-space:nowrap"
"""Style of a table's cell with text that is not wrapped."""

NUMBER = "padding:2px 14px 2px 0;text-align:right;vertical-align:middle;border:none;white-space:nowrap"
"""Style of a table's cell with a number."""
_SMALL = f"font-size:85%;{MUTED}"
_WARN = "#C78100"
_QUOTED = re.compile("`([^`]+)`")


def prose(text: str) -> str:
    """Return text as HTML, with what is in backticks as code."""
    return _QUOTED.sub(rf'<code style="{CODE}">\1</code>', escape(text))


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
        beside: HTML after the caption.
    """
    return (
        '<figure style="margin:4px 0;overflow-x:auto;font-size:var(--jp-ui-font-size1, 13px);'
        'color:var(--jp-ui-font-color1, inherit)">'
        f'<figcaption style="margin:0 0 4px"><b>{escape(heading)}</b>{beside}</figcaption>{body}</figure>'
    )


def folded(body: str, *, summary: str = "the same as a picture, which stays in the saved notebook") -> str:
    """Return HTML below a line of text; a click opens it."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"
