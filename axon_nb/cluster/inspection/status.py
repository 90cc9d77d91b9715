"""What the ranks are doing now: their states, meshes and stacks, the job they run, and the cluster as a card.

A mesh is drawn as tables of ranks, one for each slice along its last two axes. Of many ranks, those that do the same
share a row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from axon_nb.cluster.rpc import RankClient, request_all, request_each, request_waits
from axon_nb.errors import ClusterLostError
from axon_nb.records.protocol.agent import ReadGpus
from axon_nb.records.protocol.inspection import JobRequest, MeshRequest, StacksRequest, StatusRequest
from axon_nb.records.ranks import format_ranks, name_ranks
from axon_nb.records.stacks import RankStack, Stacks
from axon_nb.records.telemetry import Activity, ClusterInfo, GpuUse, MeshInfo, MeshSlice, RankInfo, RankState
from axon_nb.records.training.job import JobReport
from axon_nb.records.units import aligned, count_of, format_bytes
from axon_nb.records.waits import missing_ranks

if TYPE_CHECKING:
    import pandas as pd

    from axon_nb.cluster.state import ClusterState

_TIMEOUT_S = 1.0
_STACKS_TIMEOUT_S = 2.0
_MIN_WAIT_S = 0.25
"""Shorter waits are not described."""
_SILENT = "does not reply: it is in C code that holds the GIL, or the machine is overloaded"
_MAX_MESH = 256
"""Largest mesh that is drawn."""
_MAX_HOSTS = 4
"""Most hosts of which each is named."""
_Columns = list[tuple[str, bool, list[str]]]
"""For each column: its title, whether it holds numbers, and one text per row."""
_MEASURED = ("pid", "memory", "on device")
_MAX_ROWS = 64
_SECONDS = re.compile(r",? for ([\d.]+) s$")
"""How long a rank has been in its state, at the end of the text."""
MUTED = "color:#767676;color:var(--jp-ui-font-color2, #767676)"
_HEAD = f"padding:1px 8px;border:none;text-align:center;font-weight:normal;white-space:nowrap;{MUTED}"
_BOX = "padding:3px 10px;border:1px solid var(--jp-border-color1, #767676);text-align:center;min-width:1.5em"
_DEAD = ";text-decoration:line-through;opacity:.6"
_OPEN_UP_TO = 16
_CELL = "padding:2px 14px 2px 0;text-align:left;border:none;white-space:nowrap"
_NUMBER = "padding:2px 14px 2px 0;text-align:right;border:none;white-space:nowrap"
_RULE = "border-bottom:1px solid var(--jp-border-color2, currentColor)"


def request_mesh(client: RankClient, ranks: Iterable[int]) -> MeshInfo | None:
    """Return the largest mesh on the ranks, and among equals the most common; None if there is none or no reply."""
    replies = request_all(client, ranks, MeshRequest(), timeout_s=_TIMEOUT_S)
    meshes = Counter(reply.mesh for reply in replies.values() if reply.mesh is not None)
    return max(meshes, key=lambda mesh: (len(mesh.ranks), meshes[mesh]), default=None)


def request_states(client: RankClient, ranks: Iterable[int]) -> dict[int, RankState]:
    """Return what each rank is doing now; ranks that do not reply within a second are left out."""
    return request_all(client, ranks, StatusRequest(), timeout_s=_TIMEOUT_S)


def paused_ranks(states: Mapping[int, RankState]) -> list[int]:
    """Return the ranks that have stopped at a breakpoint."""
    return [rank for rank, state in states.items() if state.activity is Activity.PAUSED]


def describe_state(state: RankState | None, late: Sequence[int] = (), paused: Collection[int] = ()) -> str:
    """Describe a rank's state, such as ``waiting in all_reduce at line 4 for rank 1, for 2.1 s``.

    Args:
        state: The rank's latest sample; None: it did not reply.
        late: The ranks that have not joined the call that it waits in.
        paused: The ranks that have stopped at a breakpoint.
    """
    if state is None:
        return "does not reply"
    if state.activity not in (Activity.COLLECTIVE, Activity.WAITING):
        where = {Activity.RUNNING: f" line {state.line}", Activity.PAUSED: f" at line {state.line}"}
        return state.activity.value + (where.get(state.activity, "") if state.line else "")
    seconds = (state.time_ns - state.since_ns) / 1e9
    at = f" at line {state.line}" if state.line else ""
    verb = "waiting in" if state.activity is Activity.WAITING else "in"
    debugger = "the debugger on " if set(late) <= set(paused) else ""
    missing = f" for {debugger}{name_ranks(late)}," if late else ""
    return f"{verb} {state.call}{at}{missing}" + (f" for {seconds:.1f} s" if seconds >= _MIN_WAIT_S else "")


def cluster_info(state: ClusterState) -> ClusterInfo:
    """Request the state of every rank, and return the cluster's state."""
    states = request_states(state.client, state.live_ranks) if state.running else {}
    late: dict[int, tuple[int, ...]] = {}
    if any(rank_state.activity is Activity.WAITING for rank_state in states.values()):
        late = missing_ranks(request_waits(state.client, states), _MIN_WAIT_S)
    rows, paused = [], paused_ranks(states)
    for rank, place in enumerate(state.rank_info):
        rank_state = states.get(rank)
        text = state.health.dead.get(rank) or (
            describe_state(rank_state, late.get(rank, ()), paused) if state.running else "gone"
        )
        rows.append(
            RankInfo(
                rank=rank,
                host=place.host,
                pid=place.pid,
                device=place.device,
                backend=state.backend,
                state=text,
                rss_bytes=rank_state.rss_bytes if rank_state else 0,
                device_bytes=rank_state.device_bytes if rank_state else 0,
                cell=rank_state.cell if rank_state else None,
            )
        )
    hosts = ", ".join(dict.fromkeys(row.host for row in rows))
    return ClusterInfo(
        name=state.name,
        backend=state.backend,
        host=hosts,
        num_ranks=state.world_size,
        running=state.running,
        engines=state.engines,
        ranks=tuple(rows),
        mesh=request_mesh(state.client, states) if states else None,
        protected=_protected(states.values()),
        slowed=str(state.slowness),
        gpus=_gpu_use(state) if any(row.device.startswith("cuda") for row in rows) else (),
    )


