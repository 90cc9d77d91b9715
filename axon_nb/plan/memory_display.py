"""Text, HTML and figure of a memory plan; each uses the unit that suits its largest number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from axon_nb.plan.communication_table import html_table, text_table
from axon_nb.plan.schedule_picture import plotly_figure
from axon_nb.plan.table_units import unit_for

if TYPE_CHECKING:
    from axon_nb.plan.memory_record import MemoryPlan, RankMemory

__all__ = ["figure", "html", "text"]

_MAX_RANKS = 16
_LABELS = {
    "optimizer": "optimizer states",
    "unsharded": "unsharded buffers",
    "communication": "communication buffers",
    "fragmentation": "fragmentation allowance",
}


def text(plan: MemoryPlan) -> str:
    """The worst rank's table, and the assumptions."""
    return text_table(f"{_title(plan)}\n{_where(plan)}", *_table(plan.worst), plan.notes)


def html(plan: MemoryPlan) -> str:
    """The same as HTML."""
    return html_table(f"{_title(plan)}. {_where(plan)}", *_table(plan.worst), plan.notes)


def figure(plan: MemoryPlan) -> Any:
    """Stacked bars, persistent and peak, of up to 16 ranks: those with the highest peaks."""
    ranks = sorted(plan.ranks, key=lambda rank: rank.peak.total, reverse=True)[:_MAX_RANKS]
    ranks.sort(key=lambda rank: rank.rank)
    moments = [(rank, moment) for rank in ranks for moment in ("persistent", "peak")]
    axis = [[f"rank {rank.rank}" for rank, _ in moments], [moment for _, moment in moments]]
    unit = unit_for(rank.peak.total for rank in ranks)
    held = [getattr(rank, moment).as_dict() for rank, moment in moments]
    bars = [
        {"type": "bar", "name": _label(part), "x": axis, "y": [unit.of(parts[part]) for parts in held]}
        for part in held[0]
        if any(parts[part] for parts in held)
    ]
    layout = {
        "barmode": "stack",
        "title": {"text": _title(plan).partition(": ")[0]},
        "yaxis": {"title": {"text": unit.name}},
        "legend": {"traceorder": "normal"},
    }
    return plotly_figure(bars, layout)


def _table(rank: RankMemory) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows: the rank's memory between steps and at its peak."""
    unit = unit_for((rank.persistent.total, rank.peak.total))
    parts = zip(rank.persistent.as_dict().items(), rank.peak.as_dict().values(), strict=True)
    shown = [(_label(part), size, highest) for (part, size), highest in parts if size or highest]
    rows = [*shown, ("total", rank.persistent.total, rank.peak.total)]
    return (
        ("", f"persistent, {unit.name}", f"peak, {unit.name}"),
        [(label, unit.text(size), unit.text(highest)) for label, size, highest in rows],
    )


def _label(part: str) -> str:
    return _LABELS.get(part, part)


def _title(plan: MemoryPlan) -> str:
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    return (
        f"{plan.model}, {plan.num_parameters:,} parameters, {plan.strategy} on {plan.world_size} "
        f"rank{'s' if plan.world_size > 1 else ''} ({mesh}), {plan.device}: {plan.method}"
    )


def _where(plan: MemoryPlan) -> str:
    worst, several = plan.worst, len(plan.ranks) > 1
    place = f"Rank {worst.rank}" + (f", the highest peak of {len(plan.ranks)} ranks" if several else "")
    if not worst.phase:
        return place
    where = f" of {worst.module}" if worst.module else ""
    return f"{place}; its peak is in {worst.phase}{where}"
