"""Memory as pictures, a table and text, which need neither a kernel nor scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from axon_nb.records.memory import ROLES, WhatIfState
from axon_nb.widgets.html import WRAPPED_CELL, figure, legend, note_lines, row_title, svg_uri, table, table_row
from axon_nb.widgets.memory.rows import Bar, MemoryRow, MemoryRows
from axon_nb.widgets.memory.what_if import prediction_bars, what_if_html, what_if_lines
from axon_nb.widgets.palette import OKABE_ITO, needs_outline

__all__ = ["MEMORY_TITLES", "bar_svg", "memory_bundle", "role_swatch"]

MEMORY_TITLES = ("rank", "memory", "", "process")
"""Columns of the table of ranks."""
_MAX_RANKS = 256
_LOOKS: dict[str, tuple[str, str]] = {
    "parameters": (OKABE_ITO["green"], ""),
    "gradients": (OKABE_ITO["blue"], "M1.5 0v8M5.5 0v8"),
    "optimizer": (OKABE_ITO["vermillion"], "M-2 2l4-4M0 8l8-8M6 10l4-4"),
    "buffers": (OKABE_ITO["purple"], "M0 0h8M0 0v8"),
    "activations": (OKABE_ITO["orange"], "M0 0l8 8M8 0l-8 8"),
    "unsharded": (OKABE_ITO["sky"], "M0 8l8-8"),
    "communication": (OKABE_ITO["yellow"], "M4 0v3"),
    "fragmentation": ("#FFFFFF", "M4 0v8"),
    "other": ("#FFFFFF", "M0 4h8"),
    "resident": (OKABE_ITO["grey"], ""),
}
"""Colour and pattern of each role, as in `static/memory/view.css`."""
_DARK_LINES = ("communication", "fragmentation", "other")


def bar_svg(bar: Bar, *, width: int, height: int) -> str:
    """Draw a bar with its marks: a line at the highest use, a dashed line at the capacity."""
    shapes, left = [], 0.0
    for role, share in bar.segments:
        shapes.append(_box(role, left, share * width, height))
        left += share * width
    if bar.peak is not None:
        x = min(width - 1.0, bar.peak * width)
        shapes.append(f'<path d="M{x:.1f} 0v{height}" stroke="#767676" stroke-width="2"/>')
    if bar.capacity is not None:
        x = min(width - 1.0, bar.capacity * width)
        shapes.append(f'<path d="M{x:.1f} 0v{height}" stroke="#D55E00" stroke-width="2" stroke-dasharray="3 2"/>')
    return _svg(width, height, "".join(shapes))


def role_swatch(role: str) -> str:
    """Draw a sample of one role for a legend, 24 x 12 units."""
    return _svg(24, 12, _box(role, 0, 24, 12))


def _box(role: str, x: float, width: float, height: int) -> str:
    color, pattern = _LOOKS[role]
    edge = ' stroke="#767676" stroke-width=".75"' if needs_outline(color) else ""
    area = f'x="{x:.1f}" y=".5" width="{width:.1f}" height="{height - 1}"'
    box = f'<rect {area} fill="{color}"{edge}/>'
    return box + (f'<rect {area} fill="url(#{role})"/>' if pattern else "")


def _svg(width: int, height: int, body: str) -> str:
    used = [role for role in (*ROLES, "resident") if f"url(#{role})" in body]
    defs = "".join(
        f'<pattern id="{role}" width="8" height="8" patternUnits="userSpaceOnUse"><path d="{_LOOKS[role][1]}" '
        f'stroke="{"#767676" if role in _DARK_LINES else "#fff"}" stroke-opacity=".7" stroke-width="1.5"/></pattern>'
        for role in used
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'preserveAspectRatio="none">'
        f"{f'<defs>{defs}</defs>' if defs else ''}{body}</svg>"
    )


def memory_bundle(rows: MemoryRows, state: WhatIfState | None = None) -> dict[str, str]:
    """Return `text/html` and `text/plain`, with the last prediction if there is one."""
    state = state or WhatIfState()
    predicted = {role for labelled in prediction_bars(state, None) for role, _ in labelled.bar.segments}
    roles = [role for role in ROLES if role in predicted or role in rows.roles]
    html = _html(rows, roles, what_if_html(state, lambda bar: _picture(bar, 300, 14)))
    return {"text/html": html, "text/plain": "\n".join([_text(rows), *what_if_lines(state)])}


def _text(rows: MemoryRows) -> str:
    lines = []
    for row in rows.rows():
        bars = [row.measured, *([row.estimated] if row.estimated else []), row.process]
        lines.append(f"  rank {row.rank}: " + "; ".join(bar.text for bar in bars))
    return "\n".join([rows.heading, *lines, *rows.notes()])


def _html(rows: MemoryRows, roles: Sequence[str], what_if: str) -> str:
    samples = legend([(role_swatch(role), role) for role in roles], height=12, margin="right")
    shown = rows.rows()
    notes = rows.notes()
    if len(shown) > _MAX_RANKS:
        notes.append(f"{len(shown) - _MAX_RANKS} more ranks are left out here.")
    ranks = table(MEMORY_TITLES, map(_row, shown[:_MAX_RANKS]), cell=WRAPPED_CELL)
    return figure(f"{ranks}{note_lines(notes)}{what_if}", heading=rows.heading, beside=f"<div>{samples}</div>")


def _row(row: MemoryRow) -> str:
    pictures = _picture(row.measured, 300, 14) + (_picture(row.estimated, 300, 8) if row.estimated else "")
    text = escape(row.measured.text) + (f"<br>{escape(row.estimated.text)}" if row.estimated else "")
    flag = f' <b title="{escape(row.flag)}">⚠</b>' if row.flag else ""
    return table_row(
        row_title(f"{row.rank}{flag}", WRAPPED_CELL),
        f'<td style="{WRAPPED_CELL};width:36%">{pictures}</td><td style="{WRAPPED_CELL}">{text}</td>',
        f'<td style="{WRAPPED_CELL}">{_picture(row.process, 120, 10)}{escape(row.process.text)}</td>',
    )


def _picture(bar: Bar, width: int, height: int) -> str:
    text = escape(bar.text)
    source = svg_uri(bar_svg(bar, width=width, height=height))
    return (
        f'<img alt="{text}" title="{text}" src="{source}" width="{width}" height="{height}" '
        f'style="display:block;margin:1px 0;width:100%;min-width:90px;max-width:{width}px;height:{height}px">'
    )