def _protected(states: Collection[RankState]) -> int | None:
    steps = [state.protected for state in states if state.protected is not None]
    return min(steps) if steps and len(steps) == len(states) else None


def _gpu_use(state: ClusterState) -> tuple[GpuUse, ...]:
    try:
        return state.connection.agent.call(ReadGpus()).gpus
    except ClusterLostError:
        return ()


class ClusterStatus(Struct, frozen=True):
    """What `%distributed status` returns: shown as a card, with units that people read."""

    info: ClusterInfo

    def to_frame(self) -> pd.DataFrame:
        """Return one row per rank, with memory in bytes, as `Cluster.status` does."""
        return status_frame(self.info)

    def __repr__(self) -> str:
        return cluster_card(self.info)["text/plain"]

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return cluster_card(self.info)


def status_frame(info: ClusterInfo) -> pd.DataFrame:
    """Return one row per rank; `memory` is resident bytes, `device_memory` bytes on the accelerator."""
    import pandas as pd

    names = ("rank", "host", "pid", "device", "backend", "state", "rss_bytes", "device_bytes")
    frame = pd.DataFrame({name: [getattr(row, name) for row in info.ranks] for name in names})
    frame["cell"] = pd.array([row.cell for row in info.ranks], dtype="Int64")
    return frame.rename(columns={"rss_bytes": "memory", "device_bytes": "device_memory"})


def rank_stacks(client: RankClient, ranks: Sequence[int], world: Sequence[int], dead: Mapping[int, str]) -> Stacks:
    """Return the Python stacks of some ranks; for ranks that are dead or do not reply within 2 s, a note instead.

    Args:
        client: The cluster's client.
        ranks: The ranks to show.
        world: All ranks, to find out which ranks the others wait for.
        dead: Why each dead rank died; reads after its name.
    """
    replies = request_all(
        client, [rank for rank in ranks if rank not in dead], StacksRequest(), timeout_s=_STACKS_TIMEOUT_S
    )
    late: dict[int, tuple[int, ...]] = {}
    if any(reply.state.activity is Activity.WAITING for reply in replies.values()):
        late = missing_ranks(request_waits(client, [rank for rank in world if rank not in dead]), 0.0)
    stacks, paused = {}, paused_ranks({rank: reply.state for rank, reply in replies.items()})
    for rank in ranks:
        if rank in dead:
            stacks[rank] = RankStack(dead[rank])
        elif rank not in replies:
            stacks[rank] = RankStack(_SILENT)
        else:
            state = replies[rank].state
            # Without the time, which differs between ranks: ranks with the same description are shown together.
            text = describe_state(msgspec.structs.replace(state, since_ns=state.time_ns), late.get(rank, ()), paused)
            seconds = (state.time_ns - state.since_ns) / 1e9 if state.activity is Activity.WAITING else 0.0
            stacks[rank] = RankStack(text.rstrip(","), replies[rank].frames, state.cell, seconds)
    return Stacks(stacks)


