"""What `axon_nb.show.timeline` returns: spans of ranks or of a planned program, to save as a table, a trace or a page.

The page is one HTML file that needs neither a kernel nor a network: it can be zoomed, filtered, and sent to others.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import traitlets

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.inspection.feeds import cell_window, save_trace
from axon_nb.cluster.inspection.spans import SpanStore, SpanTable
from axon_nb.errors import UsageError
from axon_nb.records.ranks import name_ranks
from axon_nb.records.spans import Span
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.html import OTHER, SPAN_CODES, paints_for_page
from axon_nb.widgets.panel import View
from axon_nb.widgets.timeline.content import page_facts, summarize
from axon_nb.widgets.timeline.page import timeline_bundle, timeline_svg
from axon_nb.widgets.timeline.view import pack

if TYPE_CHECKING:
    import pandas as pd

_START = """
const bytes = Uint8Array.from(atob(document.getElementById("spans").textContent), (c) => c.charCodeAt(0));
const config = JSON.parse(document.getElementById("config").textContent);
const tools = JSON.parse(document.getElementById("tools").textContent);
const traits = { config, tools, snapshot: new DataView(bytes.buffer) };
const model = { get: (name) => traits[name], on() {}, off() {}, send() {} };
const el = document.getElementById("timeline");
el.replaceChildren();
const view = make();
view.initialize({ model });
view.render({ model, el });
"""
_PAGE_CSS = """body { margin: 16px; font-family: system-ui, sans-serif }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd } }
"""
_SUFFIXES = (".json", ".html", ".csv", ".svg")
_MAX_SPANS = 30_000
"""What Jupyter's server lets through at once."""


def page_traits(table: SpanTable, ranks: Sequence[int], *, title: str) -> tuple[dict[str, Any], bytes]:
    """Return the traits `config` and `snapshot` of a page that shows all these spans and gets no others.

    Args:
        table: The spans.
        ranks: Rows, from the top.
        title: What is shown.
    """
    origin = int(table.columns["start"].min()) if len(table) else 0
    end = int(table.columns["end"].max()) if len(table) else origin
    header = {
        "labels": [[SPAN_CODES.get(kind, OTHER), name, group] for kind, name, group in table.labels],
        "labelsFrom": 0,
        "groups": {name: name_ranks(members) for name, members in table.groups.items()},
        "oldest": table.first,
        "dropped": table.dropped,
        "lost": table.lost,
        "now": (end - origin) / 1e9,
        "focus": [0.0, (end - origin) / 1e9],
        "finished": True,
        **page_facts(summarize(table), ranks),
    }
    config = {"ranks": list(ranks), "title": title, "paints": paints_for_page()}
    return config, pack(table, header, origin_ns=origin)


def timeline_file(table: SpanTable, ranks: Sequence[int], *, title: str = "Timeline") -> str:
    """Return the page: live as in the notebook if scripts run, else a picture and a table."""
    config, snapshot = page_traits(table, ranks, title=title)
    spans = base64.b64encode(snapshot).decode()
    css = style("timeline")
    code = script("timeline").replace("export default ", "const make = ")
    fallback = timeline_bundle(table, ranks, title=title)["text/html"]
    # "</" would end the element that holds the text.
    config_json, tools_json = (
        json.dumps(value).replace("</", "<\\/") for value in (config, script("timeline/tools/tools"))
    )
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<style>{_PAGE_CSS}{css}</style></head><body><div id="timeline">{fallback}</div>'
        f'<script type="application/json" id="config">{config_json}</script>'
        f'<script type="application/json" id="tools">{tools_json}</script>'
        f'<script type="application/octet-stream" id="spans">{spans}</script>'
        f'<script type="module">{code}{_START}</script></body></html>\n'
    )


