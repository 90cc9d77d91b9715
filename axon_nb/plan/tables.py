"""Tables as text and HTML; all sizes in a table have one unit, which suits the largest."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LEFT = " style='text-align:left'"


def format_ms(seconds: float) -> str:
    """Format seconds as milliseconds: ``0``, ``<0.0001``, ``0.0123``, ``12.34``, ``12,345``."""
    milliseconds = 1e3 * seconds
    if 0 < milliseconds < 0.00005:
        return "<0.0001"
    if milliseconds < 0.1:
        return f"{milliseconds:.4f}".rstrip("0").rstrip(".")
    return f"{milliseconds:,.0f}" if milliseconds >= 1e4 else f"{milliseconds:.4g}"


def format_flops(per_s: float) -> str:
    """Format FLOP/s: ``1.5 MFLOP/s``, ``12.3 GFLOP/s``, ``515 TFLOP/s``."""
    unit, size = next(((name, size) for name, size in (("T", 1e12), ("G", 1e9)) if per_s >= size), ("M", 1e6))
    value = per_s / size
    return f"{value:,.0f} {unit}FLOP/s" if value >= 999.5 else f"{value:.3g} {unit}FLOP/s"


def text_table(summary: str, head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Format a summary line, a table whose numeric columns are right-aligned, and notes."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    numbers = _numeric(head, rows)

    def shown(line: Sequence[str]) -> str:
        cells = zip(line, widths, numbers, strict=True)
        return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells).rstrip()

    return "\n".join([summary, *map(shown, lines), *(f"- {note}" for note in notes)])


def html_table(summary: str, head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Format the same as HTML in the page's own colours."""
    numbers = _numeric(head, rows)

    def row(cells: Sequence[str], tag: str) -> str:
        # Jupyter's style sheets right-align all cells.
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
    """Return which columns hold only numbers or empty cells."""
    return [bool(rows) and all(_is_number(cells[place]) for cells in rows) for place in range(len(head))]


def _is_number(cell: str) -> bool:
    """Return whether a cell is empty or a number, with or without a unit."""
    word = cell.partition(" ")[0].rstrip("%").lstrip("-<").replace(",", "")
    return not cell or word.replace(".", "", 1).replace("e+", "").replace("e-", "").isdigit()


@dataclass(frozen=True, slots=True)
class SizeUnit:
    """A binary unit of size."""

    name: str
    """``bytes``, ``KiB``, ``MiB`` or ``GiB``."""
    bytes: int
    """Bytes per unit."""

    def of(self, num_bytes: int) -> float:
        """Convert bytes to this unit."""
        return num_bytes / self.bytes

    def text(self, num_bytes: int, *, decimals: int = 3) -> str:
        """Format bytes in this unit without its name: ``12.500``, ``1,024.000``, ``0`` or ``<0.001``.

        Args:
            num_bytes: The size.
            decimals: Number of decimals; whole bytes have none.
        """
        if self.bytes == 1 or not num_bytes:
            return f"{num_bytes:,}"
        shown = f"{self.of(num_bytes):,.{decimals}f}"
        return shown if float(shown.replace(",", "")) else f"<{10.0**-decimals:.{decimals}f}"


_UNITS = tuple(SizeUnit(name, 1024**power) for name, power in (("GiB", 3), ("MiB", 2), ("KiB", 1), ("bytes", 0)))


def unit_for(sizes: Iterable[int]) -> SizeUnit:
    """Return the unit in which the largest size is 1 or more; never larger than GiB.

    Args:
        sizes: The sizes in bytes.
    """
    largest = max(sizes, default=0)
    return next((unit for unit in _UNITS if largest >= unit.bytes), _UNITS[-1])