class JobSnapshot(Struct, frozen=True):
    """The job on all ranks at one moment."""

    reports: Mapping[int, JobReport]
    """The reports of the ranks that replied."""
    descriptions: Mapping[int, str]
    """What each rank is doing, in words; includes ranks that are dead or did not reply."""
    cell: int | None
    """Number of the running cell; None: none is running; 0: it has no number, or its ranks did not reply."""
    cost_s: float = 0.0
    """CPU seconds that the reply cost a rank, at most."""
    slowed: str = ""
    """What is slowed on purpose, such as ``rank 2 × 2``; empty: nothing."""


def request_job(state: ClusterState, previous: Mapping[int, JobReport]) -> JobSnapshot:
    """Request a report from every live rank; ranks that do not reply within a second are described as such.

    Args:
        state: The cluster.
        previous: The last report of each rank, after which the new one starts; empty: from the beginning.
    """
    living = state.live_ranks
    requests = {rank: _next_request(previous.get(rank)) for rank in living}
    busy = set(living).intersection(state.busy)
    replies = request_each(state.connection.client, requests, timeout_s=_TIMEOUT_S)
    reports = {rank: reply.report for rank, reply in replies.items()}
    late = missing_ranks({rank: reply.waits for rank, reply in replies.items()}, _MIN_WAIT_S)
    descriptions = {}
    for rank in state.ranks:
        current = reports[rank].state if rank in reports else None
        descriptions[rank] = state.health.dead.get(rank) or describe_state(current, late.get(rank, ()))
    cost_s = max((reply.spent_s for reply in replies.values()), default=0.0)
    return JobSnapshot(reports, descriptions, running_cell(reports, busy), cost_s, str(state.slowness))


def running_cell(reports: Mapping[int, JobReport], busy: Collection[int]) -> int | None:
    """Return the number of the running cell, as in `JobSnapshot.cell`.

    Args:
        reports: The reports of the ranks that replied.
        busy: The ranks that were sent a cell and have not finished it; one that did not reply is still running it.
    """
    cells = [report.state.cell for report in reports.values() if report.state.cell is not None]
    is_silent = any(rank not in reports for rank in busy)
    return max(cells, default=0 if is_silent else None)


def _next_request(report: JobReport | None) -> JobRequest:
    if report is None:
        return JobRequest()
    return JobRequest(report.pid, report.position, report.span_position, report.state.time_ns)


def mesh_html(mesh: MeshInfo, states: Mapping[int, str]) -> str:
    """Render the mesh as HTML tables side by side.

    Args:
        mesh: The mesh.
        states: What each live rank is doing, in words; ranks without an entry are struck out.
    """
    slices = mesh.slices() if len(mesh.ranks) <= _MAX_MESH else []
    tables = "".join(_mesh_table(mesh, part, states) for part in slices)
    return (
        f'<div style="margin-top:6px"><b style="font-weight:600">{escape(str(mesh))}</b>'
        f'<div style="display:flex;flex-wrap:wrap;gap:8px 24px">{tables}</div></div>'
    )


