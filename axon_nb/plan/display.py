"""How plans are shown: tables as text and HTML, and pipeline timelines as plotly figures or SVG.

All sizes in a table have one unit, which suits the largest. The SVG needs no dependencies.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, Literal

from msgspec import Struct

from axon_nb.records.colors import INK, KINDS, RANKS, ROLES, STATES
from axon_nb.records.spans import Span
from axon_nb.records.units import aligned

_ALIGN_LEFT = " style='text-align:left'"
_LINES = "rgba(128, 128, 128, 0.3)"
"""Colour of grids, on light and dark pages."""
_COLORS = {
    "F": KINDS["forward"].both,
    "B": KINDS["backward"].both,
    "I": KINDS["backward"].both,
    "W": RANKS[2].both,
}
"""By action. The backward of inputs is what the other stages wait for, as a whole backward is."""
_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
_WIDTH, _LANE, _MARGIN_LEFT = 900, 22, 56
Table = tuple[str, Sequence[str], Sequence[Sequence[str]], Sequence[str]]
"""Summary, head, rows and notes."""
_MAX_ACTIONS = 6000
"""Timelines with more actions get no SVG, which would slow down the page."""


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
    table = aligned([head, *rows], _numeric(head, rows))
    return "\n".join([summary, *table, *(f"- {note}" for note in notes)])


def html_table(summary: str, head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Format the same as HTML in the page's own colours."""
    numbers = _numeric(head, rows)

    def row(cells: Sequence[str], tag: str) -> str:
        # Jupyter's style sheets right-align all cells.
        styles = ("" if right else _ALIGN_LEFT for right in numbers)
        shown = (f"<{tag}{style}>{html.escape(cell)}</{tag}>" for cell, style in zip(cells, styles, strict=True))
        return f"<tr>{''.join(shown)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    listed = f"<ul>{''.join(f'<li>{html.escape(note)}</li>' for note in notes)}</ul>" if notes else ""
    return (
        f"<div><p><b>{html.escape(summary)}</b></p><div style='overflow-x:auto'><table style='margin:0'>"
        f"<thead>{row(head, 'th')}</thead><tbody>{body}</tbody></table></div>{listed}</div>"
    )


