"""What the saved pages of all views share: figures, tables and pictures that need neither scripts nor a style sheet."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape

__all__ = [
    "MUTED",
    "cell_style",
    "data_cells",
    "figure",
    "head_cells",
    "legend",
    "note_lines",
    "svg_uri",
    "table_style",
]

MUTED = "color:var(--jp-ui-font-color2, inherit)"
"""Style of what is said beside the facts."""


def svg_uri(svg: str) -> str:
    """An SVG as an address for `<img src>`."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def cell_style(gap: int, *, above: int = 2, wraps: bool = False) -> str:
    """Style of a table's cell.

    Args:
        gap: To the next column, in px.
        above: And below, in px.
        wraps: Whether long text is broken into lines.
    """
    style = f"padding:{above}px {gap}px {above}px 0;text-align:left;vertical-align:middle;border:none"
    return style if wraps else f"{style};white-space:nowrap"


def table_style(*, margin: str = "0", widths: tuple[int, int] | None = None) -> str:
    """Style of a table.

    Args:
        margin: As CSS.
        widths: Least and largest in px, of a table that is as wide as the page allows; None: as its cells are.
    """
    if widths is None:
        return f"border-collapse:collapse;border:none;margin:{margin};font-size:inherit;color:inherit"
    return (
        f"table-layout:auto;border-collapse:collapse;border:none;margin:{margin};width:100%;min-width:{widths[0]}px;"
        f"max-width:{widths[1]}px;font-size:inherit;color:inherit"
    )


def head_cells(titles: Iterable[str], style: str) -> str:
    """A table's head; `style` is that of its cells."""
    return "".join(
        f'<th scope="col" style="{style};font-weight:normal;{MUTED}">{escape(title)}</th>' for title in titles
    )


def data_cells(cells: Iterable[str], style: str) -> str:
    """Cells of text, in one style."""
    return "".join(f'<td style="{style}">{escape(cell)}</td>' for cell in cells)


def note_lines(notes: Iterable[str]) -> str:
    """Sentences below a figure."""
    return "".join(f'<div style="{MUTED}">{escape(note)}</div>' for note in notes)


def legend(entries: Iterable[tuple[str, str]], *, height: int = 14, margin: str = "left") -> str:
    """Samples with their names.

    Args:
        entries: (SVG 24 units wide, label) of each.
        height: Of a sample in px.
        margin: The side on which entries keep apart.
    """
    return "".join(
        f'<span style="white-space:nowrap;margin-{margin}:14px"><img alt="" src="{svg_uri(svg)}" width="24" '
        f'height="{height}" style="display:inline-block;vertical-align:middle;margin:0 5px 0 0">{label}</span> '
        for svg, label in entries
    )


def figure(body: str, *, heading: str, beside: str = "") -> str:
    """A figure.

    Args:
        body: HTML below the caption.
        heading: Text of the caption.
        beside: HTML after it.
    """
    return (
        '<figure style="margin:4px 0;overflow-x:auto;font-size:var(--jp-ui-font-size1, 13px);'
        'color:var(--jp-ui-font-color1, inherit)">'
        f'<figcaption style="margin:0 0 4px"><b>{escape(heading)}</b>{beside}</figcaption>{body}</figure>'
    )
