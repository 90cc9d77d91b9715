"""Renders a cluster as a card, as `%distributed start` and a cluster at the end of a cell show it.

A mesh is drawn as tables of ranks, one for each slice along its last two axes. Of many ranks, those that do the same
share a row.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from html import escape

from axon_nb.records.placement import MeshInfo, MeshSlice
from axon_nb.records.ranks import format_ranks
from axon_nb.records.telemetry import ClusterInfo, RankInfo
from axon_nb.records.units import format_bytes

_MAX_MESH = 256
"""Largest mesh that is drawn."""
_MAX_HOSTS = 4
"""Most hosts of which each is named."""
_MAX_ROWS = 64
_SECONDS = re.compile(r",? for ([\d.]+) s$")
"""How long a rank has been in its state, at the end of the text."""
MUTED = "color:var(--jp-ui-font-color2, inherit)"
_HEAD = f"padding:1px 8px;border:none;text-align:center;font-weight:normal;white-space:nowrap;{MUTED}"
_BOX = "padding:3px 10px;border:1px solid var(--jp-border-color1, #767676);text-align:center;min-width:1.5em"
_DEAD = ";text-decoration:line-through;opacity:.6"
_OPEN_UP_TO = 16
_CELL = "padding:2px 14px 2px 0;text-align:left;border:none;white-space:nowrap"
_NUMBER = "padding:2px 14px 2px 0;text-align:right;border:none;white-space:nowrap"
_RULE = "border-bottom:1px solid var(--jp-border-color2, currentColor)"


def mesh_html(mesh: MeshInfo, states: Mapping[int, str]) -> str:
    """Render the mesh as HTML tables side by side.

    Args:
        mesh: The mesh.
        states: What each live rank is doing, in words; ranks without an entry are struck out.
    """
    slices = mesh.slices() if len(mesh.ranks) <= _MAX_MESH else []
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
    title = escape(f"rank {rank}: {state or 'gone'}")
    return f'<td title="{title}" style="{_BOX}{"" if state else _DEAD}">{rank}</td>'


def mesh_text(mesh: MeshInfo) -> list[str]:
    """Render the mesh as lines of text."""
    lines = [str(mesh)]
    if len(mesh.ranks) > _MAX_MESH:
        return lines
    width = len(str(max(mesh.ranks, default=0)))
    for part in mesh.slices():
        if part.place:
            lines.append(f"  {part.place}")
        for number, ranks in enumerate(part.rows):
            name = f"{mesh.axes[-2]} {number}: " if len(mesh.axes) > 1 else f"{mesh.axes[-1]}: "
            lines.append(f"  {name}{' '.join(str(rank).rjust(width) for rank in ranks)}")
    return lines


def cluster_card(info: ClusterInfo) -> dict[str, str]:
    """Render a cluster and its ranks as `text/html` (no scripts; light and dark themes) and `text/plain`."""
    return {"text/html": _html(info), "text/plain": _text(info)}


def _heading(info: ClusterInfo) -> list[str]:
    ranks = f"{info.num_ranks} rank{'' if info.num_ranks == 1 else 's'}"
    protected = [f"protected: step {info.protected}"] if info.protected is not None else []
    slowed = [f"slowed: {info.slowed}"] if info.slowed else []
    return [ranks, info.backend, f"on {_hosts(info.host.split(', '))}", f"engines: {info.engines}", *protected, *slowed]


def _hosts(names: Collection[str]) -> str:
    return ", ".join(names) if len(names) <= _MAX_HOSTS else f"{len(names)} hosts"


def _rows(info: ClusterInfo) -> list[Sequence[RankInfo]]:
    """Return the ranks of each row: one, or, of many ranks, all that do the same, however long they have done it."""
    if len(info.ranks) <= _OPEN_UP_TO:
        return [(row,) for row in info.ranks]
    groups: dict[tuple[object, ...], list[RankInfo]] = {}
    for row in info.ranks:
        kind = row.device.partition(":")[0]
        groups.setdefault((_SECONDS.sub("", row.state), row.cell, row.backend, kind), []).append(row)
    return list(groups.values())


def _columns(info: ClusterInfo, rows: Sequence[Sequence[RankInfo]]) -> list[tuple[str, bool, list[str]]]:
    """For each column: its title, whether it holds numbers, and one text per row."""
    columns = [
        ("rank", True, [format_ranks(one.rank for one in row) for row in rows]),
        ("host", False, [_hosts(dict.fromkeys(one.host for one in row)) for row in rows]),
        ("pid", True, [str(row[0].pid) if len(row) == 1 else f"{len(row)} pids" for row in rows]),
        ("device", False, [_devices(row) for row in rows]),
        ("backend", False, [row[0].backend for row in rows]),
        ("state", False, [_state(row) for row in rows]),
        ("memory", True, [_bytes([one.rss_bytes for one in row if one.rss_bytes]) for row in rows]),
    ]
    if any(row.device_bytes for row in info.ranks):
        columns.append(("on device", True, [_bytes([one.device_bytes for one in row]) for row in rows]))
    return columns


def _devices(row: Sequence[RankInfo]) -> str:
    names = {one.device for one in row}
    kind = row[0].device.partition(":")[0]
    numbers = [int(name.partition(":")[2]) for name in names if name.partition(":")[2].isdigit()]
    return f"{kind}:{format_ranks(numbers)}" if len(numbers) == len(names) else _hosts(sorted(names))


def _bytes(sizes: Sequence[int]) -> str:
    """Format a size, or the range of several."""
    if not sizes:
        return "–"
    least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
    return least if least == most else f"{least} to {most}"


def _gpus(info: ClusterInfo) -> list[str]:
    """One line for each GPU: what is used of its memory, how busy, warm and hungry it is."""
    lines = []
    for gpu in info.gpus:
        facts = (
            []
            if gpu.used_bytes is None or gpu.total_bytes is None
            else [f"{format_bytes(gpu.used_bytes)} of {format_bytes(gpu.total_bytes)} used"]
        )
        facts += [f"{gpu.busy_percent} % busy"] if gpu.busy_percent is not None else []
        facts += [f"{gpu.temperature_c} °C"] if gpu.temperature_c is not None else []
        facts += [f"{gpu.power_w:.0f} W"] if gpu.power_w is not None else []
        lines.append(f"GPU {gpu.index} ({gpu.name}): {', '.join(facts) or 'no figures'}")
    return lines


def _state(row: Sequence[RankInfo]) -> str:
    longest = max(row, key=lambda one: float(match[1]) if (match := _SECONDS.search(one.state)) else 0.0)
    return longest.state if longest.cell is None else f"{longest.state} · In [{longest.cell}]"


def _omitted(rows: Sequence[Sequence[RankInfo]]) -> list[str]:
    count = sum(map(len, rows[_MAX_ROWS:]))
    return [f"… {count} more ranks in {len(rows) - _MAX_ROWS} more rows"] if count else []


def _html(info: ClusterInfo) -> str:
    rows = _rows(info)
    columns = _columns(info, rows[:_MAX_ROWS])
    head = "".join(
        f'<th scope="col" style="{_NUMBER if number else _CELL};{_RULE};font-weight:normal;{MUTED}">{title}</th>'
        for title, number, _ in columns
    )
    body = "".join(
        '<tr style="background:none">'
        + "".join(f'<td style="{_NUMBER if number else _CELL}">{escape(text[i])}</td>' for _, number, text in columns)
        + "</tr>"
        for i in range(len(rows[:_MAX_ROWS]))
    ) + "".join(f'<tr><td colspan="{len(columns)}" style="{_CELL}">{line}</td></tr>' for line in _omitted(rows))
    table = (
        '<table style="table-layout:auto;border-collapse:collapse;border:none;margin:0;'
        'font-size:inherit;color:inherit">'
        f'<thead><tr style="background:none">{head}</tr></thead><tbody>{body}</tbody></table>'
    )
    measured = any(row.rss_bytes for row in info.ranks)
    states = {row.rank: row.state for row in info.ranks if row.rss_bytes or not measured}
    mesh = mesh_html(info.mesh, states) if info.mesh is not None else ""
    gpus = "".join(f'<div style="{MUTED}">{escape(line)}</div>' for line in _gpus(info))
    opened = " open" if len(rows) <= _OPEN_UP_TO else ""
    return (
        '<div style="display:inline-block;max-width:100%;overflow-x:auto;padding:8px 12px;border-radius:4px;'
        "border:1px solid var(--jp-border-color2, currentColor);color:var(--jp-ui-font-color1, inherit);"
        'font-size:var(--jp-ui-font-size1, 13px)">'
        f'<div style="margin-bottom:4px"><b>{escape(info.name)}</b> · {"●" if info.running else "○"} '
        f"{'running' if info.running else 'not running'}"
        f'<span style="{MUTED}"> · {escape(" · ".join(_heading(info)))}</span></div>'
        f"<details{opened}><summary>ranks</summary>{table}</details>{gpus}{mesh}</div>"
    )


def _text(info: ClusterInfo) -> str:
    rows = _rows(info)
    columns = _columns(info, rows[:_MAX_ROWS])
    widths = [max(len(title), *map(len, text), 0) for title, _, text in columns]
    lines = [
        [title for title, _, _ in columns],
        *([text[i] for _, _, text in columns] for i in range(len(rows[:_MAX_ROWS]))),
    ]
    table = (
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, (_, number, _) in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    )
    state = "running" if info.running else "not running"
    mesh = mesh_text(info.mesh) if info.mesh is not None else []
    return "\n".join(
        [f"{info.name}: {state}, {', '.join(_heading(info))}", *table, *_omitted(rows), *_gpus(info), *mesh]
    )
