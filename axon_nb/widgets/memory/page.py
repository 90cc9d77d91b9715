"""Memory as pictures, a table and text, which need neither a kernel nor scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from axon_nb.records.colors import INK, LIMIT
from axon_nb.records.colors import ROLES as ROLE_COLORS
from axon_nb.records.memory import ROLES, WhatIfState
from axon_nb.widgets import html
from axon_nb.widgets.memory.bars import Bar
from axon_nb.widgets.memory.rows import MemoryRow, MemoryRows
from axon_nb.widgets.memory.scale import Tick
from axon_nb.widgets.memory.summary import figures, notice
from axon_nb.widgets.memory.what_if import prediction_bars, what_if_html, what_if_lines

_MAX_RANKS = 256
_WIDTH = 600


def bar_svg(bar: Bar, *, width: int, height: int) -> str:
    """Draw a bar with its marks: a line at the highest use, a dashed line at the capacity."""
    shapes, left = [f'<path d="M0 {height - 0.5}h{width}" stroke="{INK}" stroke-opacity=".4"/>'], 0.0
    for role, share in bar.segments:
        shapes.append(_box(role, left, share * width, height))
        left += share * width
    if bar.peak is not None:
        x = min(width - 1.0, bar.peak * width)
        shapes.append(f'<path d="M{x:.1f} 0v{height}" stroke="{INK}" stroke-width="2"/>')
    if bar.capacity is not None:
        x = min(width - 1.0, bar.capacity * width)
        shapes.append(f'<path d="M{x:.1f} 0v{height}" stroke="{LIMIT.both}" stroke-width="2" stroke-dasharray="3 2"/>')
    return _svg(width, height, "".join(shapes))


def role_swatch(role: str) -> str:
    """Draw a sample of one role for a legend, 12 x 12 units."""
    return _svg(12, 12, _box(role, 0, 12, 12))


def _box(role: str, x: float, width: float, height: int) -> str:
    gap = 1.0 if width > 3 else 0.0
    return f'<rect x="{x:.1f}" width="{width - gap:.2f}" height="{height}" fill="{ROLE_COLORS[role].both}"/>'


def _svg(width: int, height: int, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'preserveAspectRatio="none">{body}</svg>'
    )


def memory_bundle(rows: MemoryRows, state: WhatIfState | None = None) -> dict[str, str]:
    """Return `text/html` and `text/plain`, with the last prediction if there is one."""
    state = state or WhatIfState()
    predicted = {role for labelled in prediction_bars(state, None) for role, _ in labelled.bar.segments}
    roles = [role for role in ROLES if role in predicted or role in rows.roles]
    page = _html(rows, roles, what_if_html(state, lambda bar: _picture(bar, 14)))
    return {"text/html": page, "text/plain": "\n".join([_text(rows), *what_if_lines(state)])}


def _text(rows: MemoryRows) -> str:
    lines = []
    for row in rows.rows():
        bars = [row.measured, *([row.estimated] if row.estimated else []), row.process]
        lines.append(f"  rank {row.rank}: " + "; ".join(bar.text for bar in bars))
    return "\n".join([rows.heading, *lines, *rows.notes()])


def _html(rows: MemoryRows, roles: Sequence[str], what_if: str) -> str:
    samples = html.legend([(role_swatch(role), role) for role in roles], width=12, height=12, margin="right")
    shown = rows.rows()
    notes = rows.notes()
    if len(shown) > _MAX_RANKS:
        notes.append(f"{len(shown) - _MAX_RANKS} more ranks are left out here.")
    numbers = html.figures((figure["name"], figure["value"], figure["remark"]) for figure in figures(rows))
    warning = notice(rows)
    pictures = [*map(_picture_row, shown[:_MAX_RANKS]), _axis_row(rows.scale.ticks)]
    bars = html.table((), pictures, style=html.table_style(widths=(480, 1400)))
    table = html.table(
        (f"rank, {rows.scale.unit}", *rows.columns), map(_number_row, shown[:_MAX_RANKS]), cell=html.NUMBER
    )
    body = (
        f"{numbers}{html.notice(*warning) if warning else ''}<div>{samples}</div>{bars}{table}{html.note_lines(notes)}"
        f"{what_if}"
    )
    return html.figure(body, heading=rows.heading)


def _picture_row(row: MemoryRow) -> str:
    pictures = _picture(row.measured, 16) + (_picture(row.estimated, 5) if row.estimated else "")
    flag = f' <b title="{escape(row.flag)}">⚠</b>' if row.flag else ""
    return html.table_row(
        html.row_title(f"rank {row.rank}{flag}"),
        f'<td style="{html.CELL};width:80%">{pictures}</td>',
        html.data_cells([row.total, row.remark]),
    )


def _number_row(row: MemoryRow) -> str:
    cells = html.data_cells([cell.text for cell in row.cells], html.NUMBER)
    return html.table_row(html.row_title(f"rank {row.rank}"), cells)


def _axis_row(ticks: Sequence[Tick]) -> str:
    """Return ticks as cells of a table, whose text takes the page's colours; each label ends at its tick."""
    before, cells = 0.0, []
    for tick in ticks[1:]:
        style = f"padding:0;border:none;border-right:1px solid {INK};text-align:right;white-space:nowrap"
        cells.append(f'<td style="{style};width:{100 * (tick.share - before):.2f}%">{tick.label}&nbsp;</td>')
        before = tick.share
    axis = html.table(
        (), [html.table_row(*cells)],
        style="border-collapse:collapse;border:none;table-layout:fixed;width:100%;margin:0;font-size:smaller",
    )  # fmt: skip
    return html.table_row(f'<td style="{html.CELL}"></td><td style="{html.CELL}">{axis}</td>')


def _picture(bar: Bar, height: int) -> str:
    text = escape(bar.text)
    source = html.svg_uri(bar_svg(bar, width=_WIDTH, height=height))
    return (
        f'<img alt="{text}" title="{text}" src="{source}" width="{_WIDTH}" height="{height}" '
        f'style="display:block;margin:1px 0;width:100%;min-width:90px;max-width:none;height:{height}px">'
    )
