"""Bare pages of each view, as anywidget makes them, with the data of a job on some ranks."""

from __future__ import annotations

import base64
import itertools
import json
import math
import random
from collections.abc import Callable
from typing import Any

from axon_nb.cluster.inspection.spans import SpanStore
from axon_nb.records.memory import MemoryPrediction, MemorySetup, WhatIfState
from axon_nb.records.spans import Span
from axon_nb.records.telemetry import Activity, RankState
from axon_nb.records.training.job import Bar
from axon_nb.records.training.steps import play
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.cell.activity import Clock, RankHistory, encode
from axon_nb.widgets.cell.views import RankStrip
from axon_nb.widgets.html import OTHER, SPAN_CODES, paints_for_page
from axon_nb.widgets.memory.view import MemoryView
from axon_nb.widgets.shards import ShardsView
from axon_nb.widgets.timeline.content import page_facts, summarize
from axon_nb.widgets.timeline.view import pack
from axon_nb.widgets.watch.view import WatchView
from tests.support.records.jobs import answers, report, row
from tests.support.records.memory_replies import GIB, MIB, use
from tests.support.records.memory_replies import answers as memory_answers
from tests.support.records.shard_records import split
from tests.support.records.steps import MS, straggling_spans
from tests.support.records.steps import span_of as _span