class Timeline:
    """The spans of some ranks, fetched again by each method.

    Args:
        cluster: The cluster.
        ranks: Which of its ranks.
        cell: Number of a notebook cell; None: all cells whose spans are stored.
    """

    def __init__(self, cluster: Cluster, ranks: list[int], *, cell: int | None = None) -> None:
        self._cluster = cluster
        self._ranks = ranks
        self._cell = cell

    @property
    def title(self) -> str:
        """Text such as ``In [3]``; empty for everything."""
        return "" if self._cell is None else f"In [{self._cell}]"

    def table(self) -> SpanTable:
        """Return the spans.

        Raises:
            UsageError: Ranks have no spans of that cell.
        """
        table = self._cluster.spans.recorded()
        if self._cell is not None:
            table = table.between(*cell_window(table, self._cell))
        if len(self._ranks) < self._cluster.world_size:
            table = table.pick(np.isin(table.columns["rank"], self._ranks))
        return table

    def to_frame(self) -> pd.DataFrame:
        """Return one row per span.

        The columns are rank, kind, name, group, start, seconds, bytes, stage, microbatch, waited_s, waited_for: the
        rank that started a collective last; line: that of the cell that called it; and clock: whose times these are,
        ``host``, ``gpu``, or ``launch`` if only the launch of a GPU's work is known. `start`, `seconds` and `waited_s`
        are in seconds.
        """
        return self.table().to_frame()

    def save(self, path: Path | str) -> None:
        """Write the spans, by suffix: .json (a trace for Perfetto), .html (a page), .csv (a table) or .svg (a picture).

        Raises:
            UsageError: The name has another suffix.
        """
        suffix = Path(path).suffix
        if suffix not in _SUFFIXES:
            raise UsageError(f"{str(path)!r} must end in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}.")
        table = self.table()
        if suffix == ".html":
            Path(path).write_text(timeline_file(table, self._ranks, title=self.title or "Timeline"), encoding="utf-8")
        elif suffix == ".svg":
            picture = timeline_svg(table, self._ranks, title=self.title or "Timeline")
            Path(path).write_text(picture, encoding="utf-8")
        elif suffix == ".csv":
            table.to_frame().to_csv(path, index=False)
        else:
            save_trace(table, path)

    def __repr__(self) -> str:
        return timeline_bundle(self.table(), self._ranks, title=self.title)["text/plain"]

    def _ipython_display_(self) -> None:
        """Show nothing: the view was shown when this was created."""


class FinishedTimelineView(View):
    """A timeline that gets no more spans.

    Args:
        table: The spans; of many, the first are shown.
        ranks: Rows, from the top.
        title: What is shown.
    """

    _esm = script("timeline")
    _css = style("timeline")

    tools = traitlets.Unicode(script("timeline/tools/tools")).tag(sync=True)
    """The script of features that a page loads only when they are used."""
    config = traitlets.Dict().tag(sync=True)
    snapshot = traitlets.Bytes(b"").tag(sync=True)

    def __init__(self, table: SpanTable, ranks: Sequence[int], *, title: str) -> None:
        config, snapshot = page_traits(table.head(_MAX_SPANS), ranks, title=title)
        super().__init__(config=config, snapshot=snapshot)


class PlannedTimeline(Timeline):
    """The spans of a planned program, to save or to show.

    Args:
        spans: The spans of one rank of each kind.
        title: What is shown.
    """

    def __init__(self, spans: Sequence[Span], title: str) -> None:
        store = SpanStore()
        store.add(sorted(spans, key=lambda span: span.end_ns))
        self._table = store.table()
        self._ranks = sorted({span.rank for span in spans})
        self._title = title

    @property
    def title(self) -> str:
        """What was planned."""
        return self._title

    def table(self) -> SpanTable:
        """Return the spans."""
        return self._table

    def view(self) -> FinishedTimelineView:
        """Return the view for a notebook."""
        return FinishedTimelineView(self._table, self._ranks, title=self._title)

    def bundle(self) -> dict[str, str]:
        """Return the spans as `text/html` and `text/plain`, which need neither a kernel nor scripts."""
        return timeline_bundle(self._table, self._ranks, title=self._title)
