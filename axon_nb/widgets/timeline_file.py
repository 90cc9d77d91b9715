"""A timeline as one HTML file that needs neither a kernel nor a network: to zoom, to filter, to send to somebody."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape

from axon_nb.cluster.span_table import SpanTable
from axon_nb.records.ranks import name_ranks
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.span_paints import OTHER, SPAN_CODES, paints_for_page
from axon_nb.widgets.span_wire import pack
from axon_nb.widgets.timeline_page import facts_of, page_facts, timeline_bundle

__all__ = ["timeline_file"]

_START = """
const bytes = Uint8Array.from(atob(document.getElementById("spans").textContent), (c) => c.charCodeAt(0));
const config = JSON.parse(document.getElementById("config").textContent);
const traits = { config, snapshot: new DataView(bytes.buffer) };
const model = { get: (name) => traits[name], on() {}, off() {}, send() {} };
const el = document.getElementById("timeline");
el.replaceChildren();
const view = make();
view.initialize({ model });
view.render({ model, el });
"""
_PAGE_CSS = """body { margin: 16px; font-family: system-ui, sans-serif }
@media (prefers-color-scheme: dark) {
  body { background: #111; color: #ddd; --jp-layout-color2: #333; --jp-ui-font-color1: #ddd }
}
"""


def timeline_file(table: SpanTable, ranks: Sequence[int], *, title: str = "Timeline") -> str:
    """The page: live as in the notebook where scripts run, the picture and the table where they do not."""
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
        **page_facts(facts_of(table), ranks),
    }
    config = {"ranks": list(ranks), "title": title, "paints": paints_for_page()}
    spans = base64.b64encode(pack(table, header, origin_ns=origin)).decode()
    css = style("timeline")
    code = script("timeline").replace("export default ", "const make = ")
    fallback = timeline_bundle(table, ranks, title=title)["text/html"]
    # "</" would end the element that holds the text.
    told = json.dumps(config).replace("</", "<\\/")
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<style>{_PAGE_CSS}{css}</style></head><body><div id="timeline">{fallback}</div>'
        f'<script type="application/json" id="config">{told}</script>'
        f'<script type="application/octet-stream" id="spans">{spans}</script>'
        f'<script type="module">{code}{_START}</script></body></html>\n'
    )