_PAGE = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>
<style>body {{ margin: 12px; background: {page} }}{style}</style></head>
<body data-jp-theme-light="{light}"><main id="el"></main><script type="module">
{script}
const bytes = (text) => new DataView(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
const traits = JSON.parse({traits}, (_, value) => (value?.base64 === undefined ? value : bytes(value.base64)));
window.sent = [];
window.handlers = {{}};
const model = {{
  get: (name) => traits[name],
  on: (name, handler) => (handlers[name] = handler),
  off: (name) => delete handlers[name],
  send: (message) => sent.push(message),
}};
const el = document.getElementById("el");
const made = make();
const closed = made.initialize?.({{ model }});
const gone = made.render({{ model, el }});
window.append = (text) => handlers["msg:custom"]({{ op: "append" }}, [bytes(text)]);
window.end = () => {{
  gone();
  closed?.();
  el.replaceChildren();
  return Object.keys(handlers).length;
}};
</script></body></html>"""


def page_html(name: str, traits: dict[str, Any], *, dark: bool = False) -> str:
    """A page with one view.

    Args:
        name: Of the view.
        traits: What the widget has.
        dark: Whether the page has JupyterLab's dark theme.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, (bytes, memoryview)):
            return {"base64": base64.b64encode(bytes(value)).decode()}
        raise TypeError(type(value))

    return _PAGE.format(
        name=name, style=style(name), script=script(name).replace("export default ", "const make = "),
        traits=json.dumps(json.dumps(traits, default=plain)).replace("</", "<\\/"),
        light=str(not dark).lower(), page="#111" if dark else "#fff",
    )  # fmt: skip


def _pipeline_spans(ranks: int) -> list[Span]:
    orders: list[list[tuple[str, int, int]]] = []
    for rank in range(ranks):
        warmup = min(8, ranks - rank)
        order = [("F", rank, m) for m in range(warmup)]
        for m in range(8):
            order.append(("B", rank, m))
            if warmup + m < 8:
                order.append(("F", rank, warmup + m))
        orders.append(order)
    spans = []
    for step in range(3):
        offset = step * 360 * MS
        played = [
            own._replace(
                group="1", sequence=step + 1, start_ns=own.start_ns + offset, end_ns=own.end_ns + offset - MS
            )
            for own in play(orders, {"F": 0.009, "B": 0.018})
        ]  # fmt: skip
        spans += played
        for rank in range(ranks):  # between two actions of a rank it waits for a message
            own_actions = sorted((own for own in played if own.rank == rank), key=lambda own: own.start_ns)
            spans += [
                before._replace(kind="wait", name="RECV", start_ns=before.end_ns, end_ns=after.start_ns)
                for before, after in itertools.pairwise(own_actions)
                if after.start_ns - before.end_ns > 2 * MS
            ]
        spans += [_span(r, "optimizer", "AdamW", step * 360 + 335, step * 360 + 341) for r in range(ranks)]
    return [*spans, *(_span(rank, "cell", "In [12]", 0, 1080) for rank in range(ranks))]


def timeline(ranks: int, spans: list[Span] | None = None, *, finished: bool = True) -> dict[str, Any]:
    """The timeline of spans; by default of a straggling job."""
    store = SpanStore()
    store.set_groups({"0": range(ranks), "1": range(ranks)})
    store.add(straggling_spans(ranks) if spans is None else spans)
    table = store.table()
    end = int(table.columns["end"].max()) / 1e9
    header = {
        "labels": [[SPAN_CODES.get(kind, OTHER), name, group] for kind, name, group in table.labels],
        "labelsFrom": 0, "groups": {"0": f"ranks 0-{ranks - 1}"}, "oldest": 0, "dropped": 0, "lost": 0, "now": end,
        "number": 1, "restart": True, "focus": [0.0, end], "finished": finished,
        **page_facts(summarize(table), range(ranks)),
    }  # fmt: skip
    config = {"ranks": list(range(ranks)), "title": "In [9]", "paints": paints_for_page()}
    tools = script("timeline/tools/tools")
    return {"config": config, "tools": tools, "snapshot": pack(table, header, origin_ns=0)}


def watch(ranks: int) -> dict[str, Any]:
    """A job that has run for some minutes."""
    view, noise = WatchView(lambda: None), random.Random(3)
    words = dict.fromkeys(range(ranks - 1), f"waiting in all_reduce at line 6 for rank {ranks - 1}, for 0.3 s")
    for second in range(40):  # an earlier cell, which has also logged an accuracy
        logged = row(4 * second, (2, 0), loss=3 + 9 * math.exp(-second / 20), accuracy=second / 50)
        earlier = [report(rank, [logged], cell=2, steps_per_s=4.0, communication=0.2) for rank in range(ranks)]
        view.add([answers(*earlier)], second - 700.0)
    view.add([answers(*(report(rank, cell=None) for rank in range(ranks)))], -650.0)
    for second in range(200):
        steps = range(2 * second, 2 * second + 2)
        slow = 1.5 if 130 < second < 150 else 2.3
        reported = []
        for rank in range(ranks):
            rows = [
                row(step, (4, 0), loss=2.6 + 9 * math.exp(-step / 18) + noise.random() / 5,
                    grad_norm=0.6 + 3 * math.exp(-step / 25) + noise.random() / 20 + (9 if step == 231 else 0),
                    lr=3e-4 * 0.5 ** (step // 100))
                for step in steps
            ]  # fmt: skip
            bars = [Bar("epochs", 0, 3, 10, float(second), False),
                    Bar("steps", 1, 2 * second - 3 * (rank == ranks - 1), 640, float(second), False)]  # fmt: skip
            reported.append(report(rank, rows, bars=bars, cell=4, steps_per_s=slow + noise.random() / 50,
                               items_per_s=32.0, communication=0.25 + 0.1 * noise.random()))  # fmt: skip
        view.add([answers(*reported, words=words)], float(second))
    view.refresh(unseen=True)
    return _traits(view)


def memory(ranks: int, *, device: bool = True) -> dict[str, Any]:
    """Ranks of which one uses more than the others, with an estimate and a scenario."""
    gib = {"parameters": 6.63, "gradients": 0.2, "optimizer": 13.26, "buffers": 0.13, "activations": 29.2,
           "unsharded": 0.82, "communication": 1.6, "fragmentation": 1.7, "other": 0.6}  # fmt: skip
    uses, noise = [], random.Random(5)
    for rank in range(ranks):
        sizes = {**gib, "activations": (48.4 if rank == 2 else 29.2) + noise.random() / 2}
        by_role = {role: round(size * GIB) for role, size in sizes.items()}
        total = sum(by_role.values())
        uses.append(
            use(rank, source="allocator", by_role=by_role, peak=total + GIB, capacity=80 * GIB, occupied=total + GIB,
                resident=3 * GIB, resident_peak=4 * GIB)
            if device
            else use(rank, resident=333 * MIB, resident_peak=340 * MIB, capacity=round(20.3 * GIB))
        )  # fmt: skip
    setup = MemorySetup(ranks, "full_shard", ranks, optimizer="adamw", batch=4)
    asked = MemorySetup(2 * ranks, "full_shard", 2 * ranks, optimizer="adamw", batch=4, activation_checkpointing=True)
    held = {role: round(size * GIB) for role, size in gib.items() if role != "activations"}
    peak = {**held, "activations": 29 * GIB}
    half = {role: size // 2 for role, size in peak.items()}
    now = MemoryPrediction(setup, "simulated", 0, {0: held}, {0: peak}, when="in backward of block17")
    then = MemoryPrediction(asked, "simulated", 0, {0: held}, {0: half}, when="in backward of block17")
    view = MemoryView("model, optimizer", lambda setup: None)
    view.show(memory_answers(*uses))
    view.show_what_if(WhatIfState(setup, True, asked, then, now))
    view.refresh(unseen=True)
    return _traits(view)


def shards(ranks: int) -> dict[str, Any]:
    """Parameters of blocks that are alike, over a mesh of two axes."""
    mesh = (ranks // 2, 2)
    found = split((32000, 4096), mesh, (0, 0), "embedding.weight")
    for block in range(8):
        for name, shape, dims in (
            ("norm1.weight", (4096, 1), (0, None)), ("attention.qkv.weight", (12288, 4096), (0, 0)),
            ("attention.out.weight", (4096, 4096), (0, 1)), ("mlp.up.weight", (11008, 4096), (0, 0)),
            ("mlp.down.weight", (4096, 11008), (0, 1)),
        ):  # fmt: skip
            found += split(shape, mesh, dims, f"blocks.{block}.{name}")
    view = ShardsView("model", found)
    return _traits(view)


def strip(ranks: int) -> dict[str, Any]:
    """A running cell in which one rank is late."""
    histories = [RankHistory(rank) for rank in range(ranks)]
    for step in range(40):
        for history in histories:
            at = 0.3 * step
            history.add(RankState(history.rank, Activity.RUNNING, 0, line=2), now=at + 0.1, since=at)
            if history.rank != 1:
                state = RankState(history.rank, Activity.WAITING, 0, line=3, call="all_reduce")
                history.add(state, now=at + 0.25, since=at + 0.1)
    view = RankStrip(range(ranks), title="In [5]")
    message = encode(histories, Clock(now=12.1, lost=0, finished=False), starts=[0] * ranks)
    traits = {"config": view.config, "snapshot": message}
    view.close()
    return traits


def _traits(view: Any) -> dict[str, Any]:
    traits = {key: value for key, value in view.get_state().items() if not key.startswith("_")}
    view.close()
    return traits


SAMPLES: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "memory": ("memory", memory),
    "memory-cpu": ("memory", lambda ranks: memory(ranks, device=False)),
    "pipeline": ("timeline", lambda ranks: timeline(ranks, _pipeline_spans(ranks))),
    "shards": ("shards", shards),
    "strip": ("strip", strip),
    "timeline": ("timeline", timeline),
    "watch": ("watch", watch),
}
"""By name: the view, and what it shows of a number of ranks."""
