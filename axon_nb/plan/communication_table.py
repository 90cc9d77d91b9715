"""Rows of text as a table, for terminals and for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence

__all__ = ["format_flops", "format_ms", "html_table", "text_table"]

_LEFT = " style='text-align:left'"


def format_ms(seconds: float) -> str:
    """Seconds in milliseconds, to 4 digits at least: ``0.01234``, ``12.34``, ``12,345``."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 1e4 else f"{milliseconds:.4g}"


def format_flops(per_s: float) -> str:
    """Floating point operations a second: ``12.3 GFLOP/s``, ``515 TFLOP/s``."""
    return f"{per_s / 1e12:.3g} TFLOP/s" if per_s >= 1e12 else f"{per_s / 1e9:.3g} GFLOP/s"


def text_table(summary: str, head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """A line that sums up, the table in columns, and notes below; columns of numbers are flush right."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    numbers = _numeric(head, rows)

    def shown(line: Sequence[str]) -> str:
        cells = zip(line, widths, numbers, strict=True)
        return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells).rstrip()

    return "\n".join([summary, *map(shown, lines), *(f"- {note}" for note in notes)])


def html_table(summary: str, head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """The same as HTML, in the colours of the page that it is in."""
    numbers = _numeric(head, rows)

    def row(cells: Sequence[str], tag: str) -> str:
        # Jupyter's style sheets put the text of all cells flush right.
        styles = ("" if right else _LEFT for right in numbers)
        shown = (f"<{tag}{style}>{html.escape(cell)}</{tag}>" for cell, style in zip(cells, styles, strict=True))
        return f"<tr>{''.join(shown)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    listed = f"<ul>{''.join(f'<li>{html.escape(note)}</li>' for note in notes)}</ul>" if notes else ""
    return (
        f"<div><p><b>{html.escape(summary)}</b></p><div style='overflow-x:auto'><table style='margin:0'>"
        f"<thead>{row(head, 'th')}</thead><tbody>{body}</tbody></table></div>{listed}</div>"
    )


def _numeric(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Which columns hold numbers, or nothing."""
    return [bool(rows) and all(_is_number(cells[place]) for cells in rows) for place in range(len(head))]


def _is_number(cell: str) -> bool:
    """Whether a cell is empty or begins with a number, a unit or what is in brackets behind it."""
    word = cell.partition(" ")[0].rstrip("%").lstrip("-").replace(",", "")
    return not cell or word.replace(".", "", 1).replace("e+", "").replace("e-", "").isdigit()