def _mesh_table(mesh: MeshInfo, part: MeshSlice, states: Mapping[int, str]) -> str:
    across, down = f"{mesh.axes[-1]} ", f"{mesh.axes[-2]} " if len(mesh.axes) > 1 else ""
    head = "".join(f'<th scope="col" style="{_HEAD}">{escape(across)}{i}</th>' for i in range(len(part.rows[0])))
    body = "".join(
        f'<tr style="background:none"><th scope="row" style="{_HEAD}">{f"{escape(down)}{i}" if down else ""}</th>'
        + "".join(_mesh_cell(rank, states.get(rank)) for rank in ranks)
        + "</tr>"
        for i, ranks in enumerate(part.rows)
    )
    caption = f'<caption style="caption-side:top;text-align:left;padding:0;{MUTED}">{escape(part.place)}</caption>'
    return (
        '<table style="table-layout:auto;border-collapse:collapse;border:none;margin:2px 0;font-size:inherit;'
        f'color:inherit">{caption if part.place else ""}<thead><tr style="background:none"><th style="{_HEAD}"></th>'
        f"{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _mesh_cell(rank: int, state: str | None) -> str:
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


def cluster_card(info: ClusterInfo, *, measured: bool = True) -> dict[str, str]:
    """Render a cluster and its ranks as `text/html` (no scripts; light and dark themes) and `text/plain`.

    Args:
        info: The cluster.
        measured: Whether to show process ids, memory and GPUs' figures, which are others in each run of a notebook.
    """
    info = info if measured else msgspec.structs.replace(info, gpus=())
    rows = _card_rows(info)
    columns = _card_columns(info, rows[:_MAX_ROWS], measured=measured)
    return {"text/html": _card_html(info, rows, columns), "text/plain": _card_text(info, rows, columns)}


def _heading(info: ClusterInfo) -> list[str]:
    facts = [
        count_of(info.num_ranks, "rank"),
        "shared memory" if info.backend == "shm" else info.backend,
        f"on {_hosts(info.host.split(', '))}",
        "" if info.engines == "axon" else f"engines: {info.engines}",
        "" if info.protected is None else f"protected: step {info.protected}",
        f"slowed: {info.slowed}" if info.slowed else "",
    ]
    return list(filter(None, facts))


def _hosts(names: Collection[str]) -> str:
    return ", ".join(names) if len(names) <= _MAX_HOSTS else f"{len(names)} hosts"


def _card_rows(info: ClusterInfo) -> list[Sequence[RankInfo]]:
    """Return the ranks of each row: one, or, of many ranks, all that do the same, however long they have done it."""
    if len(info.ranks) <= _OPEN_UP_TO:
        return [(row,) for row in info.ranks]
    groups: dict[tuple[object, ...], list[RankInfo]] = {}
    for row in info.ranks:
        kind = row.device.partition(":")[0]
        groups.setdefault((_SECONDS.sub("", row.state), row.cell, row.backend, kind), []).append(row)
    return list(groups.values())


def _card_columns(info: ClusterInfo, rows: Sequence[Sequence[RankInfo]], *, measured: bool) -> _Columns:
    columns = [
        ("rank", True, [format_ranks(one.rank for one in row) for row in rows]),
        ("host", False, [_hosts(dict.fromkeys(one.host for one in row)) for row in rows]),
        ("pid", True, [str(row[0].pid) if len(row) == 1 else f"{len(row)} pids" for row in rows]),
        ("device", False, [_devices(row) for row in rows]),
        ("backend", False, [row[0].backend for row in rows]),
        ("state", False, [_state_in_row(row) for row in rows]),
        ("memory", True, [_bytes([one.rss_bytes for one in row if one.rss_bytes]) for row in rows]),
    ]
    if any(row.device_bytes for row in info.ranks):
        columns.append(("on device", True, [_bytes([one.device_bytes for one in row]) for row in rows]))
    said = {"host": {info.host}, "backend": {info.backend}}  # in the heading
    return [
        (title, is_number, texts)
        for title, is_number, texts in columns
        if (measured or title not in _MEASURED) and set(texts) != said.get(title)
    ]


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


def _gpu_lines(info: ClusterInfo) -> list[str]:
    """One line for each GPU: what is used of its memory, how busy, warm and hungry it is."""
    lines = []
    for gpu in info.gpus:
        used, total = gpu.used_bytes, gpu.total_bytes
        facts = [
            "" if used is None or total is None else f"{format_bytes(used)} of {format_bytes(total)} used",
            "" if gpu.busy_percent is None else f"{gpu.busy_percent} % busy",
            "" if gpu.temperature_c is None else f"{gpu.temperature_c} °C",
            "" if gpu.power_w is None else f"{gpu.power_w:.0f} W",
        ]
        lines.append(f"GPU {gpu.index} ({gpu.name}): {', '.join(filter(None, facts)) or 'no figures'}")
    return lines


def _state_in_row(row: Sequence[RankInfo]) -> str:
    longest = max(row, key=lambda one: float(match[1]) if (match := _SECONDS.search(one.state)) else 0.0)
    return longest.state if longest.cell is None else f"{longest.state} · In [{longest.cell}]"


def _omitted(rows: Sequence[Sequence[RankInfo]]) -> list[str]:
    count = sum(map(len, rows[_MAX_ROWS:]))
    return [f"… {count} more ranks in {len(rows) - _MAX_ROWS} more rows"] if count else []


def _card_html(info: ClusterInfo, rows: Sequence[Sequence[RankInfo]], columns: _Columns) -> str:
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
    gpus = "".join(f'<div style="{MUTED}">{escape(line)}</div>' for line in _gpu_lines(info))
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


def _card_text(info: ClusterInfo, rows: Sequence[Sequence[RankInfo]], columns: _Columns) -> str:
    lines = zip(*((title, *text[:_MAX_ROWS]) for title, _, text in columns), strict=True)
    table = aligned(list(lines), [number for _, number, _ in columns])
    state = "running" if info.running else "not running"
    mesh = mesh_text(info.mesh) if info.mesh is not None else []
    return "\n".join(
        [f"{info.name}: {state}, {', '.join(_heading(info))}", *table, *_omitted(rows), *_gpu_lines(info), *mesh]
    )
