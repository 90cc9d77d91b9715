"""A planned program as a plotly figure: memory by kind of rank and line, and the parts of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from axon_nb.plan.figures import plotly_figure
from axon_nb.plan.program.clock import COMMUNICATION, COMPUTE, LAUNCHES, OTHERS
from axon_nb.plan.tables import unit_for
from axon_nb.records.colors import KINDS, LIMIT

_MAX_LINES = 8
_PAINTS = {
    COMPUTE: KINDS["forward"].both,
    COMMUNICATION: KINDS["collective"].both,
    OTHERS: KINDS["wait"].both,
    LAUNCHES: KINDS["other"].both,
}


def figure_of_program(
    title: str,
    names: Sequence[str],
    memory: Sequence[Mapping[str, int]],
    parts: Sequence[Mapping[str, float]],
    limit: float | None,
) -> Any:
    """Return stacked bars per kind of rank: what is held at its peak, by line; and beside it its step, by part.

    Args:
        title: Of the figure.
        names: Of the kinds of ranks.
        memory: Bytes by line, of each kind.
        parts: Seconds by part, of each kind; empty: times are unknown.
        limit: Bytes of memory that is drawn as a line; None: no line.
    """
    unit = unit_for(sum(held.values()) for held in memory)
    right = 0.55 if parts else 1.0
    layout: dict[str, Any] = {
        "barmode": "stack",
        "title": {"text": title},
        "legend": {"traceorder": "normal"},
        "xaxis": {"domain": [0.0, right], "type": "category"},
        "yaxis": {"title": {"text": f"{unit.name} at the peak"}},
    }
    if limit is not None:
        height = unit.of(round(limit))
        ends = {"x0": 0, "x1": right, "xref": "paper", "y0": height, "y1": height}
        layout["shapes"] = [{"type": "line", **ends, "line": {"color": LIMIT.both, "dash": "dash"}}]
    bars: list[dict[str, Any]] = [
        {"type": "bar", "name": line, "x": names, "y": [unit.of(size) for size in sizes]}
        for line, sizes in _by_line(memory).items()
    ]
    if parts:
        layout["xaxis2"] = {"domain": [0.68, 1.0], "anchor": "y2", "type": "category"}
        layout["yaxis2"] = {"title": {"text": "ms per step"}, "anchor": "x2"}
        bars += [
            {
                "type": "bar",
                "name": part,
                "x": names,
                "y": [1e3 * spent[part] for spent in parts],
                "xaxis": "x2",
                "yaxis": "y2",
                "marker": {"color": paint},
            }
            for part, paint in _PAINTS.items()
            if any(spent[part] for spent in parts)
        ]
    return plotly_figure(bars, layout)


def _by_line(memory: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """Bytes of each kind of rank by line, the largest first; lines that hold little together."""
    largest: Counter[str] = Counter()
    for held in memory:
        for line, size in held.items():
            largest[line] = max(largest[line], size)
    rows = {line: [held.get(line, 0) for held in memory] for line, _ in largest.most_common(_MAX_LINES)}
    if len(largest) > _MAX_LINES:
        rows["other lines"] = [sum(size for line, size in held.items() if line not in rows) for held in memory]
    return rows