class Shown:
    """A result that is shown as a summary line, a table and notes."""

    __slots__ = ()

    def _table(self) -> Table:
        raise NotImplementedError

    def __str__(self) -> str:
        return text_table(*self._table())

    def __repr__(self) -> str:
        return str(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": html_table(*self._table())}


def _numeric(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return which columns hold only numbers or empty cells."""
    return [bool(rows) and all(_is_number(cells[place]) for cells in rows) for place in range(len(head))]


def _is_number(cell: str) -> bool:
    """Return whether a cell is empty or a number, with or without a unit."""
    word = cell.partition(" ")[0].rstrip("%").lstrip("-<").replace(",", "")
    return not cell or word.replace(".", "", 1).replace("e+", "").replace("e-", "").isdigit()


class SizeUnit(Struct, frozen=True):
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


def plotly_figure(traces: Sequence[Any], layout: Any) -> Any:
    """Return a plotly figure with a transparent background.

    Args:
        traces: plotly traces, as dicts.
        layout: A plotly layout, as a dict.
    """
    # Imported by name: code that runs without a notebook must not depend on plotly, and ranks never load it.
    figures = import_module("plotly.graph_objects")
    figure = figures.Figure({"data": list(traces), "layout": layout})
    clear = "rgba(0, 0, 0, 0)"
    figure.update_layout(
        paper_bgcolor=clear,
        plot_bgcolor=clear,
        font={"color": INK, "size": 12},
        title={"font": {"size": 15}},
        colorway=[color.both for color in KINDS.values()],
    )
    for update in (figure.update_xaxes, figure.update_yaxes):
        update(gridcolor=_LINES, zerolinecolor=_LINES)
    return figure


def bar(name: str, x: Sequence[Any], y: Sequence[Any], color: str | None = None, **more: Any) -> dict[str, Any]:
    """Return the plotly trace of some bars; without a colour they take the next one."""
    painted = {} if color is None else {"marker": {"color": color}}
    return {"type": "bar", "name": name, "x": x, "y": y, **painted, **more}


def titled(text: str, **more: Any) -> dict[str, Any]:
    """Return a plotly axis or layout with this title."""
    return {"title": {"text": text}, **more}


def paint_of(name: str) -> str:
    """Return the colour of a role of memory, or of a part of a step such as ``compute, backward``."""
    if name in ROLES:
        return ROLES[name].both
    work, _, phase = name.partition(", ")
    if work == "communication":
        return KINDS["p2p" if phase == "backward" else "collective"].both
    return KINDS["wait" if work.startswith("bubble") else phase if phase in KINDS else "other"].both


def state_paint(state: Literal["ok", "error"]) -> str:
    """Return the colour for a good or a bad result."""
    return STATES[state][0].both


def figure_of(spans: Iterable[Span], *, title: str) -> Any:
    """Return a timeline figure: one line per rank, one bar per action, in milliseconds."""
    by_action: dict[str, list[Span]] = {}
    for span in spans:
        by_action.setdefault(span.name, []).append(span)
    traces = [
        bar(
            _NAMES.get(action, action),
            [(span.end_ns - span.start_ns) / 1e6 for span in group],
            [span.rank for span in group],
            _COLORS.get(action),
            orientation="h",
            base=[span.start_ns / 1e6 for span in group],
            customdata=[[span.stage, span.microbatch] for span in group],
            hovertemplate="stage %{customdata[0]}, microbatch %{customdata[1]}<br>from %{base:.3f} ms, %{x:.3f} ms",
        )
        for action, group in by_action.items()
    ]
    ranks = titled("rank", autorange="reversed", dtick=1)
    return plotly_figure(traces, titled(title, barmode="overlay", bargap=0.1, xaxis=titled("ms"), yaxis=ranks))


def svg_of(spans: Sequence[Span]) -> str:
    """Return the same as an SVG; empty if there are too many actions."""
    length = max((span.end_ns for span in spans), default=0)
    if not length or len(spans) > _MAX_ACTIONS:
        return ""
    scale = (_WIDTH - _MARGIN_LEFT) / length
    lanes = max(span.rank for span in spans) + 1
    parts = [
        f"<text x='0' y='{rank * _LANE + 15}' font-size='12' fill='currentColor'>rank {rank}</text>"
        for rank in range(lanes)
    ]
    for span in spans:
        left, width = _MARGIN_LEFT + span.start_ns * scale, (span.end_ns - span.start_ns) * scale
        what = f"{_NAMES.get(span.name, span.name)} of microbatch {span.microbatch} in stage {span.stage}"
        when = f"{span.start_ns / 1e6:.3f}-{span.end_ns / 1e6:.3f} ms"
        parts.append(
            f"<rect x='{left:.1f}' y='{span.rank * _LANE + 2}' width='{max(width - 0.5, 0.2):.1f}' "
            f"height='{_LANE - 4}' fill='{_COLORS.get(span.name, '#888')}'><title>{what}, {when}</title></rect>"
        )
    used = [action for action in _COLORS if any(span.name == action for span in spans)]
    for index, action in enumerate(used):
        left, top = _MARGIN_LEFT + 170 * index, lanes * _LANE + 6
        parts.append(f"<rect x='{left}' y='{top}' width='12' height='12' fill='{_COLORS[action]}'/>")
        parts.append(f"<text x='{left + 18}' y='{top + 11}' font-size='12' fill='currentColor'>{_NAMES[action]}</text>")
    label = f"timeline of {lanes} ranks over {length / 1e6:.4g} ms"
    height = lanes * _LANE + 24
    return (
        f"<svg viewBox='0 0 {_WIDTH} {height}' width='100%' style='max-width:{_WIDTH}px' role='img' "
        f"aria-label='{label}'>{''.join(parts)}</svg>"
    )
