"""A pipeline timeline as a plotly figure, and as a small SVG without dependencies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, Literal

from axon_nb.records.colors import INK, KINDS, RANKS, ROLES, STATES
from axon_nb.records.spans import Span

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
_WIDTH, _LANE, _LEFT = 900, 22, 56
_MAX_ACTIONS = 6000
"""Timelines with more actions get no SVG, which would slow down the page."""


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
        {
            "type": "bar",
            "orientation": "h",
            "name": _NAMES.get(action, action),
            "marker": {"color": _COLORS.get(action)},
            "base": [span.start_ns / 1e6 for span in group],
            "x": [(span.end_ns - span.start_ns) / 1e6 for span in group],
            "y": [span.rank for span in group],
            "customdata": [[span.stage, span.microbatch] for span in group],
            "hovertemplate": "stage %{customdata[0]}, microbatch %{customdata[1]}<br>from %{base:.3f} ms, %{x:.3f} ms",
        }
        for action, group in by_action.items()
    ]
    layout = {
        "title": {"text": title},
        "barmode": "overlay",
        "bargap": 0.1,
        "xaxis": {"title": {"text": "ms"}},
        "yaxis": {"title": {"text": "rank"}, "autorange": "reversed", "dtick": 1},
    }
    return plotly_figure(traces, layout)


def svg_of(spans: Sequence[Span]) -> str:
    """Return the same as an SVG; empty if there are too many actions."""
    length = max((span.end_ns for span in spans), default=0)
    if not length or len(spans) > _MAX_ACTIONS:
        return ""
    scale = (_WIDTH - _LEFT) / length
    lanes = max(span.rank for span in spans) + 1
    parts = [
        f"<text x='0' y='{rank * _LANE + 15}' font-size='12' fill='currentColor'>rank {rank}</text>"
        for rank in range(lanes)
    ]
    for span in spans:
        left, width = _LEFT + span.start_ns * scale, (span.end_ns - span.start_ns) * scale
        what = f"{_NAMES.get(span.name, span.name)} of microbatch {span.microbatch} in stage {span.stage}"
        when = f"{span.start_ns / 1e6:.3f}-{span.end_ns / 1e6:.3f} ms"
        parts.append(
            f"<rect x='{left:.1f}' y='{span.rank * _LANE + 2}' width='{max(width - 0.5, 0.2):.1f}' "
            f"height='{_LANE - 4}' fill='{_COLORS.get(span.name, '#888')}'><title>{what}, {when}</title></rect>"
        )
    used = [action for action in _COLORS if any(span.name == action for span in spans)]
    for index, action in enumerate(used):
        left, top = _LEFT + 170 * index, lanes * _LANE + 6
        parts.append(f"<rect x='{left}' y='{top}' width='12' height='12' fill='{_COLORS[action]}'/>")
        parts.append(f"<text x='{left + 18}' y='{top + 11}' font-size='12' fill='currentColor'>{_NAMES[action]}</text>")
    label = f"timeline of {lanes} ranks over {length / 1e6:.4g} ms"
    height = lanes * _LANE + 24
    return (
        f"<svg viewBox='0 0 {_WIDTH} {height}' width='100%' style='max-width:{_WIDTH}px' role='img' "
        f"aria-label='{label}'>{''.join(parts)}</svg>"
    )
