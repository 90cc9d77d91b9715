"""`%memory`: each rank's memory, measured and estimated, live while cells run; and what-if scenarios.

The saved page has pictures, a table and text, which need neither a kernel nor scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import traitlets
from msgspec import Struct, to_builtins
from msgspec.structs import asdict

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.inspection.memory import MemorySnapshot, WhatIf, request_memory, request_plan
from axon_nb.records.colors import INK, LIMIT
from axon_nb.records.colors import ROLES as ROLE_COLORS
from axon_nb.records.memory import ROLES, WITH_MOMENTUM, MemoryPrediction, MemorySetup, WhatIfState
from axon_nb.records.units import format_bytes
from axon_nb.widgets import html
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.memory import rows as memory_rows
from axon_nb.widgets.panel import LivePanel, LiveView

_DTYPES = ("float32", "bfloat16", "float16")
_CHOICES: dict[str, tuple[str, ...]] = {
    "strategy": ("full_shard", "shard_grad_op", "hybrid_shard", "optimizer_state", "no_shard", "ddp"),
    "dtype": ("", *_DTYPES),
    "mixed_precision": ("", *_DTYPES[1:]),
    "optimizer": ("adam", "adamw", "sgd", WITH_MOMENTUM, "adagrad", "rmsprop"),
    "cpu_offload": ("none", "params", "optimizer_states", "full"),
}
_ALSO = {
    "full_shard": "ZeRO-3",
    "shard_grad_op": "ZeRO-2",
    "hybrid_shard": "ZeRO-3 in each replica",
    "optimizer_state": "ZeRO-1",
    "no_shard": "FSDP, a copy per rank",
    "ddp": "a copy per rank",
}
"""What strategies are called elsewhere, or do."""
_LABELS = {
    "world_size": "ranks",
    "strategy": "strategy",
    "shard": "ranks per replica",
    "dtype": "dtype",
    "mixed_precision": "mixed precision",
    "optimizer": "optimizer",
    "cpu_offload": "offload",
    "batch": "batch per rank",
    "activation_checkpointing": "checkpointing",
    "pp": "pipeline ranks",
    "tp": "tensor-parallel ranks",
    "num_microbatches": "microbatches",
    "ep": "expert-parallel ranks",
    "cp": "context-parallel ranks",
}
_PIPELINE_FIELDS = ("pp", "tp", "num_microbatches")
_FAR = 20
"""A capacity above this multiple of the predicted memory is shown as text only: bars would be too short."""
_EMPTY = {"dtype": "unchanged", "mixed_precision": "none"}
_MAX_PAGE_RANKS = 256
_BAR_WIDTH = 600
_MAX_LIVE_RANKS = 64
_MIN_INTERVAL_S = 3.0


class LabelledBar(Struct, frozen=True):
    """One bar of a prediction."""

    label: str
    bar: memory_rows.Bar


def what_if_content(state: WhatIfState, capacity: int | None) -> dict[str, Any]:
    """Return what the page draws: controls, progress and the prediction.

    Args:
        state: State of the scenario.
        capacity: Bytes of the device, or those available to a CPU rank; None: unknown.
    """
    setup = state.setup or state.as_is
    bars = prediction_bars(state, capacity)
    scale = _what_if_scale(state, capacity)
    return {
        "fields": [] if state.as_is is None or setup is None else _what_if_fields(state, state.as_is, setup),
        "proposed": state.as_is is not None and not state.is_trained_so,
        "doing": state.doing,
        "share": state.share,
        "error": state.error,
        "heading": _what_if_heading(state),
        "verdict": _verdict(state, capacity),
        "bars": [{"label": labelled.label, **to_builtins(labelled.bar)} for labelled in bars],
        "ticks": [to_builtins(tick) for tick in scale.ticks] if bars else [],
        "unit": scale.unit,
        "changes": _changes(state, scale),
        "roles": [role for role in ROLES if any(role == name for each in bars for name, _ in each.bar.segments)],
        "notes": _what_if_notes(state),
    }


def _what_if_fields(state: WhatIfState, current: MemorySetup, proposed: MemorySetup) -> list[dict[str, Any]]:
    controls = []
    for name in MemorySetup.__struct_fields__:
        if name in _PIPELINE_FIELDS and current.pp == 1:
            continue
        if name in ("ep", "cp") and name not in state.axes:
            continue
        now, value = getattr(current, name), getattr(proposed, name)
        control = {"name": name, "label": _LABELS[name], "current": now, "value": value}
        if name in _CHOICES:
            choices = dict.fromkeys((*_CHOICES[name], now, value))
            also = {choice: f"{choice} ({_ALSO[choice]})" for choice in choices if choice in _ALSO}
            control["choices"] = [[choice, also.get(choice, choice) or _EMPTY[name]] for choice in choices]
        controls.append(control)
    return controls


def prediction_bars(state: WhatIfState, capacity: int | None) -> list[LabelledBar]:
    """Return bars of the rank with the highest peak: for the current setup, and for the proposed one if it differs."""
    shown = []
    if state.reference is not None and state.setup != state.as_is:
        shown.append(("current", state.reference))
    if state.estimate is not None:
        shown.append(("proposed" if state.setup != state.as_is else "current", state.estimate))
    uses = [(f"{label}, {moment}", use) for label, prediction in shown for moment, use in _moments(prediction)]
    scale = _what_if_scale(state, capacity)
    mark = None if scale.capacity is None else scale.share(scale.capacity)
    return [
        LabelledBar(label, memory_rows.stacked_bar(use, scale, None, mark, memory_rows.describe_roles(use)))
        for label, use in uses
    ]


def _what_if_scale(state: WhatIfState, capacity: int | None) -> memory_rows.Scale:
    """Return the axis of the bars; if all are far below the capacity, it ends before it."""
    predictions = [prediction for prediction in (state.reference, state.estimate) if prediction is not None]
    sizes = [sum(use.values()) for prediction in predictions for _, use in _moments(prediction)]
    is_far = capacity is not None and capacity > _FAR * max(sizes, default=0)
    return memory_rows.Scale.of(sizes, None if is_far else capacity)


def _changes(state: WhatIfState, scale: memory_rows.Scale) -> list[dict[str, Any]]:
    """Return the memory of each role now and as proposed, at the peak if that is known; empty: nothing to compare."""
    if state.reference is None or state.estimate is None or state.setup == state.as_is:
        return []
    now, then = (_moments(prediction)[-1][1] for prediction in (state.reference, state.estimate))
    changes = {role: then.get(role, 0) - now.get(role, 0) for role in ROLES if now.get(role) or then.get(role)}
    most = max(map(abs, changes.values()), default=0) or 1
    return [
        {
            "role": role,
            "now": scale.number(now.get(role, 0), then.get(role, 0)),
            "then": scale.number(then.get(role, 0), now.get(role, 0)),
            "change": f"{'+' if change > 0 else '−'}{scale.number(abs(change))}" if change else "–",
            "share": abs(change) / most,
            "isLess": change < 0,
        }
        for role, change in changes.items()
    ]


def _verdict(state: WhatIfState, capacity: int | None) -> dict[str, str] | None:
    """Return whether the scenario fits; None: it is not known."""
    estimate = state.estimate
    if estimate is None or capacity is None:
        return None
    highest = _what_if_total(estimate.peak if estimate.is_whole else estimate.persistent, estimate)
    left = capacity - highest
    text = f"{format_bytes(highest)} of {format_bytes(capacity)}"
    if left < 0:
        return {"claim": "It does not fit.", "text": f"{text}: {format_bytes(-left)} too much.", "state": "error"}
    near = highest >= memory_rows.NEAR * capacity
    claim = "It fits, but barely." if near else "It fits."
    return {"claim": claim, "text": f"{text}, {format_bytes(left)} left.", "state": "warn" if near else "ok"}


def _moments(prediction: MemoryPrediction) -> list[tuple[str, Mapping[str, int]]]:
    moments = [("after a step", prediction.persistent[prediction.worst])]
    return [*moments, ("at the peak", prediction.peak[prediction.worst])] if prediction.is_whole else moments


def describe_setup(setup: MemorySetup) -> str:
    """Return text such as ``full_shard on 8 ranks, adam, batch 4, computing in bfloat16, checkpointing``."""
    ranks = f"{setup.world_size} rank{'' if setup.world_size == 1 else 's'}"
    parts = [f"{setup.strategy} on {ranks}", setup.optimizer, f"batch {setup.batch}"]
    if setup.strategy == "hybrid_shard":
        parts[0] += f", {setup.shard} per replica"
    parts[0] += f", {setup.pp} per pipeline" if setup.pp > 1 else ""
    parts[0] += f", {setup.tp} per layer" if setup.tp > 1 else ""
    parts[0] += f", {setup.ep} per copy of the experts" if setup.ep > 1 else ""
    parts[0] += f", {setup.cp} per sequence" if setup.cp > 1 else ""
    parts += [f"{setup.num_microbatches} microbatches"] if setup.pp > 1 else []
    parts += [setup.dtype] if setup.dtype else []
    parts += [f"computing in {setup.mixed_precision}"] if setup.mixed_precision else []
    parts += [f"{setup.cpu_offload} offloaded"] if setup.cpu_offload != "none" else []
    return ", ".join([*parts, "checkpointing"] if setup.activation_checkpointing else parts)


def _what_if_heading(state: WhatIfState) -> str:
    estimate = state.estimate
    if estimate is None:
        return ""
    setup = describe_setup(estimate.setup)
    if not estimate.is_whole:
        return f"{setup}: {format_bytes(_what_if_total(estimate.persistent, estimate))}, {estimate.method}"
    ranks = "the highest of all ranks" if estimate.setup.world_size > 1 else "rank 0"
    peak = format_bytes(_what_if_total(estimate.peak, estimate))
    return f"{setup}: peak {peak} {estimate.when}, {ranks}; {estimate.method}"


def _what_if_total(by_rank: Mapping[int, Mapping[str, int]], estimate: MemoryPrediction) -> int:
    return sum(by_rank[estimate.worst].values())


def _what_if_notes(state: WhatIfState) -> list[str]:
    lines = list(state.notes)
    estimate = state.estimate
    if estimate is None:
        return lines
    if estimate.host:
        lines.append(f"Another {format_bytes(estimate.host)} of host memory is used.")
    return [*lines, *estimate.notes]


def what_if_lines(state: WhatIfState) -> list[str]:
    """Return the last prediction as lines of text; empty if there is none."""
    if state.error:
        return [f"plan: {state.error}"]
    if state.estimate is None:
        return []
    bars = [f"  {labelled.label}: {labelled.bar.text}" for labelled in prediction_bars(state, None)]
    return [f"plan: {_what_if_heading(state)}", *bars]


def what_if_html(state: WhatIfState, picture: Callable[[memory_rows.Bar], str]) -> str:
    """Return the last prediction for a page without scripts.

    Args:
        state: State of the scenario.
        picture: Makes an image of a bar.
    """
    if not what_if_lines(state):
        return ""
    rows = (
        html.table_row(
            html.row_title(escape(labelled.label)),
            f'<td style="{html.CELL}">{picture(labelled.bar)}</td>',
            f'<td style="{html.WRAPPED_CELL}">{escape(labelled.bar.text)}</td>',
        )
        for labelled in prediction_bars(state, None)
    )
    heading = escape(state.error or _what_if_heading(state))
    return f'<div style="margin-top:6px"><b>plan</b> {heading}</div>{html.table((), rows)}'


def bar_svg(bar: memory_rows.Bar, *, width: int, height: int) -> str:
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
    return html.svg(width, height, "".join(shapes))


def role_swatch(role: str) -> str:
    """Draw a sample of one role for a legend, 12 x 12 units."""
    return html.svg(12, 12, _box(role, 0, 12, 12))


def _box(role: str, x: float, width: float, height: int) -> str:
    gap = 1.0 if width > 3 else 0.0
    return f'<rect x="{x:.1f}" width="{width - gap:.2f}" height="{height}" fill="{ROLE_COLORS[role].both}"/>'


def memory_bundle(rows: memory_rows.MemoryRows, state: WhatIfState | None = None) -> dict[str, str]:
    """Return `text/html` and `text/plain`, with the last prediction if there is one."""
    state = state or WhatIfState()
    predicted = {role for labelled in prediction_bars(state, None) for role, _ in labelled.bar.segments}
    roles = [role for role in ROLES if role in predicted or role in rows.roles]
    page = _page_html(rows, roles, what_if_html(state, lambda bar: _picture(bar, 14)))
    return {"text/html": page, "text/plain": "\n".join([_page_text(rows), *what_if_lines(state)])}


def _page_text(rows: memory_rows.MemoryRows) -> str:
    lines = []
    for row in rows.rows():
        bars = [row.measured, *([row.estimated] if row.estimated else []), row.process]
        lines.append(f"  rank {row.rank}: " + "; ".join(bar.text for bar in bars))
    return "\n".join([rows.heading, *lines, *rows.notes()])


def _page_html(rows: memory_rows.MemoryRows, roles: Sequence[str], what_if: str) -> str:
    samples = html.legend([(role_swatch(role), role) for role in roles], width=12, height=12, margin="right")
    shown = rows.rows()
    notes = [*([f"rest: {rows.rest}"] if rows.rest else []), *rows.notes()]
    if len(shown) > _MAX_PAGE_RANKS:
        notes.append(f"{len(shown) - _MAX_PAGE_RANKS} more ranks are left out here.")
    numbers = html.figures((figure["name"], figure["value"], figure["remark"]) for figure in memory_rows.figures(rows))
    warning = memory_rows.notice(rows)
    pictures = [*map(_picture_row, shown[:_MAX_PAGE_RANKS]), _axis_row(rows.scale.ticks)]
    bars = html.table((), pictures, style=html.table_style(widths=(480, 1400)))
    by_rank = html.table(
        (f"rank, {rows.scale.unit}", *rows.columns), map(_number_row, shown[:_MAX_PAGE_RANKS]), cell=html.NUMBER
    )
    legend = f'<div>{samples}<span style="{html.MUTED}">{memory_rows.bars_legend(rows)}</span></div>'
    warned = html.notice(*warning) if warning else ""
    body = f"{numbers}{warned}{legend}{bars}{by_rank}{html.note_lines(notes)}{what_if}"
    return html.figure(body, heading=rows.heading)


def _picture_row(row: memory_rows.MemoryRow) -> str:
    pictures = _picture(row.measured, 16) + (_picture(row.estimated, 5) if row.estimated else "")
    flag = f' <b title="{escape(row.flag)}">⚠</b>' if row.flag else ""
    return html.table_row(
        html.row_title(f"rank {row.rank}{flag}"),
        f'<td style="{html.CELL};width:80%">{pictures}</td>',
        html.data_cells([row.total, row.remark]),
    )


def _number_row(row: memory_rows.MemoryRow) -> str:
    cells = html.data_cells([cell.text for cell in row.cells], html.NUMBER)
    return html.table_row(html.row_title(f"rank {row.rank}"), cells)


def _axis_row(ticks: Sequence[memory_rows.Tick]) -> str:
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


def _picture(bar: memory_rows.Bar, height: int) -> str:
    text = escape(bar.text)
    source = html.svg_uri(bar_svg(bar, width=_BAR_WIDTH, height=height))
    return (
        f'<img alt="{text}" title="{text}" src="{source}" width="{_BAR_WIDTH}" height="{height}" '
        f'style="display:block;margin:1px 0;width:100%;min-width:90px;max-width:none;height:{height}px">'
    )


class MemoryView(LiveView):
    """Stacked bars, one per rank, and a what-if scenario below them.

    Args:
        title: What is shown, such as ``model``; empty: all variables.
        request_plan: Called, on any thread, with the page's scenario: the fields of `MemorySetup` that differ from the
            current setup, or None for the current one. None: the view offers no scenarios.
    """

    _esm = script("memory")
    _css = style("memory")

    what_if = traitlets.Dict().tag(sync=True)
    """The scenario and its prediction; empty: the view offers no scenarios."""

    def __init__(self, title: str, request_plan: Callable[[Mapping[str, Any] | None], object] | None = None) -> None:
        self._rows = memory_rows.MemoryRows(title)
        self._state = WhatIfState()
        self._request_plan = request_plan
        super().__init__()
        if request_plan is not None:
            self.what_if = what_if_content(self._state, None)

    def show(self, replies: MemorySnapshot) -> None:
        """Show the ranks' replies; from any thread."""
        with self._lock:
            self._rows.update(replies)
        self.refresh()

    def show_what_if(self, state: WhatIfState) -> None:
        """Show the scenario's progress or prediction; from any thread."""
        with self._lock:
            self._state = state
            has_changed = self._rows.set_simulation(state.reference if state.is_trained_so else None)
            content = what_if_content(state, self._rows.capacity)
        self.what_if = content
        if has_changed:
            self.refresh()

    def to_bundle(self) -> dict[str, str]:
        """Return what is shown now as `text/html` and `text/plain`, which need neither a kernel nor scripts."""
        with self._lock:
            return memory_bundle(self._rows, self._state)

    def on_message(self, message: dict[str, Any]) -> None:
        """Handle a heartbeat or another scenario."""
        super().on_message(message)
        if message.get("op") == "what_if" and self._request_plan is not None:
            setup = message.get("setup")
            self._request_plan(setup if isinstance(setup, dict) else None)

    def make_content(self) -> dict[str, Any]:
        """Return the bars; their lengths are shares of the scale."""
        rows = self._rows.rows()
        num_omitted = len(rows) - _MAX_LIVE_RANKS
        omitted = [f"{num_omitted} more ranks are left out."] if num_omitted > 0 else []
        return {
            "heading": self._rows.heading,
            "context": self._rows.context,
            "figures": memory_rows.figures(self._rows),
            "notice": memory_rows.notice(self._rows),
            "legend": memory_rows.bars_legend(self._rows),
            "roles": self._rows.roles,
            "ticks": [to_builtins(tick) for tick in self._rows.scale.ticks],
            "columns": self._rows.columns,
            "rest": self._rows.rest,
            "unit": self._rows.scale.unit,
            "rows": [_live_row(row) for row in rows[:_MAX_LIVE_RANKS]],
            "notes": [*self._rows.notes(flags=False), *omitted],
        }


