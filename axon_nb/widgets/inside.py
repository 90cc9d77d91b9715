"""`%inside`: what a recording of `axon_nb.inside` holds, as a picture without scripts that later cells redraw.

Norms by place and token, words of a logit lens, and attention maps by head, each with the ranks that computed it.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from html import escape

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.inspection.variables import request_recording
from axon_nb.errors import AxonError
from axon_nb.records.colors import INK, KINDS
from axon_nb.records.protocol.inspection import NOT_COMPUTED, RecordedPlace, RecordingFacts
from axon_nb.records.ranks import name_ranks
from axon_nb.widgets import html
from axon_nb.widgets.panel import Panel

_HUE = KINDS["forward"].both
_MOST = 0.55
"""Opacity behind words, at most: they stay readable on light and on dark pages."""
_NARROW = 16
"""From so many positions on, columns have no numbers, and long words are turned."""
_SHORT = 2
"""Letters of a word that is not turned."""
_WORD = 12
"""Letters of a word that are shown."""
_MAP_PX = 84
_PNG = b"\x89PNG\r\n\x1a\n"


class InsidePanel(Panel):
    """A picture of the recording of that name.

    Args:
        cluster: The cluster whose ranks have it.
        name: The variable.

    Raises:
        UsageError: no rank has a recording of that name, or a cell is running.
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__()
        self._cluster, self._name = cluster, name
        self._facts = request_recording(cluster.state, name, {})

    def after_cell(self) -> None:
        """Request what has changed, or close the panel if the cluster has stopped."""
        if not self._cluster.running:
            self.close()
        elif not self._cluster.busy:
            try:
                self._facts = request_recording(self._cluster.state, self._name, self._facts)
            except AxonError:  # the last picture stays when the variable is gone
                return

    def picture(self) -> dict[str, str]:
        """Return the recording as `text/html` and `text/plain`."""
        return inside_bundle(self._name, self._facts)


def inside_bundle(name: str, facts: Mapping[int, RecordingFacts]) -> dict[str, str]:
    """Return a recording as `text/html` and `text/plain`.

    Args:
        name: The variable.
        facts: What each rank that has values reports.
    """
    first = next(iter(facts.values()))
    places: dict[str, RecordedPlace] = {}
    own: dict[int, None] = {}
    for rank, each in facts.items():
        for place in each.places:
            if not math.isclose(sum(places.setdefault(place.name, place).norms), sum(place.norms), rel_tol=1e-4):
                own[rank] = None
    words = next((each.words for each in facts.values() if each.words), ())
    ranks = sorted({*facts, *(rank for place in places.values() for rank in place.ranks)})
    heading = f"{name}: {len(places)} place{'s' * (len(places) != 1)} on {len(ranks)} rank{'s' * (len(ranks) != 1)}"
    notes = list(first.omitted)
    if own:
        notes.append(
            f"{name_ranks(list(own)).capitalize()} recorded other values; those of rank {min(facts)} are shown."
        )
    shown = list(places.values())
    body = "".join(
        (_norms(shown, words, first.starts), _lens(shown, words, first.starts), _maps(shown), _others(shown))
    )
    return {
        "text/html": html.figure(body + html.note_lines(notes), heading=heading),
        "text/plain": "\n".join([heading, *map(_line, shown), *notes]),
    }


def _line(place: RecordedPlace) -> str:
    text = f"  {place.name}: {place.shape}, {_computed(place)}"
    if place.norms:
        known = [norm for norm in place.norms if norm != NOT_COMPUTED]
        text += f"; norms {min(known):.3g} to {max(known):.3g}"
    return text + (f"; lens {' '.join(word for word, _ in place.lens)}" if place.lens else "")


def _computed(place: RecordedPlace) -> str:
    return f"{place.split} split over {name_ranks(place.ranks)}" if place.ranks else "whole on each rank"


def _title(place: RecordedPlace) -> str:
    """Return the title of a row: the place, and the ranks that split it, each in its colour."""
    split = f"{place.split} by rank {' '.join(_chip(rank, str(rank)) for rank in place.ranks)}" if place.ranks else ""
    words = f' <span style="font-weight:400;white-space:nowrap;{html.MUTED}">{split}</span>' if split else ""
    return html.row_title(f"{escape(place.name)}{words}", f"{html.WRAPPED_CELL};overflow-wrap:anywhere;min-width:150px")


def _chip(rank: int, text: str) -> str:
    color = html.rank_color(rank).both
    return (
        f'<span title="rank {rank}" style="padding:0 4px;border-radius:3px;font-size:85%;background:{color};'
        f'color:{html.text_color(color)}">{text}</span>'
    )


def _titles(words: Sequence[str], count: int, starts: Sequence[int]) -> str:
    shown = [_word(words[position]) if position < len(words) else str(position) for position in range(count)]
    is_turned = count > _NARROW and max(map(len, shown)) > _SHORT
    turned = "writing-mode:vertical-rl;max-height:90px;" if is_turned else ""
    cells = []
    for position, word in enumerate(shown):
        cells.append(
            f'<th scope="col" title="position {position}" style="padding:1px 4px;border:none;font-weight:normal;'
            f'text-align:center;vertical-align:bottom;{_edge(position, starts)}">'
            f'<span style="{turned}white-space:pre">{escape(word)}</span></th>'
        )
    return html.table_row(f'<th style="{html.CELL}"></th>', *cells)


def _word(text: str) -> str:
    shown = text.replace("\n", "⏎")
    return shown if len(shown) <= _WORD else f"{shown[:_WORD]}…"


