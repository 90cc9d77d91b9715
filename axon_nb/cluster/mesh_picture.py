"""A mesh as a picture for the cluster's card: a table for each two axes, a rank in each cell."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from axon_nb.records.mesh import MeshInfo, MeshSlice

__all__ = ["MUTED", "mesh_html", "mesh_text"]

_MAX_RANKS = 1024
MUTED = "color:var(--jp-ui-font-color2, inherit)"
_HEAD = f"padding:1px 8px;border:none;text-align:center;font-weight:normal;white-space:nowrap;{MUTED}"
_BOX = "padding:3px 10px;border:1px solid var(--jp-border-color1, #767676);text-align:center;min-width:1.5em"
_DEAD = ";text-decoration:line-through;opacity:.6"


def mesh_html(mesh: MeshInfo, states: Mapping[int, str]) -> str:
    """The mesh as tables side by side.

    Args:
        mesh: The mesh.
        states: What each rank that lives does, in words; ranks without one are struck out.
    """
    slices = mesh.slices() if len(mesh.ranks) <= _MAX_RANKS else []
    tables = "".join(_table(mesh, part, states) for part in slices)
    return (
        f'<div style="margin-top:6px"><b style="font-weight:600">{escape(str(mesh))}</b>'
        f'<div style="display:flex;flex-wrap:wrap;gap:8px 24px">{tables}</div></div>'
    )


def _table(mesh: MeshInfo, part: MeshSlice, states: Mapping[int, str]) -> str:
    across, down = f"{mesh.axes[-1]} ", f"{mesh.axes[-2]} " if len(mesh.axes) > 1 else ""
    head = "".join(f'<th scope="col" style="{_HEAD}">{escape(across)}{i}</th>' for i in range(len(part.rows[0])))
    body = "".join(
        f'<tr style="background:none"><th scope="row" style="{_HEAD}">{f"{escape(down)}{i}" if down else ""}</th>'
        + "".join(_cell(rank, states.get(rank)) for rank in ranks)
        + "</tr>"
        for i, ranks in enumerate(part.rows)
    )
    caption = f'<caption style="caption-side:top;text-align:left;padding:0;{MUTED}">{escape(part.place)}</caption>'
    return (
        '<table style="table-layout:auto;border-collapse:collapse;border:none;margin:2px 0;font-size:inherit;'
        f'color:inherit">{caption if part.place else ""}<thead><tr style="background:none"><th style="{_HEAD}"></th>'
        f"{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _cell(rank: int, state: str | None) -> str:
    said = escape(f"rank {rank}: {state or 'is gone'}")
    return f'<td title="{said}" style="{_BOX}{"" if state else _DEAD}">{rank}</td>'


def mesh_text(mesh: MeshInfo) -> list[str]:
    """The mesh as lines of text."""
    lines = [str(mesh)]
    if len(mesh.ranks) > _MAX_RANKS:
        return lines
    width = len(str(max(mesh.ranks, default=0)))
    for part in mesh.slices():
        if part.place:
            lines.append(f"  {part.place}")
        for number, ranks in enumerate(part.rows):
            name = f"{mesh.axes[-2]} {number}: " if len(mesh.axes) > 1 else f"{mesh.axes[-1]}: "
            lines.append(f"  {name}{' '.join(str(rank).rjust(width) for rank in ranks)}")
    return lines