def _live_row(row: memory_rows.MemoryRow) -> dict[str, Any]:
    """Return a row without what is empty, which is most of many ranks."""
    return {
        **to_builtins(row),
        "measured": _live_bar(row.measured),
        "estimated": row.estimated and _live_bar(row.estimated),
        "process": {"text": row.process.text},
        "cells": [
            cell.text
            if cell == memory_rows.Cell(cell.text)
            else {name: value for name, value in asdict(cell).items() if value}
            for cell in row.cells
        ],
    }


def _live_bar(bar: memory_rows.Bar) -> dict[str, Any]:
    marks = {
        "segments": [(role, round(share, 4)) for role, share in bar.segments],
        "peak": bar.peak and round(bar.peak, 4),
        "capacity": bar.capacity,
        "text": bar.text,
        "labels": bar.labels,
    }
    return {name: value for name, value in marks.items() if value}


class MemoryPanel(LivePanel):
    """A panel that polls at most every three seconds.

    Args:
        cluster: The cluster whose ranks are polled.
        names: Modules and optimizers of the ranks, by name; empty: all that their variables hold.

    Raises:
        UsageError: No rank has a module or optimizer of that name.
    """

    def __init__(self, cluster: Cluster, names: Sequence[str]) -> None:
        super().__init__(cluster, min_interval_s=_MIN_INTERVAL_S)
        self._names = list(names)
        replies = request_memory(cluster.state, self._names)
        self._model = replies.model
        self.what_if = WhatIf(
            lambda asked, known: request_plan(cluster.state, self._names, asked, known),
            self._show_what_if,
            lambda: bool(cluster.busy),
        )
        # Only a single model can be planned.
        self.view: MemoryView = MemoryView(", ".join(names), self.what_if.request if replies.model else None)
        self._show(replies)
        self.view.refresh(unseen=True)

    def poll(self) -> float:
        """Query the ranks and show their replies."""
        replies = request_memory(self._cluster.state, self._names, wait_for_estimates=False)
        self._show(replies)
        return replies.cost_s

    def on_cluster_stopped(self) -> None:
        """Accept no more scenarios; the last replies stay."""
        self.what_if.close()

    def close(self) -> None:
        """Stop polling; what is shown stays."""
        self.what_if.close()
        super().close()

    def _show(self, replies: MemorySnapshot) -> None:
        if replies.model and replies.model != self._model:
            self._model = replies.model
            self.what_if.repeat()
        self.view.show(replies)

    def _show_what_if(self, state: WhatIfState) -> None:
        self.view.show_what_if(state)