def _edge(position: int, starts: Sequence[int]) -> str:
    return f"border-left:2px solid {INK}" if position in starts and position else ""


def _shaded(text: str, title: str, share: float, edge: str) -> str:
    opacity = round(255 * _MOST * min(1.0, max(0.0, share)))
    return (
        f'<td title="{escape(title)}" style="padding:1px 4px;min-width:14px;text-align:center;white-space:pre;'
        f'border:1px solid transparent;background-clip:padding-box;background-color:{_HUE}{opacity:02X};{edge}">'
        f"{escape(text)}</td>"
    )


def _grid(title: str, words: Sequence[str], rows: Sequence[str], count: int, starts: Sequence[int]) -> str:
    head = f'<thead style="border:none">{_titles(words, count, starts)}</thead><tbody>'
    grid = html.table((), rows).replace("<tbody>", head, 1)
    return f'<div style="margin:8px 0 2px;{html.MUTED}">{title}</div>{grid}'


def _norms(places: Sequence[RecordedPlace], words: Sequence[str], starts: Sequence[int]) -> str:
    shown = [place for place in places if place.norms]
    if not shown:
        return ""
    count = max(len(place.norms) for place in shown)
    logs = [math.log(norm) for place in shown for norm in place.norms if norm > 0 and math.isfinite(norm)]
    low, high = min(logs, default=0.0), max(logs, default=0.0)

    def row(place: RecordedPlace) -> str:
        cells = []
        for position, norm in enumerate(place.norms):
            if norm == NOT_COMPUTED:
                cells.append("<td></td>")
                continue
            known = norm > 0 and math.isfinite(norm)
            share = (math.log(norm) - low) / (high - low or 1) if known else 0
            text = f"{norm:.2g}" if count <= _NARROW else ("" if known or norm == 0 else "!")
            cells.append(
                _shaded(text, f"{place.name}, position {position}: {norm:.4g}", share, _edge(position, starts))
            )
        cells += ["<td></td>"] * (count - len(cells))
        return html.table_row(_title(place), *cells)

    rows = [row(place) for place in shown]
    span = f"{math.exp(low):.2g} to {math.exp(high):.2g}"
    title = f"norms by token, from {span}: deeper is larger, on a log scale{_calls(starts)}"
    return _grid(title, words, rows, count, starts)


def _calls(starts: Sequence[int]) -> str:
    return "; a line begins the next call" if any(starts) else ""


def _lens(places: Sequence[RecordedPlace], words: Sequence[str], starts: Sequence[int]) -> str:
    shown = [place for place in reversed(places) if place.lens]
    if not shown:
        return ""
    rows = [
        html.table_row(
            _title(place),
            *(
                _shaded(_word(word), f"{word!r}: {share:.0%}", share, _edge(position, starts))
                for position, (word, share) in enumerate(place.lens)
            ),
        )
        for place in shown
    ]
    title = "logit lens: the next word as read from each block; deeper is likelier"
    return _grid(title, words, rows, max(len(place.lens) for place in shown), starts)


def _maps(places: Sequence[RecordedPlace]) -> str:
    shown = [place for place in places if place.map_shape]
    if not shown:
        return ""
    words = "attention by head: a row is a token that looks, a column one that it looks at, from the first on"
    return f'<div style="margin:8px 0 2px;{html.MUTED}">{words}</div>{"".join(map(_layer, shown))}'


def _layer(place: RecordedPlace) -> str:
    heads, rows, columns = place.map_shape
    each, scale = rows * columns, max(1, _MAP_PX // columns)
    size = f'width="{scale * columns}" height="{scale * rows}"'
    parts = []
    for head in range(heads):
        source = _png(bytes(place.maps[head * each : (head + 1) * each]), columns, scale)
        ranks = [place.ranks[head // -(-heads // len(place.ranks))]] if place.ranks else []
        parts.append(
            f'<span style="display:inline-block;margin:0 10px 6px 0"><img alt="attention of head {head}" '
            f'src="{source}" {size} style="display:block;margin:0;max-width:none;'
            f'image-rendering:pixelated;border:1px solid {INK}"><span style="{html.MUTED}">head {head}</span> '
            f"{''.join(_chip(rank, f'rank {rank}') for rank in ranks)}</span>"
        )
    return f'<div style="margin:4px 0 2px"><b>{escape(place.name)}</b></div><div>{"".join(parts)}</div>'


def _png(shares: bytes, width: int, scale: int) -> str:
    """Return an image of one hue, as opaque as each share, as an address.

    It has its size on the page: where a notebook is not trusted, JupyterLab would smooth what it scales.
    """
    palette = bytes.fromhex(_HUE[1:]) * 256
    wide = b"".join(bytes((share,)) * scale for share in shares)
    step = width * scale
    lines = b"".join((b"\0" + wide[start : start + step]) * scale for start in range(0, len(wide), step))
    header = struct.pack(">IIBBBBB", step, len(shares) // width * scale, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", palette), (b"tRNS", bytes(range(256))), (b"IDAT", zlib.compress(lines, 9)))
    data = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in (*chunks, (b"IEND", b""))
    )
    return f"data:image/png;base64,{base64.b64encode(_PNG + data).decode()}"


def _others(places: Sequence[RecordedPlace]) -> str:
    rest = [place for place in places if not place.norms and not place.map_shape]
    rows = [
        html.table_row(_title(place), html.data_cells([str(place.shape), f"{place.calls} calls"])) for place in rest
    ]
    return html.table(("place", "shape", ""), rows) if rows else ""
