"""A plan of memory as text, as HTML and as a figure."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from axon_nb.plan.schedule_picture import plotly_figure

if TYPE_CHECKING:
    from axon_nb.plan.memory_record import MemoryPlan, RankMemory

__all__ = ["figure", "html", "text"]

_MOST_RANKS = 16
_GIB = 1024**3
_LABELS = {
    "optimizer": "optimizer states",
    "unsharded": "unsharded buffers",
    "communication": "communication buffers",
    "fragmentation": "fragmentation allowance",
}


def text(plan: MemoryPlan) -> str:
    """The worst rank's table, and what the numbers rest on."""
    worst = plan.worst
    rows = _rows(worst)
    lines = [_title(plan), _where(plan, worst), f"{'GiB':<24} {'persistent':>11} {'peak':>11}"]
    lines += [f"{label:<24} {_number(first):>11} {_number(second):>11}" for label, first, second in rows]
    return "\n".join(lines + [f"- {note}" for note in plan.notes])


def html(plan: MemoryPlan) -> str:
    """The same as a table."""
    worst = plan.worst
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(label)}</th><td>{_number(first)}</td><td>{_number(second)}</td></tr>"
        for label, first, second in _rows(worst)
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
    return (
        f"<div><p><b>{escape(_title(plan))}</b><br>{escape(_where(plan, worst))}</p>"
        "<table><thead><tr><th style='text-align:left'>GiB</th><th>persistent</th><th>peak</th></tr></thead>"
        f"<tbody>{cells}</tbody></table><ul>{notes}</ul></div>"
    )


def figure(plan: MemoryPlan) -> Any:
    """Stacked bars, two a rank: persistent and peak; of at most 16 ranks, those with the highest peaks."""
    ranks = sorted(plan.ranks, key=lambda rank: rank.peak.total, reverse=True)[:_MOST_RANKS]
    ranks.sort(key=lambda rank: rank.rank)
    moments = [(rank, moment) for rank in ranks for moment in ("persistent", "peak")]
    axis = [[f"rank {rank.rank}" for rank, _ in moments], [moment for _, moment in moments]]
    held = [getattr(rank, moment).as_dict() for rank, moment in moments]
    bars = [
        {"type": "bar", "name": _label(part), "x": axis, "y": [parts[part] / _GIB for parts in held]}
        for part in held[0]
        if any(parts[part] for parts in held)
    ]
    layout = {
        "barmode": "stack",
        "title": {"text": _title(plan).partition(": ")[0]},
        "yaxis": {"title": {"text": "GiB"}},
        "legend": {"traceorder": "normal"},
    }
    return plotly_figure(bars, layout)


def _rows(rank: RankMemory) -> list[tuple[str, float, float]]:
    shown = [
        (_label(part), size / _GIB, highest / _GIB)
        for (part, size), highest in zip(rank.persistent.as_dict().items(), rank.peak.as_dict().values(), strict=True)
        if size or highest
    ]
    return [*shown, ("total", rank.persistent.total / _GIB, rank.peak.total / _GIB)]


def _number(gib: float) -> str:
    return f"{gib:.3f}" if gib >= 0.1 or not gib else f"{gib:.3g}"


def _label(part: str) -> str:
    return _LABELS.get(part, part)


def _title(plan: MemoryPlan) -> str:
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    return (
        f"{plan.model}, {plan.num_parameters:,} parameters, {plan.strategy} on {plan.world} "
        f"rank{'s' if plan.world > 1 else ''} ({mesh}), {plan.device}: {plan.method}"
    )


def _where(plan: MemoryPlan, worst: RankMemory) -> str:
    several = len(plan.ranks) > 1
    place = f"rank {worst.rank}" + (f", the highest peak of {len(plan.ranks)} ranks" if several else "")
    if not worst.phase:
        return place
    where = f" of {worst.module}" if worst.module else ""
    return f"{place}; its peak is in {worst.phase}{where}"
