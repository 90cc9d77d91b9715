"""What a learner's program did, as a picture below a check: calls in order, a schedule, or a curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from axon_nb.records.colors import INK, KINDS
from axon_nb.records.units import format_bytes

if TYPE_CHECKING:
    from axon_course.trials import Trial
    from axon_nb.comm.calls import OperationCount
    from axon_nb.records.spans import Span

_MAX_CALLS = 8
"""Calls that a row shows."""
_COLUMNS = 64
"""Characters of a row of text."""
_LEFT, _WIDTH, _HEIGHT, _ROW = 48, 600, 96, 18
"""Of drawings, in px; `_ROW` is the height of a rank in a schedule."""
_SHADES = " ▁▂▃▄▅▆▇█"
_MARKS = {"forward": "█", "backward": "▓"}
_PEER_TO_PEER = ("send", "recv")


@dataclass(frozen=True, slots=True)
class Replay:
    """A picture, and the same as text."""

    title: str
    text: str
    html: str
    """Static: it needs no script, and looks right on light and on dark pages."""

    def __repr__(self) -> str:
        return f"{self.title}\n{self.text}"

    def _repr_html_(self) -> str:
        from axon_nb.widgets.html import figure

        return figure(self.html, heading=self.title)


# ---- calls -----------------------------------------------------------------------------------------------------------


def replay_calls(trial: Trial, title: str, function: Callable[..., Any], *args: Any) -> Replay:
    """Run `function(answer, *args)` on every rank, as `Trial.run` does, and show each rank's calls in order.

    If it fails, calls up to the failure are shown.
    """
    log = trial.calls_of(function, *args)
    by_rank = [[call for rank, call in log if rank == each] for each in range(trial.ranks)]
    lines = [f"  rank {rank}  {_in_words(own)}" for rank, own in enumerate(by_rank)]
    return Replay(title, "\n".join(lines), _call_table(by_rank))


def _name(call: OperationCount) -> str:
    way = {"send": "to ", "recv": "from "}.get(call.operation, "with ")
    peer = f" {way}{call.peer}" if call.peer >= 0 else ""
    return f"{call.operation}{peer} {format_bytes(call.bytes)}"


def _in_words(own: Sequence[OperationCount]) -> str:
    words = [_name(call) for call in own[:_MAX_CALLS]]
    return ", ".join([*words, *([f"{len(own) - _MAX_CALLS} more"] if len(own) > _MAX_CALLS else [])]) or "no calls"


def _call_table(by_rank: Sequence[Sequence[OperationCount]]) -> str:
    from axon_nb.widgets.html import CELL, row_title, table, table_row

    style = "display:inline-block;padding:1px 6px;border-radius:4px;color:#fff;background:"
    columns = min(_MAX_CALLS, max(map(len, by_rank), default=0))
    rows = []
    for rank, own in enumerate(by_rank):
        cells = [
            f'<span style="{style}{KINDS["p2p" if call.operation in _PEER_TO_PEER else "collective"].both}">'
            f"{escape(_name(call))}</span>"
            for call in own[:columns]
        ]
        cells += [f"{len(own) - columns} more"] if len(own) > columns else []
        cells = cells or ['<span style="opacity:.6">no calls</span>']
        rows.append(table_row(row_title(f"rank {rank}"), *(f'<td style="{CELL}">{cell}</td>' for cell in cells)))
    return table(("", *map(str, range(1, columns + 1))), rows)


# ---- schedules -------------------------------------------------------------------------------------------------------


def replay_schedule(title: str, spans: Sequence[Span], *, box: str = "a microbatch") -> Replay:
    """Show when each rank works and when it waits.

    Args:
        title: What is shown.
        spans: Forwards and backwards; the number in a box is the span's microbatch.
        box: What a box stands for.
    """
    from axon_nb.widgets.timeline.page import step_svg

    ranks = sorted({span.rank for span in spans})
    start, end = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    waiting = 1 - sum(span.end_ns - span.start_ns for span in spans) / max(1, len(ranks) * (end - start))
    kinds = {kind: mark for kind, mark in _MARKS.items() if any(span.kind == kind for span in spans)}
    names = dict(zip(kinds, kinds if len(kinds) > 1 else ["working"], strict=True))
    lines = [f"  rank {rank}  {_row_in_words([s for s in spans if s.rank == rank], start, end)}" for rank in ranks]
    legend = [*(f"{mark} {names[kind]}" for kind, mark in kinds.items()), f"· waiting, {waiting:.1%} of the time"]
    foot, x = len(ranks) * _ROW, _LEFT
    parts = [_label(0, row * _ROW + 13, f"rank {rank}") for row, rank in enumerate(ranks)]
    parts.append(step_svg(spans, ranks, (end - start) / 1e9).replace("<svg ", f'<svg x="{_LEFT}" ', 1))
    for kind, name in names.items():
        parts.append(f'<rect x="{x}" y="{foot + 7}" width="10" height="10" fill="{KINDS[kind].both}"/>')
        parts.append(_label(x + 15, foot + 16, name))
        x += 80
    parts.append(_label(x, foot + 16, f"a box is {box}; ranks wait {waiting:.1%} of the time"))
    text = "\n".join([*lines, f"  {'  '.join(legend)}"])
    return Replay(title, text, _image(_LEFT + _WIDTH, foot + 22, parts, title))


def _row_in_words(own: Sequence[Span], start: int, end: int) -> str:
    row = ["·"] * _COLUMNS
    scale = _COLUMNS / max(1, end - start)
    for span in own:
        left, right = round((span.start_ns - start) * scale), round((span.end_ns - start) * scale)
        row[left:right] = _MARKS[span.kind] * (right - left)
    return "".join(row)


# ---- curves ----------------------------------------------------------------------------------------------------------


def replay_curve(title: str, values: Sequence[float], *, unit: str, start: str, end: str) -> Replay:
    """Show a number that changes over time.

    Args:
        title: What is shown.
        values: At least two, not negative.
        unit: Of the values, behind the number.
        start: What stands at the left end of the axis.
        end: What stands at its right end.
    """
    top = max(values) or 1.0
    most = f"{max(values):.3g} {unit}"
    bins = [values[len(values) * i // _COLUMNS : max(1, len(values) * (i + 1) // _COLUMNS)] for i in range(_COLUMNS)]
    shades = [_SHADES[round(max(part) / top * (len(_SHADES) - 1))] for part in bins if part]
    text = f"  {''.join(shades)}\n  from {start} to {end}; at most {most}, at the end {values[-1]:.3g}"
    step = _WIDTH / (len(values) - 1)
    points = " ".join(f"{_LEFT + i * step:.1f},{_y(value / top):.1f}" for i, value in enumerate(values))
    base = f"{_LEFT + _WIDTH},{_y(0):.1f} {_LEFT},{_y(0):.1f}"
    color = KINDS["forward"].both
    parts = [
        f'<polygon points="{points} {base}" fill="{color}" fill-opacity=".25"/>',
        f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>',
        f'<path d="M{_LEFT} {_y(1)}h{_WIDTH}M{_LEFT} {_y(0)}h{_WIDTH}" stroke="{INK}" stroke-opacity=".5"/>',
        _label(0, _y(1) + 4, f"{max(values):.3g}"),
        _label(0, _y(0) + 4, "0"),
        _label(_LEFT, _HEIGHT + 4, start),
        _label(_LEFT + _WIDTH, _HEIGHT + 4, end, anchor="end"),
        _label(_LEFT + _WIDTH / 2, _HEIGHT + 4, unit, anchor="middle"),
    ]
    return Replay(title, text, _image(_LEFT + _WIDTH, _HEIGHT + 10, parts, f"{title}: at most {most}"))


def _y(share: float) -> float:
    return 8 + (1 - share) * (_HEIGHT - 20)


def _label(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="11" fill="{INK}" text-anchor="{anchor}">{escape(text)}</text>'


def _image(width: int, height: int, parts: Sequence[str], words: str) -> str:
    from axon_nb.widgets.html import svg_uri

    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    address = svg_uri("".join([head, *parts, "</svg>"]))
    return f'<img alt="{escape(words)}" style="max-width:100%" src="{address}">'
